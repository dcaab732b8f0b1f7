"""The weight sync: the trainer's first rank writes a version's files, and the engine has its servers load them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.stages.sync import WRITTEN
from miles_vllm.files import checkpoint_of, discard_others, weights_folder, write

if TYPE_CHECKING:
    import torch

    from miles_core.config import RunConfig
    from miles_core.hosts import Handle
    from miles_core.types import Rank
    from miles_vllm.engine import VllmEngine


class FileSender:
    """See miles_core.stages.sync.Sender. The first rank writes `folder`/version-N; the others take part in the stream.

    Args:
        checkpoint: see `files.write`.
        limit: see `files.write`.
    """

    takes_stacks = False

    def __init__(self, folder: Path, checkpoint: Path, limit: int):
        self.folder, self.checkpoint, self.limit = folder, checkpoint, limit

    def open(self, rank: Rank) -> None:
        self._leads = rank.index == 0

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if self._leads:
            return write(self.folder / f"version-{version}", stream, self.checkpoint, self.limit)
        for _ in stream:
            pass
        return {}

    def close(self) -> None:
        """Files stay: a server that is started anew loads the last of them."""


class FileSync:
    """See miles_core.stages.sync.WeightSync. After an error the engine stays paused."""

    def __init__(self, config: RunConfig):
        self._mode = config.rollout.pause_generation_mode
        self._folder = weights_folder(config)
        self._sender = FileSender(self._folder, checkpoint_of(config), config.perf.update_weight_buffer_size)
        self._connected = False

    async def sync(self, trainer: Handle, engine: VllmEngine, version: int) -> dict[str, float]:
        """Figures: pause_s, tensors, bytes, load_s. Called again for the version that the engine has, it brings up
        servers that were started anew, from the files that are there."""
        catching_up = engine.version == version
        if catching_up and not engine.stale(version):
            return {"tensors": 0, "bytes": 0}
        begin, folder = time.perf_counter(), self._folder / f"version-{version}"
        figures: dict[str, float] = {"tensors": 0, "bytes": 0}
        if not catching_up:
            await engine.pause(self._mode)
            figures["pause_s"] = time.perf_counter() - begin
        if not catching_up or not folder.is_dir():
            if not self._connected:
                await trainer.connect(self._sender)
                self._connected = True
            figures |= await trainer.send(version)
        if (written := WRITTEN.get(None)) is not None:
            written(folder, engine.stale(version))
        begin = time.perf_counter()
        await engine.load(folder, version)
        figures["load_s"] = time.perf_counter() - begin
        discard_others(folder)
        if not catching_up:
            await engine.resume()
        return figures
