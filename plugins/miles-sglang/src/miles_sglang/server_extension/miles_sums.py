"""What a model holds, as sums over raw bits: both a server's ranks and who sends to them add up with this code.

Imports torch and the standard library alone, as miles_weights.py does.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, chain
from operator import or_

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a trainer on a CPU
    triton = None

PIECE = {"cuda": 1 << 24, "cpu": 1 << 18}
"""Lanes that are added up at once: 32 MiB of int16 stay in an H200's cache from kernel to kernel, half of one in a
CPU's."""
SMALL = 1 << 16
"""Tensors of up to this many lanes are added up together with others of their size."""

def sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """[tensors, 2] int64: two sums over each tensor's raw bits, which add up over its parts in any order.

    A tensor's bits are read as lanes x of int16 (int8 where an element has one byte). The sums are those of x and of
    x * (x >> 7) cut to the lane's width, modulo 2^64. They do not see the order of the lanes, nor zeros. Nothing is
    brought to the host.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cuda" and triton is not None:
        return _sums_at_once(tensors)
    pieces: list[tuple[list[int], torch.Tensor]] = []
    alike: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for i, tensor in enumerate(tensors):
        lanes = tensor.detach().reshape(-1)
        lanes = lanes if lanes.stride(0) == 1 else lanes.clone(memory_format=torch.contiguous_format)
        lanes = lanes.view(torch.int8 if tensor.element_size() == 1 else torch.int16)
        if lanes.numel() <= SMALL:
            alike.setdefault((lanes.numel(), lanes.dtype), []).append((i, lanes))
        else:
            pieces += [([i], piece[None]) for piece in lanes.split(PIECE[device.type])]
    for same in alike.values():
        for at in range(0, len(same), 64):
            part = same[at : at + 64]
            pieces.append(([i for i, _ in part], torch.stack([lanes for _, lanes in part])))
    partial_sums = torch.zeros(sum(len(owners) for owners, _ in pieces), 2, dtype=torch.int64, device=device)
    scratch, row = {}, 0
    for owners, lanes in pieces:
        if (mixed := scratch.get(lanes.dtype)) is None or mixed.numel() < lanes.numel():
            mixed = scratch[lanes.dtype] = torch.empty(max(lanes.numel(), SMALL), dtype=lanes.dtype, device=device)
        mixed = mixed[: lanes.numel()].view(lanes.shape)
        torch.bitwise_right_shift(lanes, 7 if lanes.dtype == torch.int16 else 3, out=mixed)
        mixed.mul_(lanes)
        torch.sum(lanes, 1, dtype=torch.int64, out=partial_sums[row : row + len(owners), 0])
        torch.sum(mixed, 1, dtype=torch.int64, out=partial_sums[row : row + len(owners), 1])
        row += len(owners)
    owners = torch.tensor([i for owners, _ in pieces for i in owners], dtype=torch.int64, device=device)
    return torch.zeros(len(tensors), 2, dtype=torch.int64, device=device).index_add_(0, owners, partial_sums)


CHUNK, BLOCK = 1 << 16, 1 << 12
"""Lanes that one program of the kernel adds up, and that it reads at once."""


def _sums_at_once(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sums` by a kernel for each width of lanes: casting to int64, as torch's sum does, moves nine times the bytes."""
    whole = [tensor.contiguous() for tensor in tensors]
    return _launched(tables(whole), len(whole), tensors[0].device)


