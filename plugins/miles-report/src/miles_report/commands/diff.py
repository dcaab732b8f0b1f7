"""miles diff A B: where two runs part."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_core.errors import RunDirectoryError, UnknownPluginError, clean
from miles_core.reading import reading

if TYPE_CHECKING:
    from miles_report.diff import Comparison, Difference, Record

RUN = click.Path(path_type=Path)
SHOWN = 40


@click.command()
@click.argument("a", type=RUN)
@click.argument("b", type=RUN, required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--across", metavar="FLAGS", help="Replay one batch on the run file A, and on B (or A again) with FLAGS.")
@click.option("--both", metavar="FLAGS", default="", help="With --across: flags of both sides.")
@click.option("--batch", metavar="PATH", help="With --across: a rollout that --save-debug-rollout-data wrote.")
@click.option("--b-on-cpu", is_flag=True, help="With --across: side B sees no GPU.")
def diff(a: Path, b: Path | None, as_json: bool, across: str | None, both: str, batch: str | None,
         b_on_cpu: bool) -> None:
    """Name the first difference between two runs, A and B: the folders that --run-dir named.

    \b
      miles run a.toml --run-dir runs/a --debug-determinism
      miles run a.toml --run-dir runs/b --debug-determinism
      miles diff runs/a runs/b

    With --debug-determinism a run records a hash of every weight and of every column of its batch at each rollout. The
    first one that differs says which side parted: sampling, rewards, log-probs, advantages, or the optimizer step.
    Without it metrics are compared, times aside; they can show that runs differ, but not that they are the same.

    Exit codes: 0 the same; 1 different, or one has rollouts that the other lacks; 2 cannot be compared. Plan and
    versions are shown and do not count: a run may be the same under another layout.

    With --across (plugin divergence) A and B are run files, and nothing has to have run: a recorded batch goes through
    the trainers of both, and the first module, tensor, sample and token that differ beyond rounding are named.

    \b
      miles run a.toml --debug-rollout-only --num-rollout 1 \\
        --save-debug-rollout-data 'saved/{rollout_id}'
      miles diff a.toml --across "--trainer fsdp" --batch saved/0
      miles diff a.toml --batch saved/0 --across \\
        "--tensor-model-parallel-size 2 --actor-num-gpus-per-node 2"
      miles diff a.toml --across "--bf16" --both "--trainer fsdp" --batch saved/0
      miles diff a.toml b.toml --across "" --batch saved/0
    """
    if across is not None:
        raise SystemExit(_across()(a, b or a, shlex.split(across), both=shlex.split(both), batch=batch,
                                   on_cpu=b_on_cpu, as_json=as_json))
    if b is None:
        raise click.UsageError("Missing argument 'B'.")
    from miles_report.diff import compare, load

    with reading(f"{a}/ or {b}/", RunDirectoryError):
        records = load(a), load(b)
        comparison = compare(*records)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(comparison), "compared": comparison.common,
                               "exit_code": comparison.exit_code}))
    else:
        click.echo(clean("\n".join(_text(comparison, records))))
    raise SystemExit(comparison.exit_code)


def _across() -> Callable[..., int]:
    """
    Raises:
        UnknownPluginError: the package that replays is not installed.
    """
    if importlib.util.find_spec("miles_divergence") is None:
        raise UnknownPluginError("--across is of a package that is not installed", who="miles diff",
                                 code="across-not-installed", fix="pip install miles-divergence")
    from miles_divergence.command import across

    return across


def _text(comparison: Comparison, records: tuple[Record, Record]) -> Iterator[str]:
    from miles_report.diff import span

    for letter, record, rollouts in zip("AB", records, comparison.rollouts, strict=True):
        yield f"{letter}  {record.directory}  rollouts {span(rollouts)}  {record.status or 'running, or killed'}"
    yield ""
    yield "plan and versions: " + ("the same" if not comparison.facts else f"{len(comparison.facts)} differ")
    for label, left, right in comparison.facts[:SHOWN]:
        yield f"  {label}: {_short(left)} | {_short(right)}"
    if len(comparison.facts) > SHOWN:
        yield f"  and {len(comparison.facts) - SHOWN} more; --json has all"
    yield ""
    if comparison.by == "metrics":
        lacking = " and ".join(str(record.directory) for record in records if not record.totals)
        yield f"no hashes on record in {lacking}: comparing metrics. Run both with --debug-determinism to compare all."
    yield from _first(comparison) if comparison.first else _equal(comparison)
    last_a, last_b = (rollouts[-1] for rollouts in comparison.rollouts)
    if last_a != last_b:
        yield f"{'A' if last_a > last_b else 'B'} is longer: it goes on to rollout {max(last_a, last_b)}"
    elif comparison.rollouts[0] != comparison.rollouts[1]:
        yield "one lacks rollouts that the other has"


def _equal(comparison: Comparison) -> Iterator[str]:
    from miles_report.diff import span

    yield f"rollouts {span(comparison.common)}: {comparison.by} are the same"
    if comparison.by == "metrics":
        yield "equal metrics do not prove equal runs"


def _first(comparison: Comparison) -> Iterator[str]:
    first = comparison.first
    what = " ".join([first.part, *(first.names[:1] if first.part != "grad_norm" else ())])
    what += "" if first.names else " (the names are not on record)"
    more = f" (and {len(first.names) - 1} more of {first.of})" if len(first.names) > 1 else ""
    values = f": {first.values[0]} | {first.values[1]}" if first.part in ("metrics", "grad_norm") else ""
    yield f"rollout {first.rollout_id}: first difference: {what}{more}{values}"
    if sentence := _sentence(first):
        known = first.rollout_id - 1 in comparison.common or first.side not in ("rollout", "score")
        yield f"  {sentence}" + ("" if known else "; the weights before it are not on record")
    before = [rollout_id for rollout_id in comparison.common if rollout_id < first.rollout_id]
    if before:
        yield f"  the same before: rollouts {before[0]} to {before[-1]}"


def _sentence(first: Difference) -> str | None:
    """Which side of the loop parted; what comes earlier in the loop is equal."""
    return {
        "rollout": "the rollout side: what was sampled is another batch",
        "reward": "the rewards: equal tokens were scored differently",
        "plugin": "a plugin's column: tokens and rewards are equal",
        "score": "the trainer's log-probs: tokens and rewards are equal",
        "advantage": "the advantages: tokens, rewards and log-probs are equal",
        "step": f"the optimizer step: the batch is identical up to rollout {first.rollout_id}",
    }.get(first.side)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


command = diff
