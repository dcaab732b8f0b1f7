"""Whole checkpoints from Hugging Face's format to torch_dist and back, a parameter at a time.

No model is ever in memory. It is built without storage, for the names, shapes and places of its parameters in a
torch_dist checkpoint; then each parameter is read, written and forgotten. A torch_dist checkpoint does not depend on a
layout, so that of one rank serves for all.

Several processes share the work by bytes and need nothing of each other before the end. An object of a class here lives
in each; `drive` calls them, through any host.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from miles_core.backends.megatron import checkpoint, cpu, index, shards, weights
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
        self.parameters = self._placed(_parameters(job.spec, job.weight_map))
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

    def finish(self) -> int:
        """Write what tells of all files, on the first process; the number of files that hold weights."""
        for count in self._steps:
            self._done += count
        return self._conclude()

    def _placed(self, parameters: list[_Parameter]) -> list[_Parameter]:
        """The parameters in the order of the source's files, after a check that they are all there."""
        raise NotImplementedError

    def _share(self) -> int:
        """Bytes of this process."""
        raise NotImplementedError

    def _work(self) -> Iterator[int]:
        """Write this process's files; yields the bytes of each parameter."""
        raise NotImplementedError

    def _conclude(self) -> int:
        raise NotImplementedError


class ToDist(Conversion):
    """Hugging Face to torch_dist: one file for each process, and an index of all from the first."""

    def _placed(self, parameters: list[_Parameter]) -> list[_Parameter]:
        folder, weight_map = self.job.source, self.job.weight_map
        files = shards.tensor_files(folder)
        held = {file: shards.stored_tensors(file) for file in set(files.values())}
        if absent := sorted(name for name, file in files.items() if name not in held[file]):
            raise CheckpointError("the index places tensors in files that lack them", got=shards.few(absent),
                                  who=str(folder), fix="fetch the checkpoint again")
        self._stored = {name: held[file][name] for name, file in files.items()}
        shapes = {name: shape for one in parameters for name, shape in one.hf.items()}
        weights.check_fit(folder, files.keys(), shapes.keys(), weight_map, shapes, lambda name: self._stored[name].shape)
        return sorted((self._place(one) for one in parameters), key=lambda one: one.place)

    def _place(self, one: _Parameter) -> _Parameter:
        parts = [self._stored[name] for name in one.hf]
        dtype = self.job.dtype or functools.reduce(torch.promote_types, [part.dtype for part in parts])
        return dataclasses.replace(one, dtype=dtype, place=(parts[0].file.name, parts[0].offset))

    def _share(self) -> int:
        return sum(one.nbytes for one in _part(self.parameters, self.rank))

    def _work(self) -> Iterator[int]:
        name = f"__{self.rank.index}_0.distcp"
        self._written: list[tuple[WriteItem, WriteResult]] = []
        with checkpoint._writing(self.job.target), open(self.job.target / name, "wb") as file:
            for one in _part(self.parameters, self.rank):
                self._written += [_append(file, name, piece) for piece in one.pieces(self._read(one))]
                yield one.nbytes

    def _read(self, one: _Parameter) -> torch.Tensor:
        tensor = torch.empty(one.entry.data.shape, dtype=one.dtype)
        for name, view in zip(one.hf, weights.hf_views(one.rule, tensor, self.job.weight_map), strict=True):
            shards.read_into(self._stored[name], view)
        return tensor

    def _conclude(self) -> int:
        first = self.rank.index == 0
        parts: list | None = [None] * self.rank.size if first else None
        dist.gather_object(self._written, parts)
        if first:
            target = self.job.target
            _, metadata = create_default_global_save_plan([SavePlan([item for item, _ in part]) for part in parts])
            FileSystemWriter(target).finish(metadata, [[result for _, result in part] for part in parts])
            torch.save({}, target / "common.pt")
            save_config(CheckpointingConfig("torch_dist", 1), str(target))
            (target / checkpoint.STATE).write_text(json.dumps({"iteration": 0, "state": {}}))
        return self.rank.size


