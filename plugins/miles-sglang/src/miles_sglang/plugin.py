"""The plugin: the engine, the options of its servers, and the ways in which weights travel to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from miles_core import hookimpl, option
from miles_sglang.acceptance import Acceptance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from miles_report.doctor.finding import Rule

    from miles_core.config import RunConfig
    from miles_core.config.surfaces import Surface
    from miles_core.plugins.bind import Hooks
    from miles_core.stages.placement import Placement
    from miles_core.stages.rollout import Engine
    from miles_core.stages.sync import WeightSync


@dataclass(frozen=True, kw_only=True)
class SglangOptions:
    """The servers and their router. Fields of the installed SGLang's ServerArgs belong in the table too, without a
    prefix in a run file (`mem_fraction_static = 0.8`) and as --sglang-* on the command line; --router-* are the
    router's."""

    server_command: list[str] = option(
        [], "Command to start a server; default: this Python -m sglang.launch_server.", flags=("--server-command",)
    )
    server_concurrency: int = option(
        512, "Maximum requests in flight per engine.", flags=("--server-concurrency", "--sglang-server-concurrency"),
        within=(1,)
    )
    server_start_timeout: float = option(
        900.0, "Seconds until a starting server must answer.", flags=("--server-start-timeout",)
    )
    health_check_interval: float = option(
        3.0, "Seconds between health checks of each server.",
        flags=("--health-check-interval", "--rollout-health-check-interval"),
    )
    health_check_timeout: float = option(
        10.0, "Seconds without an answer after which a server that is not compiling counts as dead.",
        flags=("--health-check-timeout", "--rollout-health-check-timeout"),
    )
    max_engine_restarts: int = option(
        3, "How often one engine is restarted before the run ends.", flags=("--max-engine-restarts",)
    )
    router: Literal["smg", "sglang-router", "none"] | None = option(
        None, "Router of the engines; default: smg, or none for one engine. sglang-router drops routed experts.",
        flags=("--router",),
    )
    router_ip: str | None = option(
        None, "Address of a router that is already running.", flags=("--router-ip", "--sglang-router-ip")
    )
    router_port: int | None = option(
        None, "Port of that router, or of the one that the run starts.", flags=("--router-port", "--sglang-router-port")
    )
    rollout_external: bool = option(
        False, "Use servers that are already running.", flags=("--rollout-external",), off=("--no-rollout-external",)
    )
    rollout_external_engine_addrs: list[str] = option(
        [], "Addresses of these servers, HOST:PORT.", flags=("--rollout-external-engine-addrs",)
    )
    readers: int | None = option(
        None, "Processes that read answers beside the driver; 0: the driver does. Default: one for 8 cores, at most 4.",
        flags=("--readers",), within=(0,)
    )


class Sglang:
    """Drives SGLang servers over HTTP: starts, watches and restarts them, or uses servers that run already."""

    default = True
    hookspecs = "miles_sglang.hookspecs"
    provides = ("engine:sglang:servers:server_args:cuda-ipc:nccl:checkpoints:checkpoint-deltas",
                "weight_sync:ipc:cuda-ipc", "weight_sync:broadcast:nccl", "weight_sync:disk:checkpoints",
                "weight_sync:disk-delta:checkpoint-deltas")

    def __init__(self, options: SglangOptions) -> None:  # `sglang_options` has them as `derive` leaves them
        self._acceptance = Acceptance()

    @hookimpl
    def option_surface(self) -> Iterable[Surface]:
        """--sglang-* and --router-*."""
        from miles_sglang.forwarded import ServerArguments

        return [ServerArguments()]

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """The engine where SGLang is here, its GPUs, placement, and fields of its servers."""
        from miles_sglang.hardware import hardware
        from miles_sglang.serving import serving

        return serving(hardware(config, note), note)

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """Servers that would answer as another model than the one that is trained."""
        from miles_sglang.checks import check_servers

        return check_servers(config, note)

    @hookimpl
    def plan_lines(self, config: RunConfig) -> Iterable[tuple[str, str]]:
        """The servers, their GPUs, and how weights travel to them."""
        from miles_sglang.hardware import lines

        return lines(config) if "server_args" in config.understood else []

    @hookimpl
    def diagnose(self) -> Iterable[Rule]:
        """Servers without memory, and drafts that no longer fit."""
        from miles_sglang.diagnosis import rules

        return rules()

    @hookimpl
    def metrics(self, rollout_id: int, values: dict[str, float]) -> None:
        """A warning when the draft of speculative decoding is no longer the policy's."""
        self._acceptance.see(rollout_id, values)

    @hookimpl(name="sglang")
    def engine(self, config: RunConfig, tokenizer: Any, placement: Placement, hooks: Hooks) -> Engine:
        """The engine "sglang"."""
        from miles_sglang.engine import SglangEngine
        from miles_sglang.launch import check_installed
        from miles_sglang.serving import with_engine_args

        check_installed(config)
        return SglangEngine(with_engine_args(config, hooks), tokenizer, placement)

    @hookimpl("weight_sync", name="ipc")
    def ipc(self, config: RunConfig) -> WeightSync:
        """SGLang on the trainer's own GPUs opens the trainer's memory (CUDA IPC)."""
        from miles_sglang.sync.ipc import IpcSender

        return _servers(config, IpcSender)

    @hookimpl("weight_sync", name="broadcast")
    def broadcast(self, config: RunConfig) -> WeightSync:
        """The trainer broadcasts to SGLang on other GPUs (NCCL)."""
        from miles_sglang.sync.broadcast import BroadcastSender

        return _servers(config, BroadcastSender)

    @hookimpl("weight_sync", name="disk")
    def disk(self, config: RunConfig) -> WeightSync:
        """A complete checkpoint for each version, in a folder that all share."""
        from miles_sglang.sync.disk import DiskSender

        return _servers(config, DiskSender, _folder(config))

    @hookimpl("weight_sync", name="disk-delta")
    def disk_delta(self, config: RunConfig) -> WeightSync:
        """Files of what changed, in a folder that all share; each engine host keeps a checkpoint of its own."""
        from miles_sglang.sync.disk import DeltaSender

        return _servers(config, DeltaSender, _folder(config))


def sglang_options(config: RunConfig) -> SglangOptions:
    """The options of [sglang] in a run, typed."""
    options: dict[str, Any] = config.options.get("sglang", {})
    return SglangOptions(**options)


def _servers(config: RunConfig, kind: Callable[..., Any], *args: Path) -> WeightSync:
    from miles_sglang.sync.sender import Settings
    from miles_sglang.sync.sequence import ServerSync

    settings = Settings.of(config)
    return ServerSync(config, lambda targets: kind(settings, targets, *args))


def _folder(config: RunConfig) -> Path:
    from pathlib import Path

    return Path(cast("str", config.perf.update_weight_disk_dir))  # the plan has asked for it
