"""What is under way while a model routes, whichever trainer has it: routes of rows, counts, and what is recorded.

A forward is given the routes of its rows, and its routers, each knowing its layer, take theirs. Scores are gathered at
the replayed experts from live ones, so a router keeps its gradient (R3, arXiv:2510.11370, section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from miles_core.columns import Align, grid
from miles_core.errors import TrainError
from miles_core.types import Sample
from miles_r3.columns import BYTE_NONE, PLACE, ROUTES

PIECE = 2**20
"""Positions whose recorded experts are exchanged at once, a layer at a time; experts that are counted at once."""

Chosen = tuple[torch.Tensor, torch.Tensor]
"""Scores [T, topk] and experts [T, topk]."""


@dataclass(slots=True, eq=False)
class Forward:
    """What is under way: a forward of one micro-batch through one stage.

    Args:
        routes: [T, layers, topk], as the column has them, of this rank's T rows, None where every token chooses freely.
        place: [T] int64 number of the row among the rollout's positions, -1 of rows that predict nothing.
        gradient: a backward pass will follow.
        chosen: recorded and free choices [T, topk] of the layers that are to be counted, as the column has them.
    """

    routes: torch.Tensor | None
    place: torch.Tensor | None
    gradient: bool
    counts: Counts | None = None
    recorded: Recorded | None = None
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    experts: int = 0

    def settle(self) -> None:
        """Count the layers of a forward that is over: many in each kernel, as the host would be late with one each."""
        if self.counts is None or self.place is None or not self.chosen:
            return
        size = max(1, PIECE // self.chosen[0][0].numel())
        for first in range(0, len(self.chosen), size):
            recorded, free = (numbers(torch.stack(layers, 1))
                              for layers in zip(*self.chosen[first : first + size], strict=True))
            self.counts.add(recorded, free, self.experts, self.place[:, None] >= 0)


@dataclass(slots=True, eq=False)
class Counts:
    """Token-layers of a pass on this rank: all, replayed, those whose free choice is another set of experts, and those
    whose routes name an expert twice or one that does not exist."""

    totals: torch.Tensor | None = None

    def add(self, recorded: torch.Tensor, free: torch.Tensor, experts: int, real: torch.Tensor) -> None:
        """Some layers' of a micro-batch: [T, layers, topk] of so many experts; [T, 1] mask."""
        ours, theirs = free.sort(-1).values, recorded.sort(-1).values
        real = real.expand(recorded.shape[:2])
        known = exists(recorded, experts) & real
        twice = (theirs[..., 1:] == theirs[..., :-1]).any(-1) & known
        beyond = (recorded >= 0).all(-1) & real & ~known
        each = (real, known, (ours != theirs).any(-1) & known, twice | beyond)
        counts = torch.stack([one.sum() for one in each])
        self.totals = counts if self.totals is None else self.totals + counts

    def metrics(self, prefix: str) -> dict[str, float]:
        """Of all ranks, each of which has to call it.

        Raises:
            TrainError: routes that no router can have chosen.
        """
        total = torch.zeros(4, dtype=torch.int64) if self.totals is None else self.totals.cpu()
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        whole, replayed, differ, broken = total.tolist()
        if broken:
            raise TrainError(f"{broken} of {whole} routed token-layers name an expert twice, or one that does not "
                             "exist", code="r3-experts-invalid",
                             who="plugin r3", fix="the engine serves another model than the trainer trains")
        if not whole:
            return {}
        shares = {"replayed": replayed / whole, "fallback": (whole - replayed) / whole}
        if replayed:
            shares["routes_differ"] = differ / replayed
        return {f"{prefix}/{name}": value for name, value in shares.items()}


def replayed(layer: int, scores: torch.Tensor, free: torch.Tensor, recorded: torch.Tensor,
             counted: Forward | None) -> Chosen:
    """Scores at the recorded experts [T, topk], at the free ones in rows without.

    Args:
        scores: [T, experts].
        counted: whose counts these rows enter; None for a recompute.

    Raises:
        TrainError: the router has other rows than the micro-batch.
    """
    if recorded.shape != free.shape:
        raise TrainError(f"the router of layer {layer} has other rows than its micro-batch", who="plugin r3",
                         got=f"{list(free.shape)} scores, {list(recorded.shape)} routes", code="r3-rows-mismatch",
                         fix="report the layout of this run; the plugin does not support its order of rows")
    if counted is not None and counted.counts is not None:
        counted.experts = scores.shape[1]
        counted.chosen.append((recorded, free.to(recorded.dtype)))
    recorded = numbers(recorded)
    chosen = torch.where(exists(recorded, scores.shape[1])[:, None], recorded, free)
    return scores.gather(1, chosen), chosen


def exists(recorded: torch.Tensor, experts: int) -> torch.Tensor:
    """Of rows [..., topk], whether there are all of their experts."""
    return ((recorded >= 0) & (recorded < experts)).all(-1)


def numbers(routes: torch.Tensor) -> torch.Tensor:
    """Routes as int64, -1 for no expert."""
    wide = routes.to(torch.int64)
    return wide.masked_fill_(wide == BYTE_NONE, -1) if routes.dtype is torch.uint8 else wide


