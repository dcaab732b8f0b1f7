"""Whole checkpoints from Hugging Face's format to torch_dist and back, a parameter at a time.

No model is ever in memory. It is built without storage, for the names, shapes and places of its parameters in a
torch_dist checkpoint; then each parameter is read, written and forgotten. A torch_dist checkpoint does not depend on a
layout, so that of one rank serves for all.

Several processes share the work by bytes and need nothing of each other before the end. An object of a class here lives
in each; `drive` calls them, through any host.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan, WriteItem
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from miles_core.backends.megatron import checkpoint, cpu, shards, weights
from miles_core.backends.megatron.model import build, transformer_config
from miles_core.backends.megatron.specs import ModelSpec, Rule, WeightMap
from miles_core.errors import CheckpointError, ConfigError, WaitError
from miles_core.hosts import Handle, within
from miles_core.types import Rank

cpu.install()

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

WAIT = 3600.0
"""Seconds that one call may take: of a parameter to be read and written, or of one process for another at the end."""

_SLICE = 0.5
"""Seconds of work between two looks at the progress; a parameter in work is finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion; it can be pickled.

    Args:
        source: a Hugging Face directory, or one iteration of a torch_dist checkpoint.
        target: an empty folder that the caller makes and publishes.
        spec, weight_map: the architecture.
        dtype: of what is written; None keeps each tensor's own.
        shard_bytes: most bytes of a file of weights, unless one parameter alone has more; to Hugging Face only.
        companions: the Hugging Face directory of config.json and tokenizer; to Hugging Face only.
    """

    source: Path
    target: Path
    spec: ModelSpec
    weight_map: WeightMap
    dtype: torch.dtype | None = None
    shard_bytes: int = weights.SHARD_BYTES
    companions: Path | None = None


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of the whole model without storage.

    Args:
        hf: HF name -> shape of the tensors that it is made of, in order.
        entry: where it lies in a torch_dist checkpoint; its `data` is on the meta device.
        dtype: of what is written.
        place: of its first byte in the source: file and offset.
    """

    rule: Rule
    hf: Mapping[str, list[int]]
    entry: ShardedTensor | ShardedTensorFactory
    dtype: torch.dtype = torch.float32
    place: tuple[str, int] = ("", 0)

    @property
    def nbytes(self) -> int:
        return self.entry.data.numel() * self.dtype.itemsize

    def pieces(self, tensor: torch.Tensor) -> list[ShardedTensor]:
        """How a torch_dist checkpoint holds the parameter; their data are views of the tensor given."""
        whole = dataclasses.replace(self.entry, data=tensor)
        return list(nested_values(whole.build())) if isinstance(whole, ShardedTensorFactory) else [whole]


class Conversion:
    """One process's share of a conversion, called by `drive`: begin, advance until all is done, finish.

    Raises:
        CheckpointError: the source does not fit the model, or cannot be read.
    """

    def __init__(self, job: Job, rank: Rank = Rank()):  # noqa: B008 - frozen
        self.job, self.rank, self._done = job, rank, 0
        cpu.process_group(rank, WAIT)
        cpu.initialize()
        self.parameters = sorted(self._placed(_parameters(job.spec, job.weight_map)), key=lambda one: one.place)
        dist.barrier()  # the first process has made the target
        self._steps = self._work()

    def begin(self) -> dict[int, int]:
        """This process -> the bytes that it has to write."""
        return {self.rank.index: self._share()}

    def advance(self) -> dict[int, int]:
        """Work for a while; this process -> the bytes that it has written in all."""
        end = time.monotonic() + _SLICE
        for count in self._steps:
            self._done += count
            if time.monotonic() > end:
                break
        return {self.rank.index: self._done}

    def finish(self) -> dict[str, int]:
        """Write what tells of all files, on the first process; the number of files and of bytes in them."""
        raise NotImplementedError

    def _placed(self, parameters: list[_Parameter]) -> list[_Parameter]:
        """The parameters with dtype and place, after a check that they are all there."""
        raise NotImplementedError

    def _share(self) -> int:
        """Bytes of this process."""
        raise NotImplementedError

    def _work(self) -> Iterator[int]:
        """Write this process's files; yields the bytes of each parameter."""
        raise NotImplementedError
