"""The SGLang engine as a plugin."""

from __future__ import annotations

from miles_core.backends.sglang.acceptance import Acceptance
from miles_core.hookspecs import hookimpl


class Sglang:
    """Drives SGLang servers over HTTP: starts, watches and restarts them, or uses servers that run already."""

    hookspecs = "miles_core.backends.sglang.hookspecs"

    provides = ("engine:sglang:servers:server_args:cuda-ipc:nccl:checkpoints:checkpoint-deltas",)

    def __init__(self) -> None:
        self._acceptance = Acceptance()

    @hookimpl
    def option_surface(self):
        """--sglang-* and --router-*."""
        from miles_core.backends.sglang.forwarded import ServerArguments

        return [ServerArguments()]

    @hookimpl
    def derive(self, config, note):
        """The engine where SGLang is here, its GPUs, placement, and fields of its servers."""
        from miles_core.backends.sglang.hardware import hardware
        from miles_core.backends.sglang.serving import serving

        return serving(hardware(config, note), note)

    @hookimpl
    def check(self, config, note):
        """Servers that would answer as another model than the one that is trained."""
        from miles_core.backends.sglang.checks import check_servers

        return check_servers(config, note)

    @hookimpl
    def plan_lines(self, config):
        """The servers, their GPUs, and how weights travel to them."""
        from miles_core.backends.sglang.hardware import lines

        return lines(config) if "server_args" in config.understood else []

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
