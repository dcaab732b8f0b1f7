"""The local engine as a plugin."""

from __future__ import annotations

from miles_core.hookspecs import hookimpl


class Local:
    """Decodes in the driver's process, on a CPU or GPU, with a copy of the weights of its own."""

    @hookimpl(name="local")
    def engine(self, config, tokenizer):
        """The engine "local"."""
        from miles_core.backends.local.engine import local_engine

        return local_engine(config, tokenizer)
