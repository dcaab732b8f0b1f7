"""Offload and onload a model: weights, gradients and optimizer state leave the device as storages.

The storage of a tensor is copied to the host and given up; the tensors stay what they are, views of one another
included, and see the same bytes once the storage has some again. Megatron's buffers, the parameters in them, the shards
of its distributed optimizer and what a fused Adam keeps need no code of their own.

An optimizer has thousands of tensors. They leave one by one once, come back into one storage, and are one copy and one
piece of the device's memory from then on. Nothing needs them before the optimizer steps: a stream of their own brings
them while the model computes, and may take them away while the engine is sent new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from miles_core.errors import ConfigError
from miles_megatron import cpu
from miles_megatron.adam import moments_of
from miles_megatron.host_memory import Blocks, rounded_up

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
TAGS = (WEIGHTS, GRADIENTS, OPTIMIZER)


@dataclass(slots=True)
class _Away:
    """A storage that is off the device, or about to leave.

    Args:
        alone: the tensor that is all of it, where no other one is known.
        host: its bytes, in pieces; gradients have none.
    """

    storage: torch.UntypedStorage
    size: int
    alone: torch.Tensor | None
    host: Sequence[torch.Tensor] = ()


class Offload:
    """What one model holds on the device, and what is offloaded.

    Host memory is taken once, at the first `offload` or by `reserve`.

    Args:
        model: the model on this rank; its optimizer may come later.
    """

    def __init__(self, model):
        self._model = model
        self._away: dict[str, list[_Away]] = {}
        self.host: dict[str, Blocks] = {WEIGHTS: Blocks(), OPTIMIZER: Blocks()}
        self._leaving: list[_Away] = []
        self._beside = _Beside()

    def reserve(self) -> None:
        """Pin host memory for all that will leave, in threads: while servers start, say."""
        if not cpu.no_cuda():
            self.host[WEIGHTS].reserve(self.held(WEIGHTS))
            self.host[OPTIMIZER].reserve(self.held(OPTIMIZER) + self._moments())

    def offload(self, tags: Sequence[str], *, wait: bool = True) -> None:
        """Move what the tags name off the device; what is already offloaded stays so.

        Args:
            wait: without, optimizer state leaves while the caller goes on, until `settle`; it must not change.

        Raises:
            ConfigError: an unknown tag.
        """
        self.settle()
        for tag in _known(tags):
            if tag in self._away:
                continue
            if tag == WEIGHTS:
                self._model.settle()
            if tag == GRADIENTS and self._model.optimizer is not None:
                self._model.optimizer.zero_grad()  # gradients of the masters, where these are tensors of their own
            self._away[tag] = list(self._storages(tag))
            if tag != GRADIENTS:
                self._copy_out(tag)
            if tag == OPTIMIZER:
                self._leaving = self._away[tag]
            else:
                self._beside.finish()
                _free(self._away[tag])
        if wait:
            self.settle()

    def settle(self) -> None:
        """What is on its way has arrived: on the host, or on the device."""
        self._beside.finish()
        _free(self._leaving)
        self._leaving = []

    def arrived(self) -> None:
        """What the current stream does next finds the optimizer's state."""
        self._beside.meet()

    def onload(self, tags: Sequence[str]) -> None:
        """Move what the tags name back to the device; gradients are zero, and optimizer state is there at `arrived`.

        Raises:
            ConfigError: an unknown tag.
        """
        self.settle()
        for tag in _known(tags):
            back = self._away.pop(tag, [])
            targets = _together(back) if tag == OPTIMIZER else _apart(back)
            if tag == GRADIENTS:
                for target in targets:
                    target.zero_()
                continue
            pairs = (pair for one, target in zip(back, targets, strict=True) for pair in _pairs(target, one.host))
            self._beside.copy(pairs, later=tag == OPTIMIZER)
            if tag == WEIGHTS:
                self._beside.finish()

    def held(self, tag: str) -> int:
        """Bytes on the device that a tag names."""
        return sum(one.size for one in self._storages(tag))

    def _copy_out(self, tag: str) -> None:
        host, away = self.host[tag], self._away[tag]
        host.rewind(sum(rounded_up(one.size) for one in away))

        def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for one in away:
                one.host = list(host.pieces(one.size))
                yield from ((piece, place) for place, piece in _pairs(_bytes(one.storage), one.host))

        self._beside.copy(pairs())

    def _moments(self) -> int:
        """Bytes of state that the optimizer makes in its first step."""
        total = 0
        for inner in self._inner():
            dtypes = getattr(inner, "name_to_dtype_map", {})
            total += sum(dtypes.get(name, torch.float32).itemsize * parameter.numel()
                         for group in inner.param_groups for parameter in group["params"]
                         if not inner.state.get(parameter) for name in moments_of(inner, parameter))
        return total

    def _storages(self, tag: str) -> Iterator[_Away]:
        """The storages on the device that the tag names, each once.

        In float32 the optimizer's masters are the weights themselves: those belong to the weights.
        """
        parts: dict[str, Callable[[], Iterator[torch.Tensor]]] = {
            WEIGHTS: self._weights, GRADIENTS: self._gradients, OPTIMIZER: self._optimizer}
        seen: set[int] = set()
        for earlier in TAGS[: TAGS.index(tag)]:
            seen |= {tensor.untyped_storage()._cdata for tensor in parts[earlier]()}
        device, by_storage = cpu.device().type, dict[int, _Away]()
        for tensor in parts[tag]():
            storage = tensor.untyped_storage()
            if storage._cdata in by_storage:
                by_storage[storage._cdata].alone = None
            elif storage._cdata not in seen and storage.device.type == device and storage.nbytes():
                whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
                by_storage[storage._cdata] = _Away(storage, storage.nbytes(), tensor if whole else None)
        yield from by_storage.values()

    def _weights(self) -> Iterator[torch.Tensor]:
        yield from (parameter.data for parameter in self._model.parameters())

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.wrapped if self._model.declared.trainable else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def _optimizer(self) -> Iterator[torch.Tensor]:
        for inner in self._inner():
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield from (one for one in inner.state.get(parameter, {}).values() if torch.is_tensor(one))

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        whole = self._model.optimizer
        for part in () if whole is None else getattr(whole, "chained_optimizers", None) or [whole]:
            if part.optimizer is not None:
                yield part.optimizer


