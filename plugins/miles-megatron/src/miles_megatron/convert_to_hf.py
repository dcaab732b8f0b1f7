"""A torch_dist checkpoint becomes a Hugging Face directory; see convert.py."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from miles_local import checkpoint_index
from miles_local.companions import copy_companions
from miles_local.stored import check_archives
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from miles_core.errors import CheckpointError
from miles_megatron import checkpoint, cpu, index, shards, tensor_merges, weights
from miles_megatron.convert import Conversion, Parameter, full_shape
from miles_megatron.disk_names import Layout, carried, carried_files, disk_layout, packed_with, to_disk

cpu.install()

from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402 - after install()


class ToHuggingFace(Conversion):
    """torch_dist to Hugging Face. What a file of weights holds does not depend on the number of processes."""

    def _placed(self, parameters: list[Parameter]) -> list[Parameter]:
        folder = self.job.source
        others = checkpoint.others(folder)
        shapes = checkpoint_index.read(folder / ".metadata") if others is None else others  # before torch reads it
        index.check(shapes, {number: one.entry for number, one in enumerate(parameters)}, folder,
                    padded=others is not None)
        pieces = [piece for one in parameters for piece in one.pieces(one.entry.data)]
        if more := sorted(shapes.keys() - {piece.key for piece in pieces}
                          - {name for name in shapes if name.startswith(index.OPTIMIZER)}):
            raise CheckpointError("the checkpoint holds weights that the model does not have", got=shards.few(more),
                                  who=str(folder), fix=f"{weights.known_by()}; or give the --hf-checkpoint that the "
                                  "run started from", code="checkpoint-weights-unknown")
        self._index = FileSystemReader(folder).read_metadata()
        axes = {piece.key: piece.prepend_axis_num for piece in pieces}
        self._chunks = collections.defaultdict(list)  # those of one layer, or expert, so that nothing looks at all
        for key, count in axes.items():
            for chunk in self._index.state_dict_metadata[key].chunks:
                self._chunks[key, tuple(chunk.offsets[:count])].append(chunk)
        together: dict[str, list[Parameter]] = {}  # what one tensor of the files is made of
        for one in parameters:
            together.setdefault(packed_with(next(iter(one.hf)), self.job.weight_map), []).append(self._place(one))
        placed = sorted(together.values(), key=lambda several: min(one.place for one in several))
        self._files = _filled(placed, self.job.shard_bytes)
        self._carried = carried_files(self.job.companions, self.job.weight_map)
        self._count = len(self._files) + bool(self._carried)
        return [one for several in placed for one in several]

    def _place(self, one: Parameter) -> Parameter:
        piece = one.pieces(one.entry.data)[0]
        storage = self._index.storage_data[self._reads(piece)[0].storage_index]
        dtype = self._dtype(one, self._index.state_dict_metadata[piece.key].properties.dtype)
        return dataclasses.replace(one, dtype=dtype, place=(storage.relative_path, storage.offset))

    def _units(self) -> list[_File]:
        return self._files

    def _work(self) -> Iterator[int]:
        for file in self.mine:
            name = shards.shard_name(file.number, self._count)
            with shards.writing(self.job.target / name, self._layout(file)) as append:
                for _, tensor in to_disk(self._tensors(file), self.job.weight_map):
                    append(tensor)
                    yield tensor.nbytes
                    del tensor  # before the next one is read

    def _layout(self, file: _File) -> Layout:
        plain = {name: (one.dtype, shape) for one in file.parameters for name, shape in one.hf.items()}
        return disk_layout(plain, self.job.weight_map)

    def _tensors(self, file: _File) -> Iterator[tuple[str, torch.Tensor]]:
        for one in file.parameters:
            yield from self._of(one)

    def _of(self, one: Parameter) -> list[tuple[str, torch.Tensor]]:
        if isinstance(one.entry, ShardedTensor):
            tensor = self._read(one.entry).to(one.dtype)
        else:
            tensor = torch.empty(one.entry.data.shape, dtype=one.dtype)
            for piece in one.pieces(tensor):
                piece.data.copy_(self._read(piece))
        parts = tensor_merges.whole(one.rule, list(tensor_merges.split(one.rule, tensor, self.job.weight_map, 1)))
        return [(name, part.reshape(shape)) for part, (name, shape) in zip(parts, one.hf.items(), strict=True)]

    def _reads(self, piece: ShardedTensor) -> list[ReadItem]:
        """Which chunks of the files hold parts of a piece; the layout that wrote them may have cut it anyhow."""
        near = self._chunks[piece.key, tuple(piece.global_offset[: piece.prepend_axis_num])]
        wanted = ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(full_shape(piece)))
        candidates = dataclasses.replace(self._index.state_dict_metadata[piece.key], chunks=near)
        items = create_read_items_for_chunk_list(piece.key, candidates, [wanted])
        if sum(math.prod(item.lengths) for item in items) != math.prod(piece.local_shape):
            raise CheckpointError("the checkpoint lacks a part of a tensor", got=piece.key, who=str(self.job.source),
                                  fix="use another iteration", code="tensor-part-missing")
        return items

    def _read(self, piece: ShardedTensor) -> torch.Tensor:
        shape, tensor = full_shape(piece), None
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
            check_archives([(file, where.offset, where.length)])
            with open(file, "rb") as opened:
                view = _create_file_view(opened, where.offset, where.length)
                return torch.load(view, map_location="cpu", weights_only=True)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError("a file of the checkpoint cannot be read", got=reason, who=str(file),
                                  fix="use another iteration", code="checkpoint-file-unreadable") from error

    def _conclude(self) -> int:
        dist.barrier()  # every file is there
        if self.rank.index == 0:
            largest = max(self.parameters, key=lambda one: one.nbytes)
            copy_companions(self.job.companions, self.job.target, largest.dtype,
                            weights.export_keys(self.job.companions, self.job.weight_map))
            names, total = [[*self._layout(file)] for file in self._files], sum(file.nbytes for file in self._files)
            if self._carried:
                names, total = [*names, [*self._carried]], total + self._carry()
            shards.write_index(self.job.target, names, total)
        return self._count

    def _carry(self) -> int:
        """Write the last file, of what is no part of the model; its bytes."""
        layout = {name: (tensor.dtype, [*tensor.shape]) for name, tensor in carried(self.job.companions,
                                                                                  self.job.weight_map)}
        total = 0
        with shards.writing(self.job.target / shards.shard_name(self._count - 1, self._count), layout) as append:
            for _, tensor in carried(self.job.companions, self.job.weight_map):
                append(tensor)
                total += tensor.nbytes
        return total


@dataclass(frozen=True, slots=True)
class _File:
    """What goes into one file of weights; files are numbered from 0."""

    number: int
    parameters: list[Parameter]
    nbytes: int


def _filled(together: Sequence[list[Parameter]], limit: int) -> list[_File]:
    files = [_File(0, [], 0)]
    for several in together:
        last, nbytes = files[-1], sum(one.nbytes for one in several)
        if last.parameters and last.nbytes + nbytes > limit:
            files.append(_File(len(files), several, nbytes))
        else:
            files[-1] = _File(last.number, [*last.parameters, *several], last.nbytes + nbytes)
    return files


def _box(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))]
