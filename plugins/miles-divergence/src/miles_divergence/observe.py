"""What the modules of one rank compute in an optimizer step: inputs, outputs, routing, gradients, row by row.

Every row of a micro-batch carries the number of its token (tokens.py), through packing, padding and the cuts of
context parallelism; so rows of two trainers are those of the same token, in whatever order they lie.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from miles_megatron.specs import WeightMap

from miles_core.columns import Packed
from miles_core.types import Sample
from miles_divergence.names import Named, named_modules, split_output
from miles_divergence.recording import Entry, write_rank
from miles_divergence.tokens import ROW, number

HEAD = "lm_head"


@dataclass(slots=True)
class Rows:
    """Which tokens the rows of this rank's forward are.

    Args:
        numbers: [T].
        micro_batch: counted from 0; keys the noise.
        padded: [samples, longest] indices into `numbers` where a trainer lays samples side by side; -1 is nobody's row.
    """

    numbers: torch.Tensor
    micro_batch: int
    padded: torch.Tensor

    def lay(self, tensor: torch.Tensor, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([n] numbers, [n, ...] rows) of a module's tensor; None where its rows are not tokens.

        Args:
            ranks, rank: of the tensor-parallel group, which may share the rows between them (sequence parallelism).
        """
        total, shape = len(self.numbers), tensor.shape
        if len(shape) > 1 and shape[0] == 1 and shape[1] == total:
            return self.numbers, tensor[0]
        if shape[0] in (total, total // ranks) and shape[0]:
            numbers = self.numbers if shape[0] == total else self.numbers.chunk(ranks)[rank]
            return numbers, tensor[:, 0] if len(shape) > 2 and shape[1] == 1 else tensor
        if shape[:2] == self.padded.shape:
            tensor = tensor.flatten(0, 1)
        elif shape[0] != self.padded.numel():
            return None
        where = self.padded.flatten()
        return self.numbers[where[where >= 0]], tensor[(where >= 0).to(tensor.device)]


@dataclass(slots=True)
class Seen:
    """One tensor of the model, from all micro-batches of this rank."""

    entry: Entry
    numbers: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Observer:
    """Hooks on the modules of a model, from `with` to its end.

    Args:
        chunks: the model's parts on this rank.
        noise: what to multiply the outputs of modules without parts by: 1 + noise or 1 - noise, by a keyed draw.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], noise: float = 0.0):
        # Megatron's models bring what their parameters are called in a checkpoint; others have these names.
        self.weight_map: WeightMap | None = getattr(chunks[0], "weight_map", None)
        self.noise = noise
        # No trainer lets its output layer make the logits of all rows; log-probs say what it computed.
        self.named = [named for chunk in chunks for named in named_modules(chunk, self.weight_map)
                      if named.names != (HEAD,)]
        self.ranks, self.rank = _tensor_ranks() if self.weight_map is not None else (1, 0)
        self.seen: dict[tuple[str, str, int], Seen] = {}
        self.epsilon = 0.0
        self._rows: Rows | None = None
        self._forwards = 0
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Observer:
        for named in self.named:
            before = named.module.register_forward_pre_hook(self._before(named), with_kwargs=True)
            after = named.module.register_forward_hook(self._after(named))
            self._undo += [before.remove, after.remove]
            if callable(gating := getattr(named.module, "gating", None)):  # a router of Megatron's keeps its logits
                own = named.module.__dict__
                own["gating"] = self._gating(named, gating)
                self._undo.append(partial(own.pop, "gating"))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    @contextmanager
    def forward(self, packed: Packed) -> Iterator[None]:
        """Inside, modules compute these rows."""
        bounds = packed.cu_seqlens.tolist()
        lengths = [stop - start for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        padded = torch.full((len(lengths), max(lengths)), -1)
        for place, (start, length) in enumerate(zip(bounds[:-1], lengths, strict=True)):
            padded[place, :length] = torch.arange(start, start + length)
        self._rows = Rows(torch.from_numpy(packed.rows[ROW.name].copy()), self._forwards, padded)
        self._forwards += 1
        try:
            yield
        finally:
            self._rows = None

    def write(self, folder: Path, samples: Sequence[Sample], metrics: Mapping[str, float]) -> None:
        """This rank's file; log-probs, which every rank knows of all samples, are in the first one's."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == 0:
            self._log_probs(samples)
        parts = [(seen.entry, torch.cat(seen.numbers), torch.cat(seen.values)) for seen in self.seen.values()]
        write_rank(folder, rank, parts, {"epsilon": self.epsilon, "metrics": json.dumps(_figures(metrics))})

    def _before(self, named: Named) -> Callable[..., Any]:
        def hook(_module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            tensor, rows = next(_tensors((args, kwargs)), None), self._rows
            if rows is None or tensor is None or not tensor.is_floating_point() or len(named.names) > 1:
                return None
            cut = named.parallel == 1
            self._put(named, "input", tensor, cut=cut)
            if not named.leaf or not tensor.requires_grad:
                return None
            own = tensor.view_as(tensor)  # whose gradient is what this module alone hands back
            own.register_hook(lambda grad: self._put(named, "input_gradient", grad, rows, cut=cut))
            return _exchanged(args, tensor, own), _exchanged(kwargs, tensor, own)

        return hook

    def _after(self, named: Named) -> Callable[..., Any]:
        def hook(_module: torch.nn.Module, args: Any, output: Any) -> Any:
            tensors = [*_tensors(output)]
            if self._rows is None or not tensors or not tensors[0].is_floating_point():
                return None
            if (routing := _routing(tensors)) is not None:
                self._put(named, "routing", routing)
                if len(tensors) == 3:
                    self._put(named, "output", tensors[0])
                return None
            first, *others = tensors
            # The rows of an embedding's weight are tokens: ranks that share these have whole outputs.
            cut = named.parallel == 0 and next(_tensors(args), first).is_floating_point()
            changed = self._with_noise(first, named) if self.noise and named.leaf else first
            # Megatron's layers hand on a bias that whoever comes next will add.
            bias = others[0] if others and others[0].shape == first.shape[-1:] else 0
            self._put(named, "output", changed.detach() + bias, cut=cut)
            if changed.requires_grad:
                rows = self._rows
                changed.register_hook(lambda grad: self._put(named, "gradient", grad, rows, cut=cut))
            return output if changed is first else _exchanged(output, first, changed)

        return hook

    def _gating(self, named: Named, gating: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = gating(*args, **kwargs)
            self._put(named, "output", logits)
            return logits

        return call

    def _with_noise(self, tensor: torch.Tensor, named: Named) -> torch.Tensor:
        """Every element a unit of the last place larger or smaller; copies on other ranks by the same draw."""
        rows = self._rows
        generator = torch.Generator().manual_seed(zlib.crc32(f"{named.names} {rows and rows.micro_batch}".encode()))
        signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype) * 2 - 1
        return tensor * (1 + self.noise * signs)

    def _put(self, named: Named, what: str, tensor: torch.Tensor, rows: Rows | None = None, *, cut: bool = False
             ) -> None:
        rows = rows or self._rows
        laid = None if rows is None else rows.lay(tensor.detach(), self.ranks, self.rank)
        if laid is None:
            return
        numbers, values = laid
        heads = values.dim() > 2  # a tensor with an axis of heads, which tensor-parallel ranks share
        self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
        flat = values.flatten(1).to("cpu", torch.float32, copy=True)
        parts = [(named.names[0], 0, flat)] if what.startswith("input") else (
            split_output(named, flat, self.weight_map, self.ranks))
        for name, piece, part in parts:
            key = name, what, piece
            if key not in self.seen:
                shared = (cut or heads) and self.ranks > 1
                self.seen[key] = Seen(Entry(name, what, piece, len(self.seen), shared))
            self.seen[key].numbers.append(numbers)
            self.seen[key].values.append(part.clone())

    def _log_probs(self, samples: Sequence[Sample]) -> None:
        seen = Seen(Entry(HEAD, "log_probs", 0, len(self.seen), False))
        for place, sample in enumerate(samples):
            if "log_probs" in sample.columns:
                trained = np.flatnonzero(sample.columns["loss_mask"])
                first = sample.length - sample.response_length - 1
                seen.numbers.append(torch.from_numpy(number(place, first + trained)))
                seen.values.append(torch.from_numpy(sample.columns["log_probs"][trained].astype(np.float32))[:, None])
        if seen.values:
            self.seen[HEAD, "log_probs", 0] = seen


def _tensor_ranks() -> tuple[int, int]:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()


def _figures(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("train/loss", "train/grad_norm") if name in metrics}


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _tensors(one)
    elif isinstance(values, dict):
        yield from _tensors([*values.values()])


def _routing(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """[T, experts] weight of each expert for each token, 0 where it is not chosen; None for what is no router's.

    Megatron's routers give the weights and a map of the chosen; transformers' give logits, weights and indices.
    """
    if len(tensors) == 2 and tensors[1].dtype == torch.bool and tensors[0].shape == tensors[1].shape:
        return tensors[0] * tensors[1]
    if len(tensors) == 3 and not tensors[2].is_floating_point():
        logits, weights, chosen = (one.detach() for one in tensors)
        if weights.shape == chosen.shape and logits.dim() == 2:
            return torch.zeros_like(logits, dtype=weights.dtype).scatter(1, chosen.long(), weights)
    return None


def _exchanged(values: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """The same arguments or results with one tensor in another's place."""
    if isinstance(values, list | tuple):
        return type(values)(_exchanged(one, old, new) for one in values)
    if isinstance(values, dict):
        return {name: _exchanged(one, old, new) for name, one in values.items()}
    return new if values is old else values
