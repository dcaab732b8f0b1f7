"""A whole run in seconds: a tiny random Qwen3, the local engine and the Megatron trainer on the CPU, and your plugins.

    from miles_testing import toy_run

    def test_it_trains():
        run = toy_run(["./my_plugin.py"], steps=2)
        assert run.metrics[-1]["train/grad_norm"] > 0

It is `miles run` in a process of its own, forked from one that has imported torch and Megatron-core: the first run of a
session waits for those imports, the others do not.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.plugins.plan import prepare
from miles_core.plugins.select import select
from miles_testing.forked import miles
from miles_testing.tiny import run_file


@dataclass(frozen=True)
class ToyRun:
    """What a toy run left.

    Args:
        metrics: of each rollout, by name.
        events: everything of events.jsonl.
        folder: the run directory; out: what was printed; seconds: how long it took, imports of the session apart.
    """

    metrics: list[dict[str, float]]
    events: list[dict[str, Any]]
    folder: Path
    out: str
    seconds: float


def toy_run(plugins: Sequence[str | Path] = (), *, steps: int = 2, options: Mapping[str, object] | None = None,
            flags: Sequence[str] = (), checkpoint: Path | None = None, timeout: float = 120.0) -> ToyRun:
    """Train for some rollouts of four answers each, one optimizer step apiece.

    Args:
        plugins: names of installed ones, or paths of files, in the order of the run.
        steps: rollouts.
        options: keys of the run file: {"rollout.max_lag": 1, "algorithm.use_kl_loss": True}.
        flags: of `miles run`.
        checkpoint: a Hugging Face directory with train.jsonl; by default a tiny random one.

    Raises:
        AssertionError: the run did not end well; shows what it said.
    """
    folder = Path(tempfile.mkdtemp(prefix="miles-toy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    named = [str(Path(one).resolve()) if str(one).endswith(".py") else str(one) for one in plugins]
    offers = [offer for one in select([(name, "toy_run") for name in named], []) for offer in one.manifest.offers]
    own = {hook: [offer.name for offer in offers if offer.hook == hook] for hook in ("reward", "advantage")}
    tables: dict[str, dict[str, object]] = {"rollout": {"num_rollout": steps}, "optimizer": {"lr": 1e-3}}
    if own["reward"]:
        tables["rollout"]["rm_type"] = own["reward"]
    if own["advantage"]:
        tables["algorithm"] = {"advantage_estimator": own["advantage"][0]}
    path = run_file(folder / "run.toml", named, tables, options or {}, checkpoint=checkpoint)
    outcome = miles(["run", path, "--no-live", *flags], folder, timeout=timeout)
    if outcome.code:
        raise AssertionError(f"the toy run ended with {outcome.code} after {outcome.seconds:.1f} s\n"
                             f"{outcome.out}\n{outcome.err}")
    written = folder / (prepare(path, list(flags)).config.checkpoint.run_dir or "run")  # the flags may name another
    events = [json.loads(line) for line in (written / "events.jsonl").read_bytes().splitlines()]
    return ToyRun([event["metrics"] for event in events if event["event"] == "metrics"], events, written,
                  outcome.out, outcome.seconds)


def resume_contract(plugins: Sequence[str | Path] = (), *, steps: int = 3, **arguments: Any) -> None:
    """A toy run that ends after every rollout and is resumed is, to the bit, the one that went through.

    Args:
        arguments: further ones of `toy_run`.

    Raises:
        AssertionError: metrics, samples, weights or evaluations that differ.
    """
    from miles_testing.kill_resume import problems

    folder, flags = Path(tempfile.mkdtemp(prefix="miles-toy-")), list(arguments.pop("flags", ()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def start(run: Path, *more: str) -> None:
        where = ["--run-dir", str(run), "--save", f"{run}/checkpoints", "--load", f"{run}/checkpoints"]
        toy_run(plugins, steps=steps, flags=[*flags, *where, "--save-interval", "1", *more], **arguments)

    start(folder / "through")
    for _ in range(steps):
        start(folder / "resumed", "--debug-exit-after-rollout", "1")
    wrong = problems(folder / "resumed", folder / "through", rollouts=steps, ends=steps)
    if wrong:
        raise AssertionError("a run that is resumed after every rollout is another one:\n" + "\n".join(wrong))
