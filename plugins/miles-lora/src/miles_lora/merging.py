"""Adapters into the weights that they change: W + scale B A, computed in float32, in W's own dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from miles_core.errors import SyncError
from miles_lora import peft
from miles_lora.targets import OF_ALL_EXPERTS, adapter_of, names_among, names_of

Stream = Iterator[tuple[str, torch.Tensor]]


def merged(stream: Stream, scale: float) -> Stream:
    """The weights of a stream, each with the adapter that came before it; the adapters themselves are not among them.

    Raises:
        SyncError: an adapter after its weight, or half of one.
    """
    adapters: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        if adapter_of(name) is not None:
            adapters[name] = tensor
            continue
        yield name, with_adapter(name, tensor, adapters, scale)
    _none_left(adapters)


def _none_left(adapters: Iterable[str]) -> None:
    """
    Raises:
        SyncError: adapters that no weight has taken.
    """
    if left := [name for name in adapters if not OF_ALL_EXPERTS.search(name)]:
        raise SyncError("adapters arrived without the weights that they modify", got=left[0],
                        fix="send an adapter before its weight", code="lora-adapter-without-weights")


def with_adapter(name: str, weight: torch.Tensor, adapters: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """A weight with its adapter, which is taken out of `adapters` but for what other experts share with it; the weight
    itself if it has no adapter."""
    names, own = names_among(name, adapters), names_of(name)
    if not any(one in adapters for one in own):
        return weight
    if missing := [one for one in names if one not in adapters]:
        raise SyncError("one half of an adapter is missing", code="lora-adapter-incomplete", got=missing[0],
                        fix="send both A and B")
    if weight.dtype.itemsize < 2:  # its scale is another tensor
        raise SyncError("adapters cannot be merged into quantised weights", code="lora-weight-quantised",
                        got=f"{name} in {str(weight.dtype).removeprefix('torch.')}",
                        fix="name plugin lora before the one that quantises, and leave --weight-sync adapter out")
    first, second = (adapters.pop(one) if one in own else adapters[one] for one in names)
    return merge(weight, first, second, scale)


def merge(weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scale: float) -> torch.Tensor:
    """W [outputs, inputs] + scale B [outputs, r] A [r, inputs], rounded once."""
    return torch.addmm(weight.float(), second.float(), first.float(), alpha=scale).to(weight.dtype)


def saved(stream: Stream, shape: peft.Shape, folder: Path, base: str, called: Callable[[str], str],
          packed: Callable[[Stream], Stream]) -> Stream:
    """The merged model; its end leaves FOLDER-adapter beside it, which PEFT reads.

    Args:
        called: name of a weight -> what the base's module calls it, by which PEFT knows its adapter.
        packed: adapters by themselves -> as files have them.
    """
    adapters: dict[str, torch.Tensor] = {}

    def seen() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in stream:
            if (adapter := adapter_of(name)) is not None and dist.get_rank() == 0:
                adapters[names_of(called(adapter[0]))["AB".index(adapter[1])]] = tensor.to("cpu", copy=True)
            yield name, tensor

    yield from merged(seen(), shape.scale)
    if dist.get_rank() == 0:
        in_files = dict(packed(iter(adapters.items())))
        peft.write(folder.with_name(f"{folder.name}-adapter"), shape, in_files, base)


class Base:
    """What an engine that merges by itself keeps: the weights without adapters, from the first stream on."""

    def __init__(self, scale: float):
        self.scale = scale
        self._kept: dict[str, torch.Tensor] = {}

    def taken(self, stream: Stream) -> Stream:
        """All weights, merged, from a stream of adapters alone or of adapters and then all weights.

        Raises:
            SyncError: adapters alone, and there was no base before; or adapters of other weights.
        """
        adapters: dict[str, torch.Tensor] = {}
        whole = False
        for name, tensor in stream:
            if adapter_of(name) is not None:
                adapters[name] = tensor.detach().clone()  # a view of a buffer that is used again
                continue
            whole = True
            self._kept[name] = tensor.detach().clone()
            yield name, with_adapter(name, tensor, adapters, self.scale)
        if not whole and not self._kept:
            raise SyncError("adapters arrived before any weights", code="lora-adapters-before-weights",
                            fix="send all weights once")
        for name, tensor in self._kept.items() if not whole else ():
            yield name, with_adapter(name, tensor, adapters, self.scale)
        _none_left(adapters)
