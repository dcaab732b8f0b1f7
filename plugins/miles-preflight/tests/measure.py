"""How many reported misconfigurations does the plan refuse, and how many good runs with them?

    python plugins/miles-preflight/tests/measure.py

Each case is the smallest correct run with its flags (cases.toml says how), prepared in this process as by
`miles run --plan`. Refused is an error of Miles's own; anything else that is raised is a crash and does not count as
refused. Exits with 1 if anything crashed or a good run was refused.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import MilesError
from miles_core.plugins.plan import prepare

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
EXAMPLE = "examples/arithmetic"
BASE = [
    ["--hf-checkpoint", f"{EXAMPLE}/tiny-qwen3"], ["--prompt-data", f"{EXAMPLE}/train.jsonl"],
    ["--input-key", "prompt"], ["--label-key", "label"], ["--apply-chat-template"], ["--rm-type", "math"],
    ["--advantage-estimator", "grpo"], ["--rollout-batch-size", "64"], ["--n-samples-per-prompt", "8"],
    ["--rollout-max-response-len", "8"], ["--num-rollout", "20"], ["--no-bf16"], ["--use-dynamic-batch-size"],
    ["--max-tokens-per-gpu", "4096"], ["--lr", "3e-4"],
]
"""The smallest correct run: each flag with its words."""

REFUSED, ACCEPTED, CRASHED = "refused", "accepted", "crashed"


@dataclass(frozen=True)
class Outcome:
    """What became of one case: the verdict, and the sentence that came with it."""

    verdict: str
    sentence: str = ""


def argv(case: dict, here: Path) -> list[str]:
    """The flags of a case: the smallest run's, less those it leaves out or gives itself, then its own."""
    own = [word.replace("{here}", str(here)) for word in case["flags"]]
    if "run_file" in case:
        return own
    gone = {_plain(word) for word in [*case.get("without", []), *own] if word.startswith("--")}
    return [word for group in BASE if _plain(group[0]) not in gone for word in group] + own


def outcome(case: dict) -> Outcome:
    """Prepares a case in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder, chdir(ROOT), _environment(case.get("env", {})):
        here = Path(folder)
        _lay_out(case, here)
        file = ROOT / case["run_file"] if "run_file" in case else None
        try:
            prepare(file, argv(case, here))
        except MilesError as error:
            return Outcome(REFUSED, _sentence(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a crash is a result here
            return Outcome(CRASHED, f"{type(error).__name__}: {_sentence(error)}")
    return Outcome(ACCEPTED)


def cases() -> list[dict]:
    """Runs that the plan refuses."""
    return tomllib.loads((FOLDER / "cases.toml").read_text())["case"]


def good() -> list[dict]:
    """Runs that have to be accepted."""
    return tomllib.loads((FOLDER / "cases.toml").read_text())["good"]


def part(title: str, some: Sequence[dict]) -> Counter[str]:
    """Measures and prints cases; counts their verdicts."""
    print(f"{title}: {len(some)}")
    counts: Counter[str] = Counter()
    for case in some:
        result = outcome(case)
        counts[result.verdict] += 1
        print(f"  {result.verdict:8}  {case['id']}" + (f"\n            {result.sentence}" if result.sentence else ""))
    print("  " + ", ".join(f"{counts[verdict]} {verdict} ({counts[verdict] / max(len(some), 1):.1%})"
                           for verdict in (REFUSED, ACCEPTED, CRASHED)) + "\n")
    return counts


def main() -> int:
    """Prints both parts; 1 if something crashed or a good run was refused."""
    seen, false = part("misconfigurations", cases()), part("good runs", good())
    return int(bool(seen[CRASHED] or false[REFUSED] or false[CRASHED]))


def _plain(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("_", "-")


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split())


def _lay_out(case: dict, here: Path) -> None:
    for name, text in case.get("files", {}).items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, source in case.get("copies", {}).items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / source, path)


@contextmanager
def _environment(given: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    sys.exit(main())
