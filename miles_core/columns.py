"""Columns: data that rides along with samples, declared once and then carried everywhere.

A column says how it is aligned, its dtype, its further axes, what fills gaps and what happens when a sample lacks it.
From the declaration alone the core validates, packs, pads, splits and gathers it; nothing else in the core knows a
column by name unless the core itself owns it.

Alignment, for a sample of T tokens of which the last R are the response:

    token       T      one row per token
    prediction  T-1    row p belongs to the prediction of token p+1
    response    R      one row per response token
    sample      -      one row per sample
    group       -      one row per group, repeated for its samples

Everything per token is packed on one grid of T rows where row p stands for the prediction *made at* token p: prediction
columns keep their row, response column j lies at row T-R-1+j, and rows that a column says nothing about hold `pad`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

import numpy as np

from miles_core.errors import ColumnError
from miles_core.types import Sample


class Align(StrEnum):
    """What a column has one row for; the table above gives the lengths."""

    TOKEN = "token"
    PREDICTION = "prediction"
    RESPONSE = "response"
    SAMPLE = "sample"
    GROUP = "group"


PER_TOKEN = (Align.TOKEN, Align.PREDICTION, Align.RESPONSE)


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of data that rides along.

    Args:
        name: key in `Sample.columns`.
        align: one of Align.
        dtype: numpy dtype in memory.
        axes: names of further axes, such as ("layer", "topk"). Every rank has all of them.
        pad: value of rows that belong to no token of the column.
        missing: "error", or "pad" to fill a sample that has no such column.
        spans: "concat" when generations of one sample append rows, "last" when the last one replaces all.
        owner: who declares it, for messages.
    """

    name: str
    align: Align
    dtype: str = "float32"
    axes: tuple[str, ...] = ()
    pad: float = 0
    missing: str = "error"
    spans: str = "concat"
    owner: str = "core"


CORE = (
    Column("tokens", Align.TOKEN, "int32"),
    Column("loss_mask", Align.RESPONSE, "uint8"),
    Column("rollout_log_probs", Align.RESPONSE, "float32"),
    Column("versions", Align.RESPONSE, "int32", pad=-1),
    Column("log_probs", Align.RESPONSE, "float32", missing="pad"),
    Column("ref_log_probs", Align.RESPONSE, "float32", missing="pad"),
    Column("advantages", Align.RESPONSE, "float32", missing="pad"),
)
"""The core's own: the first four come with every sample, the trainer adds the others after its log-prob pass."""


@dataclass(slots=True)
class Packed:
    """Samples laid end to end.

    Args:
        cu_seqlens: [n+1] int32, where each sample's (padded) rows begin; rows after the last belong to nobody.
        lengths: [n] int32, tokens of each sample without padding.
        rows: name -> [rows, *axes], the per-token columns.
        values: name -> [n, *axes], the per-sample and per-group columns.
    """

    cu_seqlens: np.ndarray
    lengths: np.ndarray
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)


