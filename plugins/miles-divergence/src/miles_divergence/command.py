"""`miles diff A [B] --across FLAGS`: two sides on one recorded batch, and the first tensor in which they part."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.errors import DataError

if TYPE_CHECKING:
    from rich.table import Table

    from miles_core.plugins.plan import Plan
    from miles_core.types import Batch
    from miles_divergence.compare import Comparison, Row

BEFORE, AFTER = 5, 4
"""Rows of the table around the first that differs."""


def across(a: Path, b: Path, flags: Sequence[str], *, both: Sequence[str] = (), batch: str | None = None,
           on_cpu: bool = False, as_json: bool = False) -> int:
    """Replay a batch on side A, on side B, and on side A with noise; print what differs first.

    Args:
        a, b: run files.
        flags: of side B alone; `both`: of both.
        batch: of --save-debug-rollout-data; by default rollout 0 of what the run file loads or saves there.
        on_cpu: side B sees no GPU.

    Returns:
        The exit code: 0 they agree, 1 they differ.

    Raises:
        DataError: there is no batch.
        MilesError: what a side refuses or fails with.
    """
    from miles_core.record.replay import load_batch
    from miles_divergence.compare import compare
    from miles_divergence.replay import replay

    path = batch or _recorded(a, both)
    replayed = load_batch(path, 0)
    environment = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else None
    with tempfile.TemporaryDirectory(prefix="miles-across-") as folder:
        def side(name: str, run_file: Path, more: Sequence[str]) -> Plan:
            return _plan(run_file, [*both, *more], Path(folder, name))

        plans = side("a", a, ()), side("b", b, flags)  # what either refuses is said before any side computes
        first = replay(plans[0], replayed, Path(folder, "a"))
        second = replay(plans[1], replayed, Path(folder, "b"), environment)
        noise = ["--divergence.noise", repr(max(first.epsilon, second.epsilon))]
        noisy = replay(side("noisy", a, noise), replayed, Path(folder, "noisy"))
        comparison = compare(first, second, noisy)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(comparison), "batch": path,
                               "exit_code": comparison.exit_code}))
    else:
        words = " ".join([*both, *flags, *(["on the CPU"] if on_cpu else [])])
        _show(comparison, replayed, [f"A  {' '.join([str(a), *both])}", f"B  {b} {words}".rstrip()])
    return comparison.exit_code


def _plan(run_file: Path, flags: Sequence[str], folder: Path) -> Plan:
    """Of a run that samples nothing and writes what its modules compute to a folder."""
    from miles_core.plugins.plan import prepare

    return prepare(run_file, [*flags, "--plugin", "divergence", "--divergence.out", str(folder),
                              "--load-debug-rollout-data", f"{folder}/{{rollout_id}}"])


def _recorded(run_file: Path, flags: Sequence[str]) -> str:
    """
    Raises:
        DataError: the run file names no recorded batch.
    """
    from miles_core.config.load import load

    debug = load(run_file, flags).config.debug
    template = debug.load_debug_rollout_data or debug.save_debug_rollout_data
    if template is None:
        raise DataError("there is no batch to replay", code="across-without-batch", who=str(run_file),
                        got="neither --batch nor a run that records its rollouts",
                        fix=f"miles run {run_file} --debug-rollout-only --num-rollout 1 --save-debug-rollout-data "
                        "'saved/{rollout_id}', then --batch saved/0")
    return template.format(rollout_id=0)


def _show(comparison: Comparison, batch: Batch, sides: Sequence[str]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in sides:
        console.print(Text(line), soft_wrap=True)
    if shown := _around(comparison):
        console.print(_table(shown, comparison.first))
    for line in _verdict(comparison, batch):
        console.print(Text.from_markup(line), soft_wrap=True)


def _around(comparison: Comparison) -> list[Row]:
    """The rows near the first that differs; of sides that agree the worst ones."""
    rows, first = comparison.rows, comparison.first
    if first is None:
        worst = {id(row) for row in sorted(rows, key=lambda row: -row.excess)[: BEFORE + AFTER]}
        return [row for row in rows if id(row) in worst]
    at = rows.index(first)
    return rows[max(0, at - BEFORE) : at + 1 + AFTER]


def _table(rows: Sequence[Row], first: Row | None) -> Table:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    titles = (Column(title, justify="right") for title in ("relative", "limits", "tokens", "from"))
    table = Table(Column("module", no_wrap=True), "tensor", *titles, box=box.SIMPLE_HEAD, pad_edge=False,
                  padding=(0, 1, 0, 0))
    for row in rows:
        style = "bold red" if row is first else {"agree": "green", "elsewhere": "yellow"}.get(row.state, "")
        start = f"{row.sample}:{row.token}" if row.sample is not None else ""
        table.add_row(*(Text(cell, style) for cell in (
            row.name, row.what, f"{row.relative:.1e}", f"{row.excess:.2g}", f"{row.differing}/{row.of}", start)))
    return table


def _verdict(comparison: Comparison, batch: Batch) -> Iterator[str]:
    from rich.markup import escape

    first, count = comparison.first, len(comparison.rows)
    if comparison.same:
        yield f"[green]the same but for rounding[/]: {count} tensors of the forward and the backward pass"
    elif first is None:
        name = next(name for name in comparison.metrics if name in comparison.parted)
        one, other = comparison.metrics[name]
        yield f"[bold red]{name} differs[/]: {one:.6g} and {other:.6g}, though all {count} tensors agree"
        yield "  gradients by outputs are equal, so it is how a parameter's own is added up, over tokens or ranks"
    else:
        sample = batch.samples[first.sample or 0]
        yield f"[bold red]first divergence: {escape(', '.join(comparison.modules))}[/]"
        yield f"  {escape(comparison.reason)}"
        yield f"  sample {first.sample} ({escape(sample.name)}), token {first.token} of {sample.length}"
    for title, names in (("weights that differ", comparison.weights), ("weights of A alone", comparison.alone[0]),
                         ("weights of B alone", comparison.alone[1])):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield f"  {title}: {escape(', '.join(names[:3]))}{more}"
    if comparison.rerouted:
        yield f"  in {len(comparison.rerouted)} samples rounding chose other experts: compared up to there"
