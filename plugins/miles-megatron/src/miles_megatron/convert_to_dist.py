"""A Hugging Face directory becomes a torch_dist checkpoint; see convert.py."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import BinaryIO

import torch
import torch.distributed as dist
from miles_local.stored import write_errors
from torch.distributed.checkpoint import FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from miles_core.errors import CheckpointError
from miles_megatron import checkpoint, cpu, shards, tensor_merges, weights
from miles_megatron.convert import Conversion, Parameter, full_shape
from miles_megatron.disk_names import PlainReaders

cpu.install()

from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402 - after install()
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402


class ToDist(Conversion):
    """Hugging Face to torch_dist: one file for each process, and an index of all from the first."""

    def _placed(self, parameters: list[Parameter]) -> list[Parameter]:
        folder, weight_map = self.job.source, self.job.weight_map
        files = shards.tensor_files(folder)
        stored = {file: shards.stored_tensors(file) for file in set(files.values())}
        if absent := sorted(name for name, file in files.items() if name not in stored[file]):
            raise CheckpointError("the index places tensors in files that lack them", got=shards.few(absent),
                                  who=str(folder), code="index-misplaces-tensors", fix="fetch the checkpoint again")
        self._stored = {name: stored[file][name] for name, file in files.items()}
        self._read_packed = PlainReaders(files, weight_map)
        places = self._read_packed.places
        shapes = {name: shape for one in parameters for name, shape in one.hf.items()}
        weights.announce_left(folder, places, shapes, weight_map)
        weights.check_tied(folder, self._read_packed, weight_map)
        weights.check_fit(folder, places.keys(), shapes.keys(), weight_map, shapes,
                          lambda name: places[name].shape(self._stored[places[name].name].shape))
        return sorted((self._place(one) for one in parameters), key=lambda one: one.place)

    def _place(self, one: Parameter) -> Parameter:
        places = [self._read_packed.places[name] for name in one.hf]
        parts = [self._stored[place.name] for place in places]
        dtypes = [place.dtype(part.dtype) for place, part in zip(places, parts, strict=True)]
        dtype = self._dtype(one, functools.reduce(torch.promote_types, dtypes))
        return dataclasses.replace(one, dtype=dtype, place=(parts[0].file.name, parts[0].offset))

    def _units(self) -> list[Parameter]:
        return self.parameters

    def _work(self) -> Iterator[int]:
        name = f"__{self.rank.index}_0.distcp"
        self._written: list[tuple[WriteItem, WriteResult]] = []
        with write_errors(self.job.target), open(self.job.target / name, "wb") as file:
            for one in self.mine:
                self._written += [_append(file, name, piece) for piece in one.pieces(self._read(one))]
                yield one.nbytes

    def _read(self, one: Parameter) -> torch.Tensor:
        tensor = torch.empty(one.entry.data.shape, dtype=one.dtype)
        if not tensor_merges.has_views(one.rule):
            parts = [piece for i, name in enumerate(one.hf)
                     for piece in tensor_merges.pieces(one.rule, self._read_packed.tensor(name), i)]
            return tensor.copy_(tensor_merges.join(one.rule, parts, self.job.weight_map))
        for name, view in zip(one.hf, tensor_merges.hf_views(one.rule, tensor, self.job.weight_map), strict=True):
            place = self._read_packed.places[name]
            if place.packed is None:
                shards.read_into(self._stored[place.name], view)
            else:
                view.copy_(self._read_packed.tensor(name))
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


def _append(file: BinaryIO, name: str, piece: ShardedTensor) -> tuple[WriteItem, WriteResult]:
    """Write a piece where the file ends, as torch.distributed.checkpoint does."""
    data, offset = piece.data.reshape(full_shape(piece)), torch.Size(piece.global_offset)
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch.save writes the whole storage of a view
    where = MetadataIndex(piece.key, offset)
    tensor_data = TensorWriteData(ChunkStorageMetadata(offset, data.shape), TensorProperties.create_from_tensor(data),
                           torch.Size(piece.global_shape))
    start = file.tell()
    torch.save(data, file)
    length = file.tell() - start
    return (WriteItem(where, WriteItemType.SHARD, tensor_data=tensor_data),
            WriteResult(where, length, _StorageInfo(name, start, length)))
