"""Writing a checkpoint: planned by Megatron, staged or copied piece by piece, written at once or beside training.

Megatron's `dist_checkpointing.save(..., async_sharded_save=True)` plans the files and gives what writes them. Its own
callers fork a process and end a save with collectives of training; here a thread writes, since torch's zip writer and
the disk run without Python's lock, and the ranks' threads have a process group of their own to agree that all is there.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from miles_local.stored import digest

from miles_core.record.publish import write_text
from miles_core.types import TRACKER
from miles_megatron import cpu
from miles_megatron.async_save import AsyncSave

cpu.install()

from megatron.core import dist_checkpointing  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy  # noqa: E402

STATE = "miles.json"
Stage = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


class _Strategy(TorchDistSaveShardedStrategy):
    """One file and one writer; keeps what Megatron's end of a save would have used."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer, planned):
        self.writer, self.metadata = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned)


class Part:
    """A planned folder of tensors; every rank makes it.

    Args:
        sharded: what Megatron saves.
        stage: says where copies of the tensors will be; without, each is written as it is then.
    """

    def __init__(self, sharded: dict, folder: Path, stage: Stage | None):
        strategy = _Strategy()
        request = dist_checkpointing.save(sharded, str(folder), strategy, async_sharded_save=True)
        self._folder, self._writer, self._metadata = folder, strategy.writer, strategy.metadata
        self._write = request.async_fn
        self._rank, files, self._results = request.async_fn_args or (0, (), None)
        self._files = []
        for path, key, (data, tensors) in files:  # a list of one, or none
            if stage is not None:
                items = [item for item, _ in tensors]
                tensors = zip(items, stage([tensor for _, tensor in tensors]), strict=True)
            self._files.append((path, key, (data, _one_by_one(tensors))))

    def write(self) -> list:
        """Write this rank's file, if it has one; what the index has to know of it.

        Raises:
            RuntimeError: holds the text of the error that it met.
        """
        if self._write is not None:
            self._write(self._rank, self._files, self._results)
        results = self._writer.retrieve_write_results()
        if not isinstance(results, list):  # an error and where it was raised
            raise RuntimeError(str(results[0]))
        return results

    def finish(self, results: list[list]) -> None:
        """Write the index, on the first rank.

        Args:
            results: every rank's.
        """
        self._writer.finish(self._metadata, results)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))


def _one_by_one(tensors: Iterable[tuple]) -> Iterator[tuple]:
    """Each on the host and by itself: a view would be written with all that it is a view of."""
    for item, tensor in tensors:
        host = tensor.detach().cpu()
        yield item, host if host.untyped_storage().nbytes() == host.nbytes else host.clone()


@dataclass
class Staged:
    """A checkpoint that is planned, and staged where it is written beside training.

    Args:
        unpublished: publishes the temporary folder when it ends well, and removes it when it does not.
        state: of the run, beside the tensors.
    """

    unpublished: contextlib.ExitStack
    parts: Sequence[Part]
    temporary: Path
    target: Path
    iteration: int
    state: dict

    def publish(self, async_save: AsyncSave | None = None) -> None:
        """Write it, and publish it when every rank has; each comes here, and gets the error of any.

        Args:
            async_save: in whose thread this is.
        """
        group = None if async_save is None else async_save.group
        try:
            if async_save is not None:
                async_save.copy()
            mine: object = [part.write() for part in self.parts]
        except Exception as error:  # noqa: BLE001 - whatever it is, the first rank raises it
            mine = RuntimeError(f"{type(error).__name__}: {error}")
        every, wrong = _gathered(mine, group), None
        try:
            with contextlib.nullcontext() if async_save is None else async_save.publishing:
                with self.unpublished:
                    if async_save is not None:
                        async_save.going_on()
                    if every is not None:
                        self._complete(every)
                if every is not None:
                    write_text(self.target.parent / TRACKER, f"{self.iteration}\n")
        except Exception as error:  # noqa: BLE001 - raised on every rank
            wrong = error
        if (wrong := of_first_rank(wrong, group)) is not None:
            raise wrong

    def _complete(self, every: Sequence) -> None:
        """What only the first rank writes: indices, and the run's own state."""
        if failed := [one for one in every if isinstance(one, Exception)]:
            raise failed[0]
        for part, results in zip(self.parts, zip(*every, strict=True), strict=True):
            part.finish(list(results))
        files = self.state.get("files", {})
        for name, data in files.items():
            (self.temporary / name).write_bytes(data)
        state = {**self.state, **({"files": sorted(files)} if files else {})}
        (self.temporary / STATE).write_text(json.dumps({"iteration": self.iteration, "state": state,
                                                        "digest": digest(state)}))


def _gathered(mine: object, group: dist.ProcessGroup | None) -> list | None:
    """Every rank's object, on the first rank."""
    if dist.get_world_size() == 1:
        return [mine]
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every, group=group)
    return every


def of_first_rank(mine: object, group: dist.ProcessGroup | None = None) -> Any:
    """The first rank's object, on every rank."""
    if dist.get_world_size() == 1:
        return mine
    box = [mine]
    dist.broadcast_object_list(box, group=group)
    return box[0]
