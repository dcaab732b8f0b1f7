"""The plugin: the engine, the options of its servers, and the way in which weights travel to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core import hookimpl, option

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_core.stages.placement import Placement
    from miles_core.stages.rollout import Engine
    from miles_core.stages.sync import WeightSync


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """The servers."""

    python: str | None = option(
        None, "Interpreter of the environment that has vLLM; default: this Python.", flags=("--vllm-python",)
    )
    args: list[str] = option(
        [], "Further arguments of vLLM, such as --vllm-args enforce-eager gpu-memory-utilization=0.8.",
        flags=("--vllm-args",)
    )
    concurrency: int = option(256, "Maximum requests in flight per server.", flags=("--vllm-concurrency",), within=(1,))
    start_timeout: float = option(900.0, "Seconds until a starting server must answer.")
    health_interval: float = option(3.0, "Seconds between two looks at each server.")
    health_timeout: float = option(30.0, "Seconds without an answer after which a server counts as dead.")
    max_restarts: int = option(3, "How often one server is restarted before the run ends.", within=(0,))


class Vllm:
    """Drives vLLM servers over HTTP: starts, watches and restarts them, and has them load the trainer's weights."""

    provides = ("engine:vllm:servers:vllm-files:cache=the engine's dtype", "weight_sync:vllm:vllm-files")

    def __init__(self, options: VllmOptions) -> None:
        self._options = options

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What these servers cannot do exactly."""
        from miles_vllm.checks import check_servers

        return check_servers(config, self._options)

    @hookimpl(name="vllm")
    def engine(self, config: RunConfig, tokenizer: Any, placement: Placement) -> Engine:
        """The engine "vllm"."""
        from miles_vllm.engine import VllmEngine

        return VllmEngine(config, self._options, tokenizer, placement)

    @hookimpl(name="vllm")
    def weight_sync(self, config: RunConfig) -> WeightSync:
        """The trainer writes files, and the servers load them."""
        from miles_vllm.sync import FileSync

        return FileSync(config)
