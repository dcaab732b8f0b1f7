"""Miles and TRL's GRPOTrainer in alternation: CPU seconds per optimizer step, peak memory, start to first step.

    python bench/against_trl.py --trl-python venv-trl/bin/python       (peers/README.md makes that environment)

Both processes are alive at once and take turns step by step, so that both see the same neighbours on the machine.
CPU seconds are user + system of the whole process tree. Prints a Markdown table; exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
BARS = {"large": {"cpu_s": 1.15, "peak": 0.6}, "small": {"cpu_s": 0.8}}
BARS_VERDICT = {"large": {"cpu_s": 0.9, "peak": 0.6}, "small": {"cpu_s": 0.65}}
"""With rewards of 0 and 1, where Miles may leave out the groups that agree."""
TURNS = {"large": 1, "small": 7}
"""Alternations of each workload for one of --rounds: a step of a tenth of a second needs more of them to be told
apart."""
FIRST_STEP = 12.0
"""CPU seconds from process start to the end of the first optimizer step."""


class Peer:
    """One framework's live process."""

    def __init__(self, python: str, script: str, workload: str, model: Path, extra: list[str]):
        command = [python, PEERS / script, "--workload", workload, "--model", model, "--interactive", *extra]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True)
        self.steps: list[dict] = []

    def line(self) -> dict:
        """The next line it writes."""
        text = self.process.stdout.readline()
        if not text:
            raise SystemExit(f"{self.process.args[1]} ended early with {self.process.wait()}")
        return json.loads(text)

    def step(self) -> None:
        """One optimizer step."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self.line())

    def median(self) -> float:
        return statistics.median(step["cpu_s"] for step in self.steps)


def compare(workload: str, arguments: argparse.Namespace, folder: Path) -> list[tuple[str, float, float, float]]:
    """(figure, Miles, TRL, ratio) rows of one workload."""
    subprocess.run([arguments.trl_python, PEERS / "make_model.py", "--workload", workload, "--out", folder], check=True,
                   stdout=subprocess.DEVNULL)
    both = ["--beta", str(arguments.beta)] if arguments.beta else []
    both += ["--verdict"] if arguments.verdict else []
    plain = ["--no-skip-zero", "--no-share-prefill"] if arguments.plain else []
    ours = Peer(sys.executable, "run_miles.py", workload, folder, both + plain)
    our_start = ours.line()
    theirs = Peer(arguments.trl_python, "trl_grpo.py", workload, folder, both)
    their_start = theirs.line()
    for turn in range(arguments.rounds * TURNS[workload]):
        for peer in (ours, theirs)[:: 1 if turn % 2 == 0 else -1]:
            peer.step()
    ends = []
    for peer in (ours, theirs):
        peer.process.stdin.close()
        ends.append(peer.line())
        peer.process.wait(60)
    first = [start["cpu_s_start_to_first_step"] for start in (our_start, their_start)]
    peak = [end["peak_rss_mib"] for end in ends]
    rows = [("CPU s per step", ours.median(), theirs.median()), ("peak memory, MiB", *peak),
            ("start to first step, CPU s", *first)]
    skipped = statistics.mean(step["skipped"] for step in ours.steps)
    print(f"<!-- {workload}: {skipped:.0%} of the samples had no advantage and were left out -->", flush=True)
    return [(name, a, b, a / b) for name, a, b in rows]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beta", type=float, default=0.0)
    parser.add_argument("--verdict", action="store_true", help="rewards of 0 and 1: about half of the groups agree")
    parser.add_argument("--plain", action="store_true", help="Miles shares no prefill and leaves no sample out")
    parser.add_argument("--workloads", nargs="+", default=["large", "small"])
    arguments = parser.parse_args()
    met = True
    print("| workload | figure | Miles | TRL 1.16.0 | ratio | bar |\n|---|---|---|---|---|---|")
    for workload in arguments.workloads:
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(workload, arguments, Path(folder) / "model")
        bar = (BARS_VERDICT if arguments.verdict and not arguments.plain else BARS)[workload]
        bars = [bar.get("cpu_s"), bar.get("peak"), None]
        for (name, ours, theirs, ratio), bar in zip(rows, bars):
            text = f"<= {bar}x" if bar else (f"<= {FIRST_STEP:g} s" if "first" in name else "-")
            met &= (bar is None or ratio <= bar) and ("first" not in name or ours <= FIRST_STEP)
            print(f"| {workload} | {name} | {ours:.3f} | {theirs:.3f} | {ratio:.2f} | {text} |", flush=True)
    raise SystemExit(not met)


if __name__ == "__main__":
    main()
