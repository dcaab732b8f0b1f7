"""The weight sync "adapter": the base travels once, as it would without adapters; after that adapters alone.

To SGLang they go as one request for each server, bytes included. The order around it is that of every sync with
servers (miles_sglang/sync/sequence.py): the engine is paused, and serves again when the version is confirmed. That a
server has the adapter it says itself. It cannot be asked for sums of its bits, as of the base: the adapter gets its
place on the device with the first request, and the check of SHA-256 that the request offers ends a server of SGLang
0.5.16 also where all are right (its AttributeError: tp_rank).
"""

from __future__ import annotations

import base64
import itertools
import pickle
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from miles_sglang.sync.releases import adapter_fields
from miles_sglang.sync.sender import Settings
from miles_sglang.sync.sequence import ServerSync
from miles_sglang.sync.servers import Target, for_all, get, post

from miles_core.errors import SyncError
from miles_core.plugins.resolve import chosen
from miles_core.types import Rank
from miles_lora import peft
from miles_lora.peft import Shape
from miles_lora.targets import adapter_of

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig
    from miles_core.hosts import Handle
    from miles_core.stages.sync import Sender, WeightSync


def weight_sync(config: RunConfig, shape: Shape, name: str, backed_up: bool) -> WeightSync:
    """To the run's engine.

    Args:
        name: of the adapter in servers.
        backed_up: servers keep their weights while they sleep.
    """
    if chosen(config, "engine") == "sglang":
        return AdapterSync(config, shape, name, backed_up)
    if config.perf.placement == "local" and config.perf.trainer_host == "process":
        from miles_local.shared_memory import SharedMemory

        return SharedMemory(config)
    from miles_core.stages.sync import InProcess

    return InProcess(config.rollout.pause_generation_mode)


class AdapterSync(ServerSync):
    """See stages.sync.WeightSync and `weight_sync`."""

    def __init__(self, config: RunConfig, shape: Shape, name: str, backed_up: bool):
        super().__init__(config, self._made)
        self._settings, self._shape, self._name = Settings.of(config), shape, name
        self._colocated, self._new = config.perf.colocate, True
        self._forgetful = bool(config.perf.colocate and config.perf.offload_rollout and not backed_up)

    def _made(self, targets: tuple[Target, ...]) -> Sender:
        from miles_sglang.sync.broadcast import BroadcastSender
        from miles_sglang.sync.ipc import IpcSender

        base = (IpcSender if self._colocated else BroadcastSender)(self._settings, targets)
        return AdapterSender(self._settings, targets, base, self._shape, self._name, first=self._new,
                             always=self._forgetful)

    async def _connect(self, trainer: Handle, targets: tuple[Target, ...], new: bool) -> None:
        self._new = new
        await super()._connect(trainer, targets, new)


class AdapterSender:
    """See stages.sync.Sender.

    Args:
        base: sends the base.
        first: the servers have none yet, or another.
        always: they forget it between two syncs.
    """

    takes_stacks = False

    def __init__(self, settings: Settings, targets: tuple[Target, ...], base: Sender, shape: Shape, name: str, *,
                 first: bool, always: bool):
        self.settings, self.targets, self.base, self.shape, self.name = settings, targets, base, shape, name
        self.always, self._due = always, first or always
        self._count: int | None = None

    def open(self, rank: Rank) -> None:
        """
        Raises:
            SyncError: a server that cannot be reached, or that was started without LoRA.
        """
        self._leads = rank.index == 0
        if self._due:
            self.base.open(rank)
        if self._leads:
            each = for_all(self.targets, self._able)
            self._info = {target.name: info for target, info in zip(self.targets, each, strict=True)}

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        adapters, weights = self._taken(stream)
        figures: dict[str, float] = {}
        if self._due:
            figures = self.base.send(weights, version)
            self._due = self.always
            if not self.always:
                self.base.close()
        elif hasattr(stream, "close"):
            stream.close()  # on every rank at the same place: nothing more is gathered
        if not self._leads:
            return {}
        begin = time.perf_counter()
        config = peft.config(self.shape, adapters, self.settings.checkpoint)
        packed = base64.b64encode(pickle.dumps(adapters)).decode()
        for_all(self.targets, lambda target: self._load(target, config, packed))
        size = sum(tensor.nbytes for tensor in adapters.values())
        whole = {"tensors": len(adapters) + figures.get("tensors", 0), "bytes": size + figures.get("bytes", 0)}
        return {**figures, **whole, "adapter_bytes": size, "adapter_s": time.perf_counter() - begin}

    def close(self) -> None:
        self.base.close()

    def _taken(self, stream: Iterator[tuple[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], Iterator[Any]]:
        """The adapters, which come first, and what comes after them. Every rank takes as many steps."""
        adapters: dict[str, torch.Tensor] = {}
        usual, wanted = getattr(torch, self.settings.source), getattr(torch, self.settings.target)
        for name, tensor in itertools.islice(stream, None if self._due else self._count):
            if adapter_of(name) is None:
                return adapters, itertools.chain([(name, tensor)], stream)
            dtype = wanted if tensor.dtype == usual else tensor.dtype
            adapters[name] = tensor.detach().to("cpu", dtype, copy=True) if self._leads else tensor.new_empty(0)
            self._count = len(adapters)
        return adapters, iter(())

    def _load(self, target: Target, config: dict[str, object], packed: str) -> None:
        """
        Args:
            config: the adapter's, as PEFT has it.
            packed: its tensors, by name.

        Raises:
            SyncError: the server refuses the adapter, or does not say that it has it.
        """
        timeout = self.settings.timeout
        if self.name in _served(target, timeout):
            post(target, "unload_lora_adapter", {"lora_name": self.name}, timeout=timeout)
        body = adapter_fields(self._info[target.name], packed, target.size)
        post(target, "load_lora_adapter_from_tensors", {"lora_name": self.name, "config_dict": config, **body},
             timeout=timeout)
        if self.name not in (served := _served(target, timeout)):
            raise SyncError(f"{target.name} does not serve the adapter that was sent to it", who=target.url,
                            got=", ".join(served), code="lora-adapter-not-served", fix="look at the engine's log")

    def _able(self, target: Target) -> dict[str, Any]:
        info = get(target, "server_info", timeout=self.settings.timeout)
        if not info.get("enable_lora"):
            raise SyncError(f"{target.name} was started without LoRA", code="lora-server-without-lora", who=target.url,
                            fix=f"start it with --enable-lora --max-lora-rank {self.shape.rank} --lora-target-modules "
                            "and the layers' names, or leave --weight-sync out: merged weights do not need it")
        return info


def _served(target: Target, timeout: float) -> list[str]:
    """What a server answers by: its model and adapters."""
    return [one["id"] for one in get(target, "v1/models", timeout=timeout)["data"]]
