"""What trackers cost a run: the demo without any and with each, in turn, offline.

    python bench/trackers.py [--rounds 3] [--rollouts 12]

Of every tracker: milliseconds that its hooks take of a rollout on the loop's thread, which training waits for, as the
run measures them (perf/hooks/...), the first rollout apart; their share of a step; and CPU seconds of the whole run
beside those of one without trackers, the library's import, its own processes and the end of the run included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACKERS = ("none", "wandb", "mlflow", "trackio", "swanlab", "telemetry", "tensorboard")


def run(tracker: str, rollouts: int) -> tuple[list[dict[str, float]], float]:
    """Metrics of each rollout, and CPU seconds."""
    folder = Path(tempfile.mkdtemp(prefix="trackers-"))
    named = [] if tracker == "none" else ["--plugin", tracker]
    named += ["--telemetry.file", "{run_dir}/spans.jsonl", "--telemetry.port", "0"] if tracker == "telemetry" else []
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [Path(sys.executable).with_name("miles"), "run", "examples/demo.toml", "--no-live", "--run-dir", folder]
    subprocess.run([*command, "--num-rollout", str(rollouts), *named], cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "TRACKIO_DIR": str(folder / "trackio")})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    shutil.rmtree(folder)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [event["metrics"] for event in events if event["event"] == "metrics"], cpu


def main() -> None:
    """Print a row for each tracker."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=12)
    options = parser.parse_args()
    rows: dict[str, list[tuple[float, float, float]]] = {tracker: [] for tracker in TRACKERS}
    for _ in range(options.rounds):
        for tracker in TRACKERS:
            metrics, cpu = run(tracker, options.rollouts)
            hooks = [sum(value for name, value in one.items() if name.startswith(f"perf/hooks/{tracker}/"))
                     for one in metrics[1:]]
            steps = [one["perf/step_time"] for one in metrics[1:]]
            rows[tracker].append((statistics.mean(hooks), statistics.median(steps), cpu))
    idle = statistics.median(cpu for _, _, cpu in rows["none"])
    print("| tracker | its hooks, ms a rollout | share of a step | CPU seconds of the run |\n|---|---|---|---|")
    for tracker, measured in rows.items():
        hooks, step, cpu = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"| {tracker} | {1000 * hooks:.2f} | {100 * hooks / step:.3f} % | {cpu:.1f} ({cpu - idle:+.1f}) |")


if __name__ == "__main__":
    main()
