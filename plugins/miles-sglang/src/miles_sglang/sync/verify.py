"""Do the engine's parameters hold what was sent? Sums over raw bits on both sides, compared.

`miles_sums.sums` gives two 64-bit sums of a tensor's bits. They add up over parts in any order, so an engine may
fuse q, k and v, keep all experts in one parameter and cut parameters among its ranks, and still nothing has to be known
about how. A tensor that has the same name on both sides is compared by itself, all others of a layer together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch

from miles_core.errors import SyncError
from miles_sglang.server_extension.miles_sums import sums

_LAYER = re.compile(r"(?:^|\.)(layers|h|blocks)\.(\d+)\.")
_KEY_VALUE = re.compile(r"\.[kv]_proj\.")
_PREDICTOR = re.compile(r"(?:^|\.)mtp(?:_layers)?\.")


class Sums(NamedTuple):
    """Of named tensors.

    Args:
        values: [tensors, 2] int64 on the host.
    """

    names: tuple[str, ...]
    values: torch.Tensor


@dataclass
class Ledger:
    """The sums of what was sent.

    Args:
        dtype: of most tensors, as they were sent.
    """

    dtype: str | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    _kinds: dict[str, list[str]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)

    def add(self, named: Iterable[tuple[str, torch.Tensor]], *, sums_too: bool = True) -> None:
        """Add up tensors as they were sent; the sums stay on their device. Without sums, count alone."""
        names, tensors = zip(*named, strict=True)
        if sums_too:
            self._names += names
            self._sums.append(sums(tensors))
        self.tensors += len(tensors)
        for name, tensor in zip(names, tensors, strict=True):
            self.bytes += tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.dtype = self.dtype or dtype
            if dtype != self.dtype:
                self.dtypes[name] = dtype
            seen = self._kinds.setdefault(name.rpartition(".")[2], [])
            if dtype not in seen:
                seen.append(dtype)

    def total(self) -> Sums:
        """Of all. The first call waits for the devices; a sender makes it while its servers still work."""
        self._sums = [torch.cat([part.cpu() for part in self._sums] or [torch.zeros(0, 2, dtype=torch.int64)])]
        return Sums(tuple(self._names), self._sums[0])

    def expectation(self) -> dict[str, object]:
        """What a report has to be asked with: the usual dtype, that of kinds of tensors (the last part of their names)
        which all came in another, and of single tensors which did. One byte is never held wider."""
        kinds = {part: dtypes[0] for part, dtypes in self._kinds.items() if dtypes != [self.dtype] and len(dtypes) == 1}
        single = {name: dtype for name, dtype in self.dtypes.items()
                  if name.rpartition(".")[2] not in kinds and getattr(torch, dtype).itemsize > 1}
        return {"dtype": self.dtype, "dtypes": single, "kinds": kinds}


def check(who: str, url: str, sent: Sums, ranks: Sequence[Mapping], *, layers: int, copies: int = 1,
          random: bool = False) -> None:
    """Compare what was sent with what an engine's ranks report.

    Args:
        sent: the whole stream.
        ranks: as `miles_weights.load` reports: "names" of parameters and persistent buffers, their "sums", and which
            of them "changed" since the first report.
        layers: of the model without those for multi-token prediction, which a draft model takes and no report covers.
        copies: ranks that hold the same head of keys and values, because there are more ranks than heads.
        random: whether the engine started with random weights: then it must have been sent everything.

    Raises:
        SyncError: names what differs, or what was never sent.
    """
    comparison = SumComparison.of(sent.names, tuple(tuple(rank["names"]) for rank in ranks), layers, copies)
    if problems := comparison.differences(sent.values, [_values(rank) for rank in ranks]):
        raise SyncError(f"{who} does not hold the weights that were sent", code="synced-weights-differ", who=url,
                        got=_few(problems), fix="it stays paused and serves nothing; report this with the engine's log")
    if comparison.unsent and random:
        raise SyncError(f"{who} has weights that the trainer never sends; they are random in the engine",
                        code="engine-weights-never-sent", who=url,
                        got=_few(comparison.unsent), fix="start the engine with --sglang-load-format auto, so that "
                        "they come from the checkpoint, or add them to the family's weight_map")
    if changed := {rank["names"][i] for rank in ranks for i in rank["changed"]} & set(comparison.unsent):
        raise SyncError(f"{who} has weights that the trainer never sends and that changed since its first sync",
                        code="engine-weights-changed", who=url, got=_few(sorted(changed)),
                        fix="keep them when memory is released, or send them")


def _values(rank: Mapping) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(rank["sums"]), dtype=torch.int64).view(-1, 2)


@dataclass(frozen=True)
class SumComparison:
    """Which sums have to be equal. It follows from the names alone, which stay from sync to sync.

    Args:
        units: what is compared: (what it is, names sent, names held); no names held where the engine has no place.
        unsent: names of what the engine holds and nothing of the stream can have filled.
        ours: [2, parts] int64: positions in the stream, and the unit that each is a part of.
        theirs: the same of what the engine holds.
        places: of each rank's tensors among the `size` that the engine holds.
    """

    units: tuple[tuple[str, list[str], list[str]], ...]
    unsent: tuple[str, ...]
    ours: torch.Tensor
    theirs: torch.Tensor
    places: tuple[torch.Tensor, ...]
    size: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(sent: tuple[str, ...], names_by_rank: tuple[tuple[str, ...], ...], layers: int,
           copies: int) -> SumComparison:
        """A tensor of both sides is a unit; all others of a layer are one."""
        ours = {name: i for i, name in enumerate(sent) if not _predicts(name, layers)}
        theirs = {name: i for i, name in enumerate(dict.fromkeys(chain(*names_by_rank)))}
        sides: dict[str, tuple[list[str], list[str]]] = {}
        for side, names in enumerate((ours, theirs)):
            for name in sorted(names):
                unit = name if name in ours and name in theirs else _layer(name)
                sides.setdefault(unit, ([], []))[side].append(name)
        units = tuple((what, *names) for what, names in sides.items() if names[0])
        parts = [[(ours[name], i) for i, (_, names, held_names) in enumerate(units) for name in names
                  for _ in range(copies if names != held_names and _KEY_VALUE.search(name) else 1)],
                 [(theirs[name], i) for i, (_, _, names) in enumerate(units) for name in names]]
        unsent = tuple(sorted(name for mine, names in sides.values() if not mine for name in names))
        places = tuple(torch.tensor([theirs[name] for name in names], dtype=torch.int64) for names in names_by_rank)
        ours_by_unit, theirs_by_unit = (torch.tensor(pairs, dtype=torch.int64).view(-1, 2).t() for pairs in parts)
        return SumComparison(units, unsent, ours_by_unit, theirs_by_unit, places, len(theirs))

    def differences(self, sent: torch.Tensor, ranks: Sequence[torch.Tensor]) -> list[str]:
        """What differs, in words.

        Args:
            sent: [tensors, 2] int64.
            ranks: the same of each rank. Ranks that hold the same bits hold copies, which count once; others hold
                different parts.
        """
        each = sent.new_zeros(len(ranks), self.size, 2)
        for row, places, values in zip(each, self.places, ranks, strict=True):
            row[places] = values
        whole = each[0].clone()
        for i in range(1, len(each)):
            whole += each[i] * (each[:i] != each[i]).any(2).all(0)[:, None]
        differs = (self._added(sent, self.ours) != self._added(whole, self.theirs)).any(1).tolist()
        return [self._described(unit) for unit, other in zip(self.units, differs, strict=True) if other or not unit[2]]

    def _added(self, values: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        """[units, 2], modulo 2^64."""
        return values.new_zeros(len(self.units), 2).index_add_(0, parts[1], values[parts[0]])

    @staticmethod
    def _described(unit: tuple[str, list[str], list[str]]) -> str:
        what, ours, theirs = unit
        if not theirs:
            return f"{what}: the engine has no place for {_few(ours)}"
        return what if ours == theirs else f"{what}: {_few(ours)} as {_few(theirs)}"


def _layer(name: str) -> str:
    match = _LAYER.search(name)
    return f"layer {match[2]}" if match else "outside of the layers"


def _predicts(name: str, layers: int) -> bool:
    match = _LAYER.search(name)
    return _PREDICTOR.search(name) is not None or (match is not None and int(match[2]) >= layers)


def _few(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
