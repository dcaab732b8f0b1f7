"""Weights through files: a checkpoint in a folder that trainer and engines share, or only what changed since the last.

disk         every version is a complete Hugging Face checkpoint that servers load.
disk-delta   the first version is complete; after that, files hold the elements that changed. Each engine host keeps a
             copy of the checkpoint, writes the changes into it and loads the copy. Reinforcement learning at a small
             learning rate changes few bfloat16 values a step: the files get as small as that.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from miles_local.buckets import sent_as
from safetensors.torch import save_file

from miles_core.stages.sync import WRITTEN
from miles_core.types import Rank
from miles_sglang.sync.sender import Meter, Servers, Settings
from miles_sglang.sync.servers import Target, beside, for_all, load, plain, post
from miles_sglang.sync.verify import Ledger

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DiskSender:
    """See stages.sync.Sender. The first rank writes `folder`/version-N; the others only take part in the stream."""

    takes_stacks = False

    def __init__(self, settings: Settings, targets: tuple[Target, ...], folder: Path):
        self.settings, self.targets, self.folder = settings, targets, folder

    def open(self, rank: Rank) -> None:
        self._leads = rank.index == 0
        if self._leads:
            self._servers = Servers(self.targets, self.settings)

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if not self._leads:
            for _ in stream:
                pass
            return {}
        meter, ledger = Meter(), Ledger()
        extra = self._publish(self._cast(stream, ledger), version)
        figures = meter.figures(ledger, self._servers.verify(ledger)) | extra
        for old in self.folder.glob("version-*"):
            if old.name != f"version-{version}":
                shutil.rmtree(old, ignore_errors=True)
        return figures

    def close(self) -> None:
        """Folders stay: engines may have been started from the last."""

    def _publish(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        """Write the version and have the servers load it; further figures."""
        folder = self.folder / f"version-{version}"
        self._export(stream, folder)
        self._announce(folder)
        self._load(folder)
        return {}

    def _announce(self, folder: Path) -> None:
        """Tell who wants to know that a version's files are complete."""
        if (written := WRITTEN.get(None)) is not None:
            written(folder, self.targets)

    def _cast(self, stream, ledger: Ledger) -> Iterator[tuple[str, torch.Tensor]]:
        """The stream in the engine's dtype; its sums go to the ledger."""
        source, target = getattr(torch, self.settings.source), getattr(torch, self.settings.target)
        for name, tensor in self.settings.stream(stream, self._servers.names):
            sent = tensor.detach().to(sent_as(tensor, source, target))
            ledger.add([(name, sent)])
            yield name, sent

    def _export(self, stream, folder: Path) -> None:
        from miles_megatron.weights import export_hf

        export_hf(folder, self.settings.checkpoint, stream, beside=True)

    def _load(self, folder: Path) -> None:
        # Without a load_format the server would take its own, which says "dummy".
        body = {"model_path": str(folder.resolve()), "load_format": "auto", "flush_cache": False}
        for_all(self.targets, lambda target: post(target, "update_weights_from_disk", body,
                                                  timeout=self.settings.timeout))


class DeltaSender(DiskSender):
    """The first version after `open` is complete. A copy of what was sent last stays in the first rank's memory."""

    def open(self, rank: Rank) -> None:
        super().open(rank)
        self._held: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        # The same path on every host of an engine, and of no other run.
        self._copy = f"{tempfile.gettempdir()}/miles-weights-{uuid.uuid4().hex[:12]}"

    def close(self) -> None:
        """The hosts' copies are removed; of a server that is gone, it stays."""
        if self._leads:
            packed = plain({"drop": self._copy})
            for target in self.targets:
                beside(lambda target=target: load(target, packed, timeout=10))

    def _publish(self, stream, version: int) -> dict[str, float]:
        folder, base, self._version = self.folder / f"version-{version}", self._version, None
        if base is None:
            self._export(self._kept(stream), folder)
            figures = {}
        else:
            figures = self._write(stream, folder)
        self._announce(folder)
        change = {"folder": str(folder.resolve()), "copy": self._copy, "version": version, "base": base}
        reports, timeout = self._servers.reports, self.settings.timeout
        for_all(self.targets, lambda target: reports.ask(target, timeout, {"patch": change}, names_only=True))
        self._load(Path(self._copy))
        self._version = version
        return figures

    def _kept(self, stream) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            self._held[name] = tensor.to("cpu", copy=True).contiguous()
            yield name, self._held[name]

    def _write(self, stream, folder: Path) -> dict[str, float]:
        """Files of what changed, published by rename; figures on how much it was."""
        from miles_core.record.publish import publish

        tally = Tally()
        with publish(folder) as at:
            pending: dict[str, torch.Tensor] = {}

            def flush() -> None:
                if pending:
                    save_file(pending, at / f"changes-{tally.files:05d}.safetensors")
                    tally.files += 1
                    pending.clear()

            for name, tensor in stream:
                pending |= change(name, self._held[name], tensor.to("cpu").contiguous(), tally)
                if sum(one.numel() * one.element_size() for one in pending.values()) > self.settings.limit:
                    flush()
            flush()
        return {"bytes": tally.bytes, "density": tally.changed / tally.elements}


@dataclass
class Tally:
    """How much of a model changed.

    Args:
        bytes: that had to be written.
    """

    changed: int = 0
    elements: int = 0
    bytes: int = 0
    files: int = 0


def change(name: str, old: torch.Tensor, new: torch.Tensor, tally: Tally) -> dict[str, torch.Tensor]:
    """What has to be written to turn `old` into `new`, bit by bit; `old` becomes it here.

    Positions are int32 and count elements. A tensor that is smaller whole, or too large for them, is written whole.
    """
    bits = _BITS[new.element_size()]
    before, after = old.view(-1).view(bits), new.view(-1).view(bits)
    positions = (before != after).nonzero().view(-1)
    tally.changed += positions.numel()
    tally.elements += new.numel()
    if not positions.numel():
        return {}
    if positions.numel() * (4 + new.element_size()) >= new.numel() * new.element_size() or new.numel() >= 2**31:
        written = {name: new.clone()}
    else:
        written = {f"{name}#positions": positions.int(), f"{name}#values": new.view(-1)[positions]}
    before.copy_(after)
    tally.bytes += sum(one.numel() * one.element_size() for one in written.values())
    return written