class _Beside:
    """Copies by a stream of their own. Without a GPU those that may come later wait until they are asked for: what
    forgets to ask finds nothing there, as it might on a GPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._event: torch.cuda.Event | None = None
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, later: bool = False) -> None:
        """Start to copy: (target, source)."""
        if cpu.no_cuda():
            self._waiting += pairs
            if not later:
                self.meet()
            return
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._event = self._stream.record_event()

    def meet(self) -> None:
        """What the current stream does next comes after the copies."""
        for target, source in self._waiting:
            target.copy_(source)
        self._waiting = []
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def finish(self) -> None:
        """Wait for the copies."""
        self.meet()
        if self._event is not None:
            self._event.synchronize()
            self._event = None


def _free(storages: Sequence[_Away]) -> None:
    for one in storages:
        one.storage.resize_(0)


def _apart(storages: Sequence[_Away]) -> list[torch.Tensor]:
    """Memory for storages, where they are: their bytes."""
    for one in storages:
        one.storage.resize_(one.size)
    return [_bytes(one.storage) for one in storages]


def _together(storages: Sequence[_Away]) -> list[torch.Tensor]:
    """The same, but that tensors which are all of their storages come to lie in one."""
    alone = [one for one in storages if one.alone is not None]
    if len(alone) < 2:
        return _apart(storages)
    lengths = [rounded_up(one.size) for one in alone]
    whole = torch.empty(sum(lengths), dtype=torch.uint8, device=alone[0].storage.device)
    places = dict(zip(map(id, alone), whole.split(lengths), strict=True))
    targets = []
    for one in storages:
        if (tensor := one.alone) is None:
            targets += _apart([one])
            continue
        targets.append(places[id(one)][: one.size])
        tensor.data = targets[-1].view(tensor.dtype).view(tensor.shape)
    return targets


def _pairs(whole: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parts of a storage's bytes that lie in each piece of host memory."""
    return zip(whole.split([piece.nbytes for piece in pieces]), pieces, strict=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _known(tags: Sequence[str]) -> Sequence[str]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ConfigError("unknown part of the trainer to offload", got=", ".join(unknown), who="Trainer.offload",
                          fix=f"use one or more of {', '.join(TAGS)}", code="offload-part-unknown")
    return tags
