"""The SGLang engine as a plugin."""

from __future__ import annotations

from miles_core.backends.sglang.acceptance import Acceptance
from miles_core.hookspecs import hookimpl


class Sglang:
    """Drives SGLang servers over HTTP: starts, watches and restarts them, or uses servers that run already."""

    def __init__(self) -> None:
        self._acceptance = Acceptance()

    @hookimpl
    def metrics(self, rollout_id, values):
        """A warning when the draft of speculative decoding is no longer the policy's."""
        self._acceptance.see(rollout_id, values)

    @hookimpl(name="sglang")
    def engine(self, config, tokenizer, placement):
        """The engine "sglang"."""
        from miles_core.errors import ConfigError

        try:
            import aiohttp  # noqa: F401 - everything here speaks HTTP with it
        except ImportError:
            raise ConfigError("the engine sglang needs the package aiohttp", who="--engine sglang",
                              fix="pip install 'miles-core[sglang]'") from None
        from miles_core.backends.sglang.engine import SglangEngine

        return SglangEngine(config, tokenizer, placement)
