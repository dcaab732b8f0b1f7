"""Offload and onload a model: weights, gradients and optimizer state leave the device as storages.

The storage of a tensor is copied to the host and given up; the tensors stay what they are, views of one another
included, and see the same bytes once the storage has some again. Megatron's buffers, the parameters in them, the shards
of its distributed optimizer and what a fused Adam keeps need no code of their own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence

import torch

from miles_core.errors import ConfigError
from miles_megatron import cpu

logger = logging.getLogger(__name__)

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
TAGS = (WEIGHTS, GRADIENTS, OPTIMIZER)


def host_copy(source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy in host memory, pinned where there is a GPU; the caller synchronises before it is read.

    Args:
        into: an earlier copy to write over.
    """
    copy = _host(source) if into is None else into
    copy.copy_(source.detach(), non_blocking=True)
    return copy


def host_memory(size: int, pinned: bool) -> torch.Tensor:
    """So many bytes of host memory, pinned for as long as this tensor lives."""
    made = torch.empty(size, dtype=torch.uint8)
    if pinned and size:
        _pin(made)
    return made


def _host(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(like, device="cpu")
    if like.is_cuda and made.numel():
        _pin(made)
    return made


def _pin(tensor: torch.Tensor) -> None:
    """Pinned until it is freed. torch's own pinned memory comes in powers of two: 9 GiB would take 16."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)):
        logger.warning("%.1f GiB of host memory cannot be pinned, so copies are slow: raise ulimit -l",
                       tensor.nbytes / 2**30)
        return
    # Memory that is freed while it is pinned would go on being what the GPU writes to.
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False


def synchronise() -> None:
    """Copies that were started are done when this returns."""
    if not cpu.no_cuda():
        torch.cuda.synchronize()


class Offload:
    """What one model holds on the device, and what is offloaded.

    Host copies are made at the first `offload` and kept for the next.

    Args:
        model: the model on this rank; its optimizer may come later.
    """

    def __init__(self, model):
        self._model = model
        self._away: dict[str, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}
        self._copies: dict[int, torch.Tensor] = {}

    def offload(self, tags: Sequence[str]) -> None:
        """Move what the tags name off the device; what is already offloaded stays so.

        Raises:
            ConfigError: an unknown tag.
        """
        for tag in _known(tags):
            if tag in self._away:
                continue
            if tag == WEIGHTS:
                self._model.settle()
            if tag == GRADIENTS and self._model.optimizer is not None:
                self._model.optimizer.zero_grad()  # gradients of the masters, where these are tensors of their own
            storages = list(self._storages(tag))
            host_copies = [None if tag == GRADIENTS else self._keep(storage) for storage in storages]
            synchronise()
            self._away[tag] = [(storage, storage.nbytes(), copy)
                               for storage, copy in zip(storages, host_copies, strict=True)]
            for storage in storages:
                storage.resize_(0)

    def onload(self, tags: Sequence[str]) -> None:
        """Move what the tags name back to the device; gradients are zero.

        Raises:
            ConfigError: an unknown tag.
        """
        for tag in _known(tags):
            for storage, size, copy in self._away.pop(tag, ()):
                storage.resize_(size)
                if copy is None:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(copy, non_blocking=True)
        synchronise()

    def held(self, tag: str) -> int:
        """Bytes on the device that a tag names."""
        return sum(storage.nbytes() for storage in self._storages(tag))

    def _keep(self, storage: torch.UntypedStorage) -> torch.Tensor:
        copy = self._copies.get(storage._cdata)
        if copy is not None and copy.nbytes != storage.nbytes():
            copy = None
        self._copies[storage._cdata] = copy = host_copy(_bytes(storage), copy)
        return copy

    def _storages(self, tag: str) -> Iterator[torch.UntypedStorage]:
        """The storages on the device that the tag names, each once.

        In float32 the optimizer's masters are the weights themselves: those belong to the weights.
        """
        parts = {WEIGHTS: self._weights, GRADIENTS: self._gradients, OPTIMIZER: self._optimizer}
        seen: set[int] = set()
        for earlier in TAGS[: TAGS.index(tag)]:
            seen |= {tensor.untyped_storage()._cdata for tensor in parts[earlier]()}
        device = cpu.device().type
        for tensor in parts[tag]():
            storage = tensor.untyped_storage()
            if storage._cdata not in seen and storage.device.type == device and storage.nbytes():
                seen.add(storage._cdata)
                yield storage

    def _weights(self) -> Iterator[torch.Tensor]:
        yield from (parameter.data for parameter in self._model.parameters())

    def _gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._model.wrapped if self._model.declared.trainable else ():
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def _optimizer(self) -> Iterator[torch.Tensor]:
        whole = self._model.optimizer
        for part in () if whole is None else getattr(whole, "chained_optimizers", None) or [whole]:
            inner = part.optimizer
            for group in inner.param_groups if inner is not None else ():
                for parameter in group["params"]:
                    yield parameter.data
                    yield from (one for one in inner.state.get(parameter, {}).values() if torch.is_tensor(one))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _known(tags: Sequence[str]) -> Sequence[str]:
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ConfigError("unknown part of the trainer to offload", got=", ".join(unknown), who="Trainer.offload",
                          fix=f"use one or more of {', '.join(TAGS)}", code="offload-part-unknown")
    return tags