class ToHuggingFace(Conversion):
    """torch_dist to Hugging Face. What a file of weights holds does not depend on the number of processes."""

    def _placed(self, parameters: list[_Parameter]) -> list[_Parameter]:
        folder = self.job.source
        held = index.read(folder / ".metadata")  # before torch reads it
        index.check(held, {number: one.entry for number, one in enumerate(parameters)}, folder)
        pieces = [piece for one in parameters for piece in one.pieces(one.entry.data)]
        if more := sorted(held.keys() - {piece.key for piece in pieces}
                          - {name for name in held if name.startswith(index.OPTIMIZER)}):
            raise CheckpointError("the checkpoint holds weights that the model does not have", got=shards.few(more),
                                  who=str(folder), fix="give the --hf-checkpoint that the run started from")
        self._index = FileSystemReader(folder).read_metadata()
        axes = {piece.key: piece.prepend_axis_num for piece in pieces}
        self._chunks = collections.defaultdict(list)  # those of one layer, or expert, so that nothing looks at all
        for key, count in axes.items():
            for chunk in self._index.state_dict_metadata[key].chunks:
                self._chunks[key, tuple(chunk.offsets[:count])].append(chunk)
        placed = sorted((self._place(one) for one in parameters), key=lambda one: one.place)
        self._files = list(_filled(placed, self.job.shard_bytes))
        return placed

    def _place(self, one: _Parameter) -> _Parameter:
        piece = one.pieces(one.entry.data)[0]
        found = self._index.storage_data[self._reads(piece)[0].storage_index]
        dtype = self.job.dtype or self._index.state_dict_metadata[piece.key].properties.dtype
        return dataclasses.replace(one, dtype=dtype, place=(found.relative_path, found.offset))

    def _share(self) -> int:
        return sum(one.nbytes for _, file in self._mine() for one in file.parameters)

    def _mine(self) -> list[tuple[int, _File]]:
        mine = {id(file) for file in _part(self._files, self.rank)}
        return [(number, file) for number, file in enumerate(self._files) if id(file) in mine]

    def _work(self) -> Iterator[int]:
        for number, file in self._mine():
            layout = {name: (one.dtype, shape) for one in file.parameters for name, shape in one.hf.items()}
            with shards.writing(self.job.target / shards.shard_name(number, len(self._files)), layout) as append:
                for one in file.parameters:
                    self._copy(one, append)
                    yield one.nbytes

    def _copy(self, one: _Parameter, append: Callable) -> None:
        if isinstance(one.entry, ShardedTensor):
            tensor = self._read(one.entry).to(one.dtype)
        else:
            tensor = torch.empty(one.entry.data.shape, dtype=one.dtype)
            for piece in one.pieces(tensor):
                piece.data.copy_(self._read(piece))
        views = weights.hf_views(one.rule, tensor, self.job.weight_map)
        for view, shape in zip(views, one.hf.values(), strict=True):
            append(view.reshape(shape))

    def _reads(self, piece: ShardedTensor) -> list[ReadItem]:
        """Which chunks of the files hold parts of a piece; the layout that wrote them may have cut it anyhow."""
        near = self._chunks[piece.key, tuple(piece.global_offset[: piece.prepend_axis_num])]
        wanted = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(_full_shape(piece)))
        found = dataclasses.replace(self._index.state_dict_metadata[piece.key], chunks=near)
        items = create_read_items_for_chunk_list(piece.key, found, [wanted])
        if sum(math.prod(item.lengths) for item in items) != math.prod(piece.local_shape):
            raise CheckpointError("the checkpoint lacks a part of a tensor", got=piece.key, who=str(self.job.source),
                                  fix="use another iteration")
        return items

    def _read(self, piece: ShardedTensor) -> torch.Tensor:
        shape, tensor = _full_shape(piece), None
        for item in self._reads(piece):
            chunk = self._load(self._index.storage_data[item.storage_index])
            part = _box(chunk, item.storage_offsets, item.lengths)
            if part.shape == shape:
                return part.reshape(piece.local_shape)  # as it lies, without a second copy
            tensor = torch.empty(shape, dtype=chunk.dtype) if tensor is None else tensor
            _box(tensor, item.dest_offsets, item.lengths).copy_(part)
        return tensor.reshape(piece.local_shape)

    def _load(self, where: _StorageInfo) -> torch.Tensor:
        file = self.job.source / where.relative_path
        try:
            with open(file, "rb") as opened:
                view = _create_file_view(opened, where.offset, where.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise CheckpointError("a file of the checkpoint cannot be read", got=checkpoint.first_line(error),
                                  who=str(file), fix="use another iteration") from error

    def _conclude(self) -> int:
        dist.barrier()  # every file is there
        if self.rank.index == 0:
            largest = max(self.parameters, key=lambda one: one.nbytes)
            weights.copy_companions(self.job.companions, self.job.target, largest.dtype)
            names = [[name for one in file.parameters for name in one.hf] for file in self._files]
            shards.write_index(self.job.target, names, sum(file.nbytes for file in self._files))
        return len(self._files)


@dataclass(frozen=True, slots=True)
class _File:
    """What goes into one file of weights."""

    parameters: list[_Parameter]
    nbytes: int


def _filled(parameters: Sequence[_Parameter], limit: int) -> Iterator[_File]:
    held: list[_Parameter] = []
    size = 0
    for one in parameters:
        if held and size + one.nbytes > limit:
            yield _File(held, size)
            held, size = [], 0
        held, size = [*held, one], size + one.nbytes
    yield _File(held, size)


def _part(items: Sequence, rank: Rank) -> Iterator:
    """A process's share of consecutive items, even by bytes: what has its middle in its stretch of them all."""
    total, start = sum(item.nbytes for item in items), 0
    for item in items:
        if (2 * start + item.nbytes) * rank.size // (2 * total) == rank.index:
            yield item
        start += item.nbytes


def _parameters(spec: ModelSpec, weight_map: WeightMap) -> list[_Parameter]:
    with torch.device("meta"):
        model = build(transformer_config(spec, {"perform_initialization": False}), spec)
    (entries,) = checkpoint._sharded([model], None, loading=True).values()
    found = {ours: _Parameter(rule, dict(zip(names, weights.hf_shapes(rule, entries[ours].data, weight_map), strict=True)),
                              entries[ours])
             for ours, rule, names in weights.instances(weight_map) if ours in entries}
    if unmapped := sorted(entries.keys() - found.keys()):
        raise ConfigError("no rule of the weight map fills these parameters", got=shards.few(unmapped),
                          fix="add rules to the family's weight_map")
    return list(found.values())


def _append(file: BinaryIO, name: str, piece: ShardedTensor) -> tuple[WriteItem, WriteResult]:
    """Write a piece where the file ends, as torch.distributed.checkpoint does."""
    data, offset = piece.data.reshape(_full_shape(piece)), torch.Size(piece.global_offset)
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch.save writes the whole storage of a view
    where = MetadataIndex(piece.key, offset)
    held = TensorWriteData(ChunkStorageMetadata(offset, data.shape), TensorProperties.create_from_tensor(data),
                           torch.Size(piece.global_shape))
    start = file.tell()
    torch.save(data, file)
    length = file.tell() - start
    return (WriteItem(where, WriteItemType.SHARD, tensor_data=held),
            WriteResult(where, length, _StorageInfo(name, start, length)))


def _full_shape(piece: ShardedTensor) -> tuple[int, ...]:
    """With the axes of layer and expert, which the piece does not have and its checkpoint does."""
    return (1,) * piece.prepend_axis_num + tuple(piece.local_shape)


def _box(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))]


async def drive(handle: Handle, progress: Callable[[int, int], object]) -> tuple[int, int]:
    """Have a Conversion done, here or on the ranks behind a handle.

    Args:
        progress: told (bytes written, bytes in all) now and then, of the processes behind the handle.

    Returns:
        Number of files and of bytes.

    Raises:
        WaitError: a call took longer than WAIT.
    """
    def late() -> WaitError:
        return WaitError(f"the conversion did not get on within {WAIT:g} s", fix="look at the file systems")

    async with within(WAIT, late):
        total, done = sum((await handle.begin()).values()), -1
    while done < total:
        async with within(WAIT, late):
            done = sum((await handle.advance()).values())
        progress(done, total)
    async with within(WAIT, late):
        return await handle.finish(), total


class Here(Handle):
    """A handle of an object of this very process; a call blocks."""

    def __init__(self, hosted: object):
        super().__init__("converter")
        self._hosted = hosted

    async def call(self, method: str, *args: object) -> object:
        await asyncio.sleep(0)  # for Ctrl-C to be heard
        return getattr(self._hosted, method)(*args)