class Routers:
    """Those of this rank's part of the actor, of whichever trainer.

    Args:
        layers, topk: of a row of routes.
    """

    def __init__(self, layers: int, topk: int):
        self.layers, self.topk = layers, topk
        self.under_way: Forward | None = None
        self.in_step = False
        self._counts: Counts | None = None
        self._recorded: Recorded | None = None
        self._free = False

    def adopt(self, chunk: torch.nn.Module) -> None:
        """Have the routers of a part of the model ask here.

        Raises:
            TrainError: routers that cannot replay.
        """
        raise NotImplementedError

    @contextmanager
    def forward(self, routes: np.ndarray | None, place: np.ndarray | None, *, replay: bool) -> Iterator[None]:
        """Around the forward of a micro-batch through one stage.

        Args:
            routes, place: [T, layers, topk] and [T] of the rows that context parallelism leaves this rank.
            replay: False for models that choose freely.
        """
        self.under_way = under_way = self._made(routes, place) if replay else Forward(None, None, False)
        try:
            yield
        finally:
            self.under_way = None
        under_way.settle()

    def _made(self, routes: np.ndarray | None, place: np.ndarray | None) -> Forward:
        gradient = torch.is_grad_enabled()
        if place is None or self._free:  # a batch that was not numbered is none of the run's
            return Forward(None, None, gradient)
        own = self._mine(place)
        if self._recorded is not None:
            return Forward(None, own, gradient, recorded=self._recorded)
        if routes is None:  # of samples none of which has any
            routes = np.full((len(place), self.layers, self.topk), -1, np.int16)
        elif routes.shape[1:] != (self.layers, self.topk):
            raise TrainError("the routes of the rollout come from another model", code="r3-routes-of-other-model",
                             who="plugin r3", got=f"{routes.shape[1]} layers of {routes.shape[2]} experts",
                             fix=f"the trainer has {self.layers} and {self.topk}")
        return Forward(self._mine(routes), own, gradient, counts=self._counts)

    def _mine(self, rows: np.ndarray) -> torch.Tensor:
        """The part of the rows [T, ...] that this rank's routers see, where they compute."""
        raise NotImplementedError

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        """Inside, passes of the actor are counted."""
        self._counts = Counts()
        try:
            yield self._counts
        finally:
            self._counts = None

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Inside, passes of the actor choose freely, and what they choose is kept."""
        self._recorded = Recorded(self.layers, self.topk)
        try:
            yield self._recorded
        finally:
            self._recorded = None

    @contextmanager
    def free(self) -> Iterator[None]:
        """Inside, nothing is replayed."""
        self._free = True
        try:
            yield
        finally:
            self._free = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Around an optimizer step: no routes outlive it."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False
            self.forget()

    def forget(self) -> None:
        """What was kept for layers that are computed again."""

    def close(self) -> None:
        """Leave no trace outside of the model."""


@dataclass(slots=True, eq=False)
class Recorded:
    """What routers chose in a pass: on this rank, by layer, for some of the rollout's positions."""

    layers: int
    topk: int
    by_layer: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def put(self, layer: int, place: torch.Tensor, experts: torch.Tensor) -> None:
        """[T] positions and their experts [T, topk]."""
        real = place >= 0
        self.by_layer.setdefault(layer, []).append((place[real].cpu(), experts[real].to("cpu", torch.int16)))

    def spread(self, samples: Sequence[Sample], rows: int, dtype: str) -> None:
        """Into the column of every sample, on all ranks, each of which has to call it.

        Args:
            rows: positions of all samples.
            dtype: of the column; -1 becomes 255 where it is unsigned.
        """
        sizes = [sample.length - 1 for sample in samples]
        whole = np.zeros((rows, self.layers, self.topk), dtype)
        for layer in range(self.layers):
            pairs = self.by_layer.get(layer, [])
            for first in range(0, rows, PIECE):
                whole[first : first + PIECE, layer] = _exchanged(pairs, first, min(PIECE, rows - first),
                                                                 whole.shape[2])
        parts = np.split(whole, np.cumsum(sizes)[:-1])
        for sample, part in zip(samples, parts, strict=True):
            sample.columns[ROUTES] = part


def _exchanged(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], first: int, count: int, topk: int) -> np.ndarray:
    """[count, topk] of the positions from `first` on, by whichever rank has them; -1 where none has."""
    values = torch.zeros(count, topk, dtype=torch.int32)  # one more than the expert, and 0 for none
    for place, experts in pairs:
        here = (place >= first) & (place < first + count)
        values[place[here] - first] = experts[here].to(torch.int32) + 1
    if dist.get_world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.numpy().astype(np.int16) - 1


def numbered(samples: Sequence[Sample]) -> int:
    """Give every position that predicts a token a number of its own; returns how many there are."""
    first = 0
    for sample in samples:
        rows = grid(Align.PREDICTION, sample)
        count = rows.stop - rows.start
        sample.columns[PLACE] = np.arange(first, first + count, dtype=np.int32)
        first += count
    return first