def tables(tensors: Sequence[torch.Tensor]) -> list[tuple]:
    """What the kernel is told of contiguous tensors; it may be told again while they stay where they are."""
    launches = []
    for narrow in (False, True):
        where = [i for i, tensor in enumerate(tensors) if (tensor.element_size() == 1) == narrow]
        flat, width = [tensors[i] for i in where], 1 if narrow else 2
        starts, sizes = [tensor.data_ptr() for tensor in flat], [tensor.nbytes // width for tensor in flat]
        ends = list(accumulate((size + CHUNK - 1) // CHUNK for size in sizes))
        if ends and ends[-1]:
            table = torch.frombuffer(array("q", starts + sizes + ends + where), dtype=torch.int64)
            launches.append((ends[-1], table.to(flat[0].device, non_blocking=True), len(flat),
                          reduce(or_, starts + sizes) % 16 == 0, narrow))
    return launches


def _launched(launches: Sequence[tuple], rows: int, device: torch.device) -> torch.Tensor:
    totals = torch.zeros(rows, 2, dtype=torch.int64, device=device)
    for programs, table, count, aligned, narrow in launches:
        _add_up[(programs,)](table, totals, count, CHUNK, BLOCK, aligned, narrow)
    return totals


def _add_up(table, totals, tensors, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
            NARROW: tl.constexpr):
    """One chunk of lanes, added to its tensor's two sums.

    Args:
        table: [4, tensors] int64: where each begins, its lanes, the chunks of those up to it, and its row of `totals`.
        NARROW: lanes are int8, else int16.
    """
    chunk = tl.program_id(0).to(tl.int64)
    owner, end = 0, tensors
    while owner < end:  # the first whose chunks end after this one
        middle = (owner + end) // 2
        if tl.load(table + 2 * tensors + middle) <= chunk:
            owner = middle + 1
        else:
            end = middle
    length = tl.load(table + tensors + owner)
    before = (chunk - tl.load(table + 2 * tensors + owner) + (length + CHUNK - 1) // CHUNK) * CHUNK
    lane: tl.constexpr = tl.int8 if NARROW else tl.int16
    lanes, length = tl.load(table + owner).to(tl.pointer_type(lane)) + before, length - before
    if ALIGNED:  # else every lane is read by itself
        lanes, length = tl.multiple_of(lanes, 16), tl.multiple_of(length, 16)
    at = tl.arange(0, BLOCK)
    one, two = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x = tl.load(lanes + start + at, mask=start + at < length, other=0).to(tl.int32)
        one += x
        two += ((x * (x >> (3 if NARROW else 7))) << (24 if NARROW else 16)) >> (24 if NARROW else 16)
    row = tl.load(table + 3 * tensors + owner)
    tl.atomic_add(totals + 2 * row, tl.sum(one.to(tl.int64)))
    tl.atomic_add(totals + 2 * row + 1, tl.sum(two.to(tl.int64)))


if triton is not None:
    _add_up = triton.jit(_add_up, do_not_specialize=["tensors"])


class Coming:
    """A tensor on its way to the host, behind what the current stream was given before."""

    def __init__(self, tensor: torch.Tensor):
        self._host, self._there = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def arrived(self) -> torch.Tensor:
        """It, on the host."""
        if self._there is not None:
            self._there.synchronize()
        return self._host


class Held:
    """Every parameter of a model, and every buffer that a checkpoint would hold, once and by name.

    Args:
        dtypes_asked: dtype, dtypes and kinds. dtype: what the sender sent; a wider parameter is cast back to it, which
            is exact. dtypes: by name, for tensors that were sent in another one. kinds: the same by how names end,
            which engines leave as it is when they join tensors: the longest end counts.
    """

    def __init__(self, model: torch.nn.Module, dtypes_asked: tuple):
        self.dtypes_asked, self.tensors, self._places, self._modules = dtypes_asked, {}, [], []
        self._visit("", model, set())
        self.names = list(self.tensors)
        self._empty, self._places = [one for one in self._places if not one], list(filter(None, self._places))
        self._seen, self._starts = self._look(), self._begins()
        dtype, dtypes, kinds = dtypes_asked
        ends, self._casts = sorted(kinds, key=len, reverse=True), {}
        for i, (name, tensor) in enumerate(self.tensors.items()):
            name_of_dtype = dtypes.get(name) or next((kinds[end] for end in ends if name.endswith(end)), dtype)
            sent = getattr(torch, name_of_dtype) if name_of_dtype else tensor.dtype
            if sent != tensor.dtype and tensor.is_floating_point() and tensor.element_size() > sent.itemsize:
                self._casts[i] = sent
        self._told = None
        whole = list(self.tensors.values())
        if not self._casts and triton is not None and all(one.is_cuda and one.is_contiguous() for one in whole):
            self._told = tables(whole)

    def _visit(self, prefix: str, module: torch.nn.Module, seen: set[int]) -> None:
        """One walk, in place of those of named_parameters, named_buffers and named_modules."""
        self._modules.append(module)  # so that no other one gets its id
        self._places += [module._parameters, module._buffers, module._modules]
        left_out = module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and name not in left_out and id(tensor) not in seen:
                seen.add(id(tensor))
                self.tensors[prefix + name] = tensor
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                self._visit(f"{prefix}{name}.", child, seen)

    def _look(self) -> list[int]:
        """All that is in its place."""
        return list(map(id, chain.from_iterable(map(dict.values, self._places))))

    def _begins(self) -> list[int]:
        """Where the bytes are."""
        return list(map(torch.Tensor.data_ptr, self.tensors.values()))

    def lasts(self) -> bool:
        """Whether the tensors still have the memory they had, so that they may be added up as they were."""
        return self._begins() == self._starts

    def same(self) -> bool:
        """Whether nothing was added or replaced; with `lasts`, whether this is what the model holds."""
        return not any(self._empty) and self._look() == self._seen

    def sums(self) -> Coming:
        """[tensors, 2] int64."""
        if self._told is not None:
            return Coming(_launched(self._told, len(self.names), next(iter(self.tensors.values())).device))
        return Coming(sums([one.to(self._casts.get(i, one.dtype)) for i, one in enumerate(self.tensors.values())]))