class Columns(dict[str, Column]):
    """The columns of a run. Two owners of one name are an error that names both."""

    def __init__(self, declared: Iterable[Column] = ()):
        super().__init__()
        for column in (*CORE, *declared):
            first = self.get(column.name)
            if first is not None:
                raise ColumnError(f"column {column.name!r} is declared twice: by {first.owner} and {column.owner}",
                                  code="column-declared-twice",
                                  fix="rename one of them, for instance with the plugin's name as a prefix")
            if column.missing not in ("error", "pad") or column.spans not in ("concat", "last"):
                raise ColumnError(f"column {column.name!r} has an unknown policy", code="column-policy-unknown",
                                  got=f"missing={column.missing!r}, spans={column.spans!r}", who=column.owner,
                                  fix='missing is "error" or "pad"; spans is "concat" or "last"')
            self[column.name] = column

    def check(self, sample: Sample, *, values: bool = True) -> None:
        """Refuse a sample whose data do not fit the declarations, and cast the rest; `values` looks for NaN, too.

        Raises:
            ColumnError: undeclared, missing, of the wrong length, of the wrong rank, or not finite.
        """
        for name, array in sample.columns.items():
            column = self.get(name)
            if column is None:
                raise ColumnError(f"{sample.name} has the undeclared column {name!r}", code="column-undeclared",
                                  fix="declare it in the plugin's `columns` hook")
            sample.columns[name] = _fit(column, np.asarray(array), sample, values)
        for column in self.values():
            if column.missing == "error" and column.name not in sample.columns:
                raise ColumnError(f"{sample.name} lacks the column {column.name!r}", code="column-missing",
                                  who=column.owner, fix='fill it in the generator, or declare missing="pad"')

    def pack(self, samples: Sequence[Sample], *, multiple: int = 1, total_multiple: int = 1) -> Packed:
        """Lay samples end to end: the one path that every column takes into the trainer.

        Args:
            multiple: each sample's rows are padded to a multiple of this (2 x context-parallel size).
            total_multiple: the sum of rows is padded to a multiple of this (sequence parallelism).
        """
        lengths = np.array([s.length for s in samples], np.int32)
        cu = np.concatenate([[0], np.cumsum(-(-lengths // multiple) * multiple)]).astype(np.int32)
        total = -(-int(cu[-1]) // total_multiple) * total_multiple
        packed = Packed(cu, lengths)
        for column in self.values():
            axes = _axes(column, samples)
            if axes is None:
                continue
            shape = (total if column.align in PER_TOKEN else len(samples), *axes)
            target = np.full(shape, column.pad, column.dtype)
            for i, sample in enumerate(samples):
                if column.name in sample.columns:
                    where = grid(column.align, sample) if column.align in PER_TOKEN else slice(0, 1)
                    base = int(cu[i]) if column.align in PER_TOKEN else i
                    target[base + where.start : base + where.stop] = sample.columns[column.name]
            (packed.rows if column.align in PER_TOKEN else packed.values)[column.name] = target
        return packed


@contextmanager
def read_only(samples: Sequence[Sample], who: str) -> Iterator[None]:
    """For the time of a call of `who`: samples whose columns cannot be changed. Columns of its own it may add.

    numpy refuses to write into what is shown; torch, which does not ask numpy, writes, and checksums tell.

    Raises:
        ColumnError: the call writes into a column, or takes one of the core's away or replaces it.
    """
    before = [(sample.columns, _checksums(sample)) for sample in samples]
    for sample in samples:
        sample.columns = {name: _locked(array) for name, array in sample.columns.items()}
    shown = [dict(sample.columns) for sample in samples]
    error = ColumnError("a read-only hook changed the columns of samples", code="column-changed-by-reader", who=who,
                        fix="copy before changing; only a generator and generate_response may write columns")
    try:
        yield
        for sample, (columns, sums), views in zip(samples, before, shown, strict=True):
            replaced = any(sample.columns.get(one.name) is not views.get(one.name) for one in CORE)
            if replaced or _checksums(sample) != sums:
                raise error
            columns |= {name: array for name, array in sample.columns.items() if array is not views.get(name)}
    except ValueError as cause:
        if "read-only" not in str(cause):
            raise
        raise error from cause
    finally:
        for sample, (columns, _) in zip(samples, before, strict=True):
            sample.columns = columns


def _checksums(sample: Sample) -> list[int]:
    arrays = (sample.columns[column.name] for column in CORE if column.name in sample.columns)
    return [zlib.crc32(np.ascontiguousarray(array).data) for array in arrays]


def _locked(array: np.ndarray) -> np.ndarray:
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def grid(align: Align, sample: Sample) -> slice:
    """The rows of a sample's T-row grid that a column of this alignment fills."""
    total = sample.length
    if align is Align.TOKEN:
        return slice(0, total)
    if align is Align.PREDICTION:
        return slice(0, total - 1)
    return slice(total - sample.response_length - 1, total - 1)


def _rows(column: Column, sample: Sample) -> int:
    place = grid(column.align, sample)
    return int(place.stop - place.start)


def trained(samples: Sequence[Sample], column: str) -> np.ndarray:
    """The values of a column, [N], at all response tokens that are trained on."""
    return np.concatenate([np.zeros(0, np.float32), *(s.columns[column][s.columns["loss_mask"] > 0] for s in samples)])


def joined(begun: Sample, later: Sample, columns: Mapping[str, Column]) -> Sample:
    """One sample from two spans of its response, of which the second was drawn after the whole first as its prompt.

    Rows of the first span stay what they were when it was drawn, also where the second computed them again. Columns
    that say "last", and those without rows, are the second's; what only one span has is filled with `pad`.

    Args:
        begun: P + M tokens, of which M are response.
        later: P + M + N tokens, of which N are response; its other fields (status, figures) are the result's.

    Raises:
        ColumnError: the second does not begin with the tokens of the first.
    """
    size = begun.length
    if not np.array_equal(later.tokens[:size], begun.tokens) or later.length - later.response_length != size:
        raise ColumnError(f"{begun.name} cannot be continued: its later span starts with different tokens",
                          code="continued-tokens-differ", who="core",
                          fix="send exactly the tokens so far as the input of the next request")
    values = {name: _spliced(columns[name], begun.columns.get(name), later.columns.get(name), begun, later)
             for name in {*begun.columns, *later.columns}}
    return replace(later, columns=values, response_length=begun.response_length + later.response_length,
                   metadata={**begun.metadata, **later.metadata})


def _spliced(column: Column, first: np.ndarray | None, second: np.ndarray | None, begun: Sample, later: Sample,
             ) -> np.ndarray:
    whole = cast("np.ndarray", first if second is None else second)  # one of the two has it
    if column.align not in PER_TOKEN or column.spans == "last":
        return whole
    response = column.align is Align.RESPONSE
    head = _rows(column, begun)
    if first is None:  # the second computed these rows, too, unless they are of the response alone
        first = _gap(column, head, whole) if response else whole[:head]
    if second is None:
        second = _gap(column, later.response_length, first)
    elif not response:
        second = second[head:]
    return np.concatenate([first, second])


def _gap(column: Column, rows: int, like: np.ndarray) -> np.ndarray:
    return np.full((rows, *like.shape[1:]), column.pad, column.dtype)


def split(packed: Packed, rank: int, size: int) -> Packed:
    """One rank's part under context parallelism: every sample is cut in 2 x size chunks, rank r holds r and 2size-1-r.

    The zig-zag evens out causal attention (Megatron-core's layout). Each sample's padded length must be a multiple of
    2 x size, which `pack(multiple=2 * size)` sees to; rows after the last sample are cut alike.
    """
    if size == 1:
        return packed
    total = len(next(iter(packed.rows.values())))
    bounds = sorted({*packed.cu_seqlens.tolist(), total})
    parts = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        chunk, remainder = divmod(int(stop - start), 2 * size)
        if remainder:
            raise ColumnError("the length of a packed sample does not divide for context parallelism",
                              code="sample-length-not-divisible", got=int(stop - start), who="core",
                              fix=f"pack with multiple={2 * size}")
        for piece in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(start + piece * chunk, start + (piece + 1) * chunk))
    index = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    rows = {name: array[index] for name, array in packed.rows.items()}
    return Packed((packed.cu_seqlens // size).astype(np.int32), packed.lengths, rows, packed.values)


def _fit(column: Column, array: np.ndarray, sample: Sample, values: bool) -> np.ndarray:
    rows = _rows(column, sample) if column.align in PER_TOKEN else None
    rank = len(column.axes) + (rows is not None)
    if array.ndim != rank or (rows is not None and len(array) != rows):
        expected = ([rows] if rows is not None else []) + list(column.axes)
        raise ColumnError(
            f"column {column.name!r} of {sample.name} should have shape {expected} ({column.align})",
            code="column-shape", got=list(array.shape), who=column.owner,
            fix="return one row per " + {"prediction": "token but the last"}.get(column.align, column.align))
    if values and array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ColumnError(f"column {column.name!r} of {sample.name} contains NaN or infinity", code="column-not-finite",
                          who=column.owner, fix="find out why the engine or plugin produced it")
    if array.dtype == column.dtype:
        return array
    cast = array.astype(column.dtype)
    if array.dtype.kind in "iub" and not np.array_equal(cast, array):
        raise ColumnError(f"column {column.name!r} of {sample.name} does not fit {column.dtype}",
                          code="column-dtype-overflow", got=f"{array.min()} to {array.max()}", who=column.owner,
                          fix="declare a wider dtype")
    return cast


def _axes(column: Column, samples: Sequence[Sample]) -> tuple[int, ...] | None:
    """Sizes of the further axes, which must agree among the samples that have the column; None when none has it."""
    lead = column.align in PER_TOKEN
    shapes = {s.columns[column.name].shape[lead:] for s in samples if column.name in s.columns}
    if len(shapes) > 1:
        raise ColumnError(f"samples disagree on the axes {column.axes} of column {column.name!r}",
                          code="column-axes-differ", got=sorted(shapes), who=column.owner,
                          fix="give every sample of a run the same axis sizes")
    return shapes.pop() if shapes else None
