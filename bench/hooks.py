"""What hooks cost: a bound named hook over a direct call, an absent one, and all of them in a step of the demo.

    python bench/hooks.py                    # two Markdown tables, half a minute

A call is the least of many rounds, in nanoseconds, less what the empty loop takes. `timed` is the hook of an installed
plugin, whose seconds are in the record; `plain` that of a built-in part, which nobody times. The demo runs with
a profiler, which makes all else slow, to count every call of every hook, and undisturbed for the seconds of a step and
of the plugins' hooks in it, which are the run's own metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import FrameType

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from miles_core.config.tables import RunConfig
from miles_core.plugins import bind, select
from miles_core.plugins.plan import prepare
from miles_core.record.events import read

CALLS, ROUNDS, STEPS = 20_000, 60, 8
SCORER = '''from miles_core import hookimpl

class Scorer:
    """Scores nothing."""

    @hookimpl("reward", name="scorer")
    def score(self, sample):
        return 1.0
'''


def nanoseconds(ways: dict[str, tuple[str, dict[str, object]]]) -> dict[str, float]:
    """Of each statement, the least of rounds that take turns, less the empty loop."""
    timers = {name: timeit.Timer(statement, globals=names) for name, (statement, names) in ways.items()}
    timers["empty"] = timeit.Timer("pass")
    least = dict.fromkeys(timers, float("inf"))
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            least[name] = min(least[name], timer.timeit(CALLS) / CALLS * 1e9)
    return {name: least[name] - least["empty"] for name in ways}


def calls() -> dict[str, float]:
    """Nanoseconds of a call in each way, and of asking for a hook that nobody implements."""
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "scorer.py")).write_text(SCORER)
        (one,) = select.select([(str(path), "bench")], [])
        config = RunConfig(options={"scorer": {}})
        timed = bind.bind([one], config, "rollout")
        plain = bind.bind([replace(one, source="built-in")], config, "rollout")
    ways = {"direct": ("f(s)", {"f": timed.instances["scorer"].score, "s": None})}
    for name, hooks in (("plain", plain), ("timed", timed)):
        ways[name] = ("f(s)", {"f": hooks.reward["scorer"], "s": None})
    ways["absent"] = ("if f is not None: f(s)", {"f": timed.filter_group, "s": None})
    ways["absent, looked up"] = ("if h.filter_group is not None: h.filter_group(s)", {"h": timed, "s": None})
    return nanoseconds(ways)


def demo(rollouts: int, count: Counter[str] | None = None) -> tuple[float, list[dict[str, float]]]:
    """(CPU seconds, metrics of each rollout) of the demo; `count` is given the calls of each hook."""
    from miles_core.execute import execute  # takes a second

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith("<hook "):
            count[frame.f_code.co_name] += 1

    with tempfile.TemporaryDirectory() as folder:
        plan = prepare(Path("examples/demo.toml"), [
            "--run-dir", folder, "--num-rollout", str(rollouts), "--eval-interval", "1000", "--skip-eval-before-train",
        ])  # fmt: skip
        if count is not None:
            threading.setprofile(profile)
            sys.setprofile(profile)
        begin = time.process_time()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                execute(plan, live=False)
        finally:
            threading.setprofile(None)
            sys.setprofile(None)
        used = time.process_time() - begin
        return used, [event["metrics"] for event in read(Path(folder, "events.jsonl")) if event["event"] == "metrics"]


def step() -> tuple[Counter[str], float, dict[str, float]]:
    """(calls of each hook, CPU seconds, metrics) of one step: what more steps add to a run."""
    few, many = Counter[str](), Counter[str]()
    demo(2, few)
    demo(4, many)
    counts = Counter({hook: (number - few[hook]) // 2 for hook, number in many.items() if number > few[hook]})
    (short, _), (long, metrics) = demo(2), demo(2 + STEPS)
    names = {name for found in metrics[2:] for name in found if name.startswith("perf/hook")}
    medians = {name: statistics.median(found.get(name, 0.0) for found in metrics[2:]) for name in names}
    return counts, (long - short) / STEPS, medians


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    cost = calls()
    print("| a call | ns | over direct |\n|---|---|---|")
    for way, took in cost.items():
        over = "" if "absent" in way else f"{took - cost['direct']:.0f}"
        print(f"| {way} | {took:.0f} | {over} |")
    counts, seconds, medians = step()
    print(f"\nA step of the demo: {seconds:.2f} CPU s, {counts.total()} calls of hooks: "
          + ", ".join(f"{hook} {number}" for hook, number in counts.most_common()))
    for way in ("plain", "timed"):
        share = counts.total() * (cost[way] - cost["direct"]) * 1e-9 / seconds
        print(f"all of them {way}: {share:.4%} of the step over direct calls")
    for name in sorted(name for name in medians if name.startswith("perf/hooks/")):
        rest = name.removeprefix("perf/hooks/")
        print(f"{rest}: {medians[f'perf/hook_calls/{rest}']:.0f} calls, {medians[name] * 1e3:.2f} ms, "
              f"{medians[name] / seconds:.2%} of the step")


if __name__ == "__main__":
    main()
