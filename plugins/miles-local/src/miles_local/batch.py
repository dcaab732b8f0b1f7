"""The rows that decode together: their requests, their results, and when each ends.

Per-row state lies in arrays with one entry per row, so that a step is a fixed number of array operations, however many
rows there are. Rows 0..n-1 are in use; a row that ends is replaced by the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from miles_core.stages.rollout import Request
from miles_local.cache import WIDTH, Cache, Prefill, round_up
from miles_local.operands import rounding
from miles_local.sampling import Draws, StopStrings, draw, uniforms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from miles_local.decode import Decoder
    from miles_local.modules import ModuleDecoder
    from miles_local.weights import Weights

Context = tuple[tuple[int, ...], tuple[bytes, ...]]
"""Tokens, and the images that some of them stand for."""
Origin = tuple[int, Context, bool]
"""What a row began with: weight version, context, whether its routing is kept."""

PREFILL_TOKENS = 4096
"""Padded tokens that one prefill computes at once, unless a single prompt is longer."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A request and what was drawn for it so far.

    Args:
        order: ordinal of its arrival; admission follows it, also after a retraction.
        request: what was asked.
        stops: [S] ids that end it.
        limit: tokens it may draw, the room in the context considered.
        watch: for stop strings.
        answer: resolved by the worker.
        ids, log_probs, versions: what was drawn before the last retraction.
        routing: [positions, layers, topk] int16 computed before the last retraction, where asked for.
        origin: set at admission; requests of equal origin share the computation of their context.
    """

    order: int
    request: Request
    stops: np.ndarray
    limit: int
    watch: StopStrings | None
    answer: Future = field(default_factory=Future)
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    log_probs: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    routing: np.ndarray | None = None
    origin: Origin | None = None

    @property
    def wants_routing(self) -> bool:
        return "routed_experts" in self.request.want

    @property
    def context(self) -> Context:
        """Prompt and what was drawn before the last retraction."""
        return (*self.request.input_ids, *self.ids.tolist()), self.request.images

    @property
    def longest(self) -> int:
        """Tokens of its prompt and the longest answer that it may get."""
        return len(self.request.input_ids) + self.limit


class Batch:
    """The running rows over one cache. Used by the worker thread alone.

    Args:
        decoder: the forward pass.
        max_rows: most requests that decode at once.
        max_context: longest sequence, in tokens.
        bound: positions that the cache may have, all rows together, or None; asked when memory is taken anew. With a
            bound a row is admitted once there is room for its longest answer, so a running one never has to leave.
    """

    def __init__(self, decoder: Decoder | ModuleDecoder, max_rows: int, max_context: int,
                 bound: Callable[[], int | None] = lambda: None):
        self._decoder, self._max_context = decoder, max_context
        self._bound, self._most = bound, None
        self._cache = Cache(max_rows, decoder.device)
        self.seqs: list[SequenceState] = []
        self._origins: dict[Origin, list[SequenceState]] = {}  # running rows by what they began with
        self._room = max_rows
        rows = round_up(max_rows)
        scalars = {"key": np.uint64, "drawn": np.int64, "length": np.int64, "last": np.int64, "limit": np.int64,
                   "quiet": np.int64, "temperature": np.float32, "top_p": np.float32, "top_k": np.int64}  # fmt: skip
        self._of = {name: np.zeros(rows, dtype) for name, dtype in scalars.items()}
        self._of["stops"] = np.full((rows, 1), -1, np.int64)
        for name, dtype in (("ids", np.int32), ("log_probs", np.float32), ("versions", np.int32)):
            self._of[name] = np.zeros((rows, 0), dtype)

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def room(self) -> int:
        """How many more requests fit."""
        return self._room - len(self.seqs)

    def fitting(self, waiting: Collection[SequenceState]) -> int:
        """How many of these get a row now, in their order. One alone always does: what it lacks, torch will say."""
        count = min(len(waiting), self.room)
        if not self.seqs and self._cache.width == 0:
            self._most = self._bound()
        if self._most is None:
            return count
        fit = self._fitting(waiting, count, self._cache.rows, self._cache.width)
        if not self.seqs and (anew := max(1, self._fitting(waiting, count, 0, 0))) > fit:
            self._cache.clear()  # the shape of what ran before is in the way
            return anew
        return fit

    def _fitting(self, waiting: Collection[SequenceState], count: int, rows: int, width: int) -> int:
        for place, seq in enumerate(islice(waiting, count)):
            rows = max(rows, round_up(len(self.seqs) + place + 1))
            width = max(width, round_up(seq.longest, WIDTH))
            if rows * width > self._most:
                return place
        return count

    def clear(self) -> None:
        """Free the cache's memory; nothing may be running."""
        self._cache.clear()

    def admit(self, seqs: Sequence[SequenceState], weights: Weights | PreTrainedModel,
              version: int) -> list[tuple[SequenceState, str]]:
        """Give these requests their rows; returns those that ended with their first token, and why.

        A context is computed once: requests that come together share its prefill, and one whose twin runs already, by
        the same weights, copies the twin's keys and values and draws with the next step.
        """
        for seq in seqs:
            seq.origin = (version, seq.context, seq.wants_routing)
        ended: list[tuple[SequenceState, str]] = []
        if self._most is not None:
            self._cache.reserve(len(self.seqs) + len(seqs), max(seq.longest for seq in seqs), exact=True)
        for contexts, members in _portions(self._join(seqs)):
            trace = any(seq.wants_routing for seq in members)
            images = [pictures for _, pictures in contexts]
            with rounding(weights):
                filled = self._decoder.prefill(weights, [tokens for tokens, _ in contexts], trace,
                                               **({"images": images} if any(images) else {}))
            place = {context: index for index, context in enumerate(contexts)}
            picks = [place[seq.origin[1]] for seq in members]
            first = len(self.seqs)
            self._cache.reserve(first + len(members), max(len(tokens) for tokens, _ in contexts) + 1)
            for seq in members:
                self._seat(seq)
            chosen = torch.tensor(picks)
            self._cache.put(torch.arange(first, len(self.seqs)), chosen, filled)
            if trace:
                self._keep_prefill_routing(first, picks, filled)
            rows = slice(first, len(self.seqs))
            ended += self._take(rows, *draw(filled.logits[chosen], self._draws(rows)), version)
        return ended

    def _join(self, seqs: Sequence[SequenceState]) -> list[SequenceState]:
        """Seat those whose twin runs, a row that began with the same context by the same weights; returns the others.

        The next step feeds them their context's last token, with the bits that a prefill would have given. A state has
        gone on with its row and does not know the context's any more: then no request joins.
        """
        if self._cache.states:
            return list(seqs)
        pairs, others = [], []
        for seq in seqs:
            twins = self._origins.get(seq.origin)
            if twins is None or seq.routing is not None:
                others.append(seq)
                continue
            pairs.append((self.seqs.index(twins[0]), len(self.seqs)))
            self._seat(seq)
        if pairs:
            twins, rows = np.array(pairs).T
            width = int(self._of["length"][rows].max())
            self._cache.reserve(len(self.seqs), width)
            self._cache.copy(torch.from_numpy(twins), torch.from_numpy(rows), width)
            if "routing" in self._of:
                self._of["routing"][rows, :width] = self._of["routing"][twins, :width]
        return others

    def step(self, weights: Weights | PreTrainedModel, version: int) -> list[tuple[SequenceState, str]]:
        """Draw one token for every row; returns the requests that ended with it, and why."""
        count = len(self.seqs)
        rows = self._decoder.bucket(count, self._cache)
        of = self._of
        of["last"][count:rows] = 0
        of["length"][count:rows] = 1
        positions = of["length"][:rows] - 1
        self._cache.reserve(rows, int(positions.max()) + 1)
        trace = any(seq.wants_routing for seq in self.seqs)
        tokens = torch.from_numpy(of["last"][:rows])
        with rounding(weights):
            logits, routing = self._decoder.step(weights, self._cache, tokens, torch.from_numpy(positions), trace)
        if routing is not None:
            buffer = self._columns("routing", int(positions.max()) + 1)
            buffer[np.arange(count), positions[:count]] = routing[:count].numpy()
        live = slice(0, count)
        return self._take(live, *draw(logits[:count], self._draws(live)), version)

    def remove(self, seqs: Sequence[SequenceState]) -> None:
        """Take requests out, whatever they have drawn is kept in them; the last rows fill the gaps."""
        row_of = {seq: row for row, seq in enumerate(self.seqs)}
        gone = {row_of[seq] for seq in seqs}
        for row in gone:
            self._unseat(row)
        count = len(self.seqs) - len(gone)
        holes = sorted(row for row in gone if row < count)
        movers = [row for row in range(count, len(self.seqs)) if row not in gone]
        if holes:
            for array in self._of.values():
                array[holes] = array[movers]
            self._cache.copy(torch.tensor(movers), torch.tensor(holes))
            for hole, mover in zip(holes, movers, strict=True):
                self.seqs[hole] = self.seqs[mover]
        del self.seqs[count:]
        if not self.seqs and self._most is None:
            self._cache.clear()

    def _take(self, rows: slice, tokens: np.ndarray, log_probs: np.ndarray,
              version: int) -> list[tuple[SequenceState, str]]:
        """Record one drawn token per row; returns the rows that end with it."""
        of, each = self._of, np.arange(rows.start, rows.stop)
        drawn = of["drawn"][rows]
        columns = int(drawn.max()) + 1
        for name, values in (("ids", tokens), ("log_probs", log_probs), ("versions", version)):
            self._columns(name, columns)[each, drawn] = values
        of["last"][rows] = tokens
        of["drawn"][rows] += 1
        of["length"][rows] += 1
        stopped = (of["stops"][rows] == tokens[:, None]).any(1)
        for index, row in enumerate(each):
            watch = self.seqs[row].watch
            if watch is not None and watch.hit(int(tokens[index])):
                stopped[index] = True
        full = of["drawn"][rows] >= of["limit"][rows]
        ended = np.flatnonzero(stopped | full)
        return [(self.seqs[rows.start + i], "stop" if stopped[i] else "length") for i in ended]

    def _draws(self, rows: slice) -> Draws:
        of = self._of
        banned = [
            (int(row), stops[stops >= 0])
            for row in np.flatnonzero(of["drawn"][rows] < of["quiet"][rows])
            if len(stops := of["stops"][rows.start + row])
        ]
        uniform = uniforms(of["key"][rows], of["drawn"][rows].astype(np.uint64))
        return Draws(of["temperature"][rows], of["top_p"][rows], of["top_k"][rows], uniform, banned)

    def _seat(self, seq: SequenceState) -> None:
        """Take the next row; write a request's parameters, and what it has drawn before, into it."""
        sampling, of, row, length = seq.request.sampling, self._of, len(self.seqs), len(seq.origin[1][0])
        self.seqs.append(seq)
        if seq.routing is None:  # else its row names experts that older weights chose
            self._origins.setdefault(seq.origin, []).append(seq)
        values = {
            "key": np.uint64(seq.request.key % 2**64), "drawn": len(seq.ids), "length": length,
            "last": seq.origin[1][0][-1], "limit": seq.limit, "quiet": sampling.min_new_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        }  # fmt: skip
        for name, value in values.items():
            of[name][row] = value
        self._columns("stops", len(seq.stops), fill=-1)[row] = -1
        of["stops"][row, : len(seq.stops)] = seq.stops
        for name in ("ids", "log_probs", "versions"):
            self._columns(name, len(seq.ids))[row, : len(seq.ids)] = getattr(seq, name)

    def _unseat(self, row: int) -> None:
        """The reverse: keep in the request what its row has drawn."""
        seq, drawn = self.seqs[row], self._of["drawn"][row]
        twins = self._origins.get(seq.origin, [])
        if seq in twins:
            twins.remove(seq)
            if not twins:
                del self._origins[seq.origin]
        for name in ("ids", "log_probs", "versions"):
            setattr(seq, name, self._of[name][row, :drawn].copy())
        if seq.wants_routing:
            seq.routing = self._of["routing"][row, : self._of["length"][row] - 1].copy()

    def _keep_prefill_routing(self, first: int, picks: list[int], filled: Prefill) -> None:
        """Positions that were computed before a retraction keep the experts that their tokens were drawn with."""
        new = filled.routing.numpy()
        buffer = self._columns("routing", new.shape[1])
        for row, pick in enumerate(picks, first):
            buffer[row, : new.shape[1]] = new[pick]
            if (old := self.seqs[row].routing) is not None:
                buffer[row, : len(old)] = old

    def _columns(self, name: str, width: int, fill: int = 0) -> np.ndarray:
        """The array `name` [rows, columns, ...] with at least `width` columns."""
        shape = self._decoder.shape
        if name not in self._of:  # routed experts: only once a request asks for them
            self._of[name] = np.full((len(self._of["key"]), 0, shape.layers, shape.topk), -1, np.int16)
        old = self._of[name]
        if width > old.shape[1]:
            columns = max(width, min(2 * old.shape[1], self._max_context))
            new = np.full((old.shape[0], columns, *old.shape[2:]), fill, old.dtype)
            new[:, : old.shape[1]] = old
            self._of[name] = new
        return self._of[name]


def _portions(seqs: Sequence[SequenceState]) -> Iterator[tuple[list[Context], list[SequenceState]]]:
    """Requests by distinct context, in portions of at most PREFILL_TOKENS padded tokens; similar lengths together."""
    groups: dict[Context, list[SequenceState]] = {}
    for seq in seqs:
        groups.setdefault(seq.origin[1], []).append(seq)
    contexts: list[Context] = []
    for context in sorted(groups, key=lambda context: len(context[0])):
        if contexts and (len(contexts) + 1) * round_up(len(context[0])) > PREFILL_TOKENS:
            yield contexts, [seq for one in contexts for seq in groups[one]]
            contexts = []
        contexts.append(context)
    if contexts:
        yield contexts, [seq for one in contexts for seq in groups[one]]
