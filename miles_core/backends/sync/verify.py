"""Do the engine's parameters hold what was sent? Sums over raw bits on both sides, compared.

`miles_weights.sums` gives two 64-bit sums of a tensor's bits. They add up over parts in any order, so an engine may
fuse q, k and v, keep all experts in one parameter and cut parameters among its ranks, and still nothing has to be known
about how. A tensor that has the same name on both sides is compared by itself, all others of a layer together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from miles_core.backends.sglang.served.miles_weights import sums
from miles_core.errors import SyncError

Sums = tuple[int, int]

_LAYER = re.compile(r"(?:^|\.)(layers|h|blocks)\.(\d+)\.")
_KEY_VALUE = re.compile(r"\.[kv]_proj\.")
_PREDICTOR = re.compile(r"(?:^|\.)mtp(?:_layers)?\.")


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
            self.bytes += tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.dtype = self.dtype or dtype
            if dtype != self.dtype:
                self.dtypes[name] = dtype

    def total(self) -> dict[str, Sums]:
        """name -> its sums."""
        rows = [row for part in self._sums for row in part.tolist()]
        return {name: (one, two) for name, (one, two) in zip(self._names, rows, strict=True)}

    def expectation(self) -> dict[str, object]:
        """What a report has to be asked with."""
        return {"dtype": self.dtype, "dtypes": self.dtypes}


def of_target(sent: Mapping[str, Sums], layers: int) -> dict[str, Sums]:
    """Without the layers for multi-token prediction, which a draft model takes and no report covers."""
    def predicts(name: str) -> bool:
        match = _LAYER.search(name)
        return _PREDICTOR.search(name) is not None or (match is not None and int(match[2]) >= layers)

    return {name: value for name, value in sent.items() if not predicts(name)}


def check(who: str, url: str, sent: Mapping[str, Sums], ranks: Sequence[Mapping], *,
          copies: int = 1, random: bool = False) -> None:
    """Compare what was sent with what an engine's ranks report.

    Args:
        sent: name -> sums of the whole stream.
        ranks: each with "sums" of its parameters and persistent buffers, and the names of those "changed" since its
            first report.
        copies: ranks that hold the same head of keys and values, because there are more ranks than heads.
        random: whether the engine started with random weights: then it must have been sent everything.

    Raises:
        SyncError: names what differs, or what was never sent.
    """
    problems = differences(sent, whole(ranks), copies)
    if problems:
        raise SyncError(f"{who} does not hold the weights that were sent", who=url, got=_few(problems),
                        fix="it stays paused and serves nothing; report this with the engine's log")
    unsent = never_sent(sent, whole(ranks))
    changed = {name for rank in ranks for name in rank["changed"]} & set(unsent)
    if unsent and random:
        raise SyncError(f"{who} has weights that the trainer never sends; they are random there", who=url,
                        got=_few(unsent), fix="start the engine with --sglang-load-format auto, so that they come "
                        "from the checkpoint, or add them to the family's weight_map")
    if changed:
        raise SyncError(f"{who} has weights that the trainer never sends and that changed since its first sync",
                        who=url, got=_few(sorted(changed)), fix="keep them when memory is released, or send them")


def whole(ranks: Sequence[Mapping]) -> dict[str, Sums]:
    """Sums of the parameters that the ranks hold parts of.

    Ranks that hold the same bits hold copies, which count once; others hold different parts.
    """
    parts: dict[str, set[Sums]] = {}
    for rank in ranks:
        for name, (one, two) in rank["sums"].items():
            parts.setdefault(name, set()).add((one, two))
    return {name: added(each) for name, each in parts.items()}


def added(parts: Iterable[Sums]) -> Sums:
    """Modulo 2^64, as int64."""
    one, two = (sum(column) for column in zip((0, 0), *parts, strict=True))
    return _wrapped(one), _wrapped(two)


def differences(sent: Mapping[str, Sums], held: Mapping[str, Sums], copies: int = 1) -> list[str]:
    """What differs, in words."""
    found = [name for name, value in held.items() if name in sent and sent[name] != value]
    ours, theirs = _by_layer(sent.keys() - held.keys()), _by_layer(held.keys() - sent.keys())
    for layer, names in ours.items():
        parts = [sent[name] for name in names for _ in range(copies if _KEY_VALUE.search(name) else 1)]
        if (there := theirs.get(layer)) is None:
            found.append(f"{layer}: the engine has no place for {_few(names)}")
        elif added(parts) != added(held[name] for name in there):
            found.append(f"{layer}: {_few(names)} as {_few(there)}")
    return found


def never_sent(sent: Mapping[str, Sums], held: Mapping[str, Sums]) -> list[str]:
    """Names of what the engine holds and nothing of the stream can have filled."""
    ours, theirs = _by_layer(sent.keys() - held.keys()), _by_layer(held.keys() - sent.keys())
    return sorted(name for layer, names in theirs.items() if layer not in ours for name in names)


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        match = _LAYER.search(name)
        found.setdefault(f"layer {match[2]}" if match else "outside of the layers", []).append(name)
    return found


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _few(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
