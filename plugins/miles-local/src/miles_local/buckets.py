"""The stream of weights, cut into buckets: tensors side by side in one flat buffer, which is used again and again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch

PARTNERS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "kv_a_proj_with_mqa": "q_a_proj"}
"""Projections that engines keep as one parameter, each by the first of its group. Such a group is never split: some
loaders (multi-head latent attention's) join them only when they come in one call."""
_PARTNER = re.compile(r"(?<=\.)(" + "|".join(PARTNERS) + r")(?=\.)")

Stream = Iterable[tuple[str, torch.Tensor]]


def atom(name: str) -> str:
    """Tensors in a row with the same answer stay in one bucket: of a module, as weight and scale, and its partners."""
    return _PARTNER.sub(lambda match: PARTNERS[match[1]], name).rpartition(".")[0] or name


def sent_as(tensor: torch.Tensor, source: torch.dtype | None, target: torch.dtype | None) -> torch.dtype:
    """What a tensor of the stream is sent as: `target` if it is a `source`, unless it has an attribute `keeps_dtype`
    that is true, as scales of quantised weights have."""
    casts = target is not None and tensor.dtype == source and not getattr(tensor, "keeps_dtype", False)
    return target if casts else tensor.dtype


@dataclass(slots=True)
class Bucket:
    """Tensors in a buffer.

    Args:
        buffer: [bytes] uint8.
        tensors: name, dtype, shape and offset in bytes of each.
        size: bytes in use.
    """

    buffer: torch.Tensor
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)
    size: int = 0

    @property
    def flat(self) -> torch.Tensor:
        """[size] uint8: what there is to send."""
        return self.buffer[: self.size]

    @property
    def bytes(self) -> int:
        """Of the tensors alone, without what lies between them."""
        return sum(view.numel() * view.element_size() for _, view in self.views())

    def views(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors where they lie."""
        for name, dtype, shape, offset in self.tensors:
            dtype = getattr(torch, dtype)
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, self.buffer[offset : offset + size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Cutter:
    """Cuts a stream into buckets.

    Args:
        limit: most bytes of a bucket; a group of tensors that has more rides alone.
        source, target: see `sent_as`.
        alignment: of each tensor's first byte.
        buffers: how many buckets exist at once: a bucket's memory is that of the one `buffers` before it.
        allocate: (which buffer, bytes, device) -> [bytes] uint8.
        before: told which buffer is about to be filled, so that who reads from it is waited for.
    """

    limit: int
    source: torch.dtype | None = None
    target: torch.dtype | None = None
    alignment: int = 16
    buffers: int = 2
    allocate: Callable[[int, int, torch.device], torch.Tensor] = lambda index, size, device: torch.empty(
        size, dtype=torch.uint8, device=device)
    before: Callable[[int], object] = lambda index: None

    def __call__(self, stream: Stream) -> Iterator[Bucket]:
        """Each is filled when it is asked for, and is the caller's until the one after the next `buffers - 1`."""
        memory: list[torch.Tensor | None] = [None] * self.buffers
        bucket, count = None, 0
        for _, members in groupby(stream, key=lambda pair: atom(pair[0])):
            group = [(name, tensor, sent_as(tensor, self.source, self.target)) for name, tensor in members]
            end = self._end(bucket, group)
            if bucket is not None and end > self.limit:
                yield bucket
                bucket = None
            if bucket is None:
                turn, count = count % self.buffers, count + 1
                self.before(turn)
                need = max(self.limit, self._end(None, group))
                if memory[turn] is None or memory[turn].numel() < need:
                    memory[turn] = None  # before the larger one is asked for
                    memory[turn] = self.allocate(turn, need, group[0][1].device)
                bucket = Bucket(memory[turn])
            self._fill(bucket, group)
            del group
        if bucket is not None:
            yield bucket

    def _start(self, end: int, dtype: torch.dtype) -> int:
        return end + -end % max(self.alignment, dtype.itemsize)

    def _end(self, bucket: Bucket | None, group: list) -> int:
        """Where the bucket would end with this group."""
        end = 0 if bucket is None else bucket.size
        for _, tensor, dtype in group:
            end = self._start(end, dtype) + tensor.numel() * dtype.itemsize
        return end

    def _fill(self, bucket: Bucket, group: list) -> None:
        for name, tensor, dtype in group:
            start = self._start(bucket.size, dtype)
            end = start + tensor.numel() * dtype.itemsize
            bucket.buffer[start:end].view(dtype).view(tensor.shape).copy_(tensor.detach())
            bucket.tensors.append((name, str(dtype).removeprefix("torch."), list(tensor.shape), start))
            bucket.size = end
