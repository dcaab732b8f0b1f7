"""What CI would have run for past commits, by .ci/affected.py as it is today on the tree of each commit.

    python bench/selection.py [--commits 20] [--until HEAD]

Takes the newest commits that change code or tests, each against its parent. A commit that mends (all its code is tests,
or it is small and its message says so) shows what the change of sources before it had broken: the test files that it
touches, as far as they were there, have to be in the gate or the full tier of that change. Prints a table in Markdown;
the exit status is 1 where one was left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
MENDS = re.compile(r"\b(mend\w*|defects?|stands? alone|no longer|does not)\b", re.IGNORECASE)
SMALL = 10
"""Files of a commit that mends one thing."""
SOURCE = re.compile(r"(miles_core|constraints|plugins/[^/]+/src)/|(plugins/[^/]+/)?pyproject\.toml|setup\.py")
TEST = re.compile(r"^\s*(?:async )?def test_", re.MULTILINE)
KEPT = ("plugins", "tests")
"""What the selection reads of a tree."""


@dataclass(frozen=True)
class Change:
    """A commit: its subject, the files that it changes, and what the selection answers.

    Attributes:
        gate, full: share of the test functions in each selection.
        chosen: paths of both tiers.
    """

    commit: str
    subject: str
    files: list[str]
    packages: str
    gate: float
    full: float
    sglang: bool
    chosen: list[str]

    @property
    def is_of_sources(self) -> bool:
        """Whether it changes more than tests and pages."""
        return any(map(SOURCE.match, self.files))

    def covers(self, path: str) -> bool:
        """Whether a test file is in one of the tiers."""
        return any(path == chosen or path.startswith(f"{chosen}/") for chosen in self.chosen)


def load_affected() -> ModuleType:
    """The program that CI asks."""
    spec = importlib.util.spec_from_file_location("affected", ROOT / ".ci" / "affected.py")
    assert spec and spec.loader
    module = sys.modules["affected"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def is_code(path: str) -> bool:
    return path.endswith((".py", ".toml", ".txt", "run", "Makefile")) and not path.startswith("docs/")


def tree_of(commit: str, folder: Path) -> Path:
    """The packages and tests of a commit."""
    there = [name for name in KEPT if git("ls-tree", commit, name)]
    archive = subprocess.run(["git", "archive", commit, *there], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    return folder


def share(paths: Iterable[str], root: Path) -> float:
    """The part of a tree's test functions that lies below the paths."""
    every = {path: len(TEST.findall(path.read_text(encoding="utf-8")))
             for folder in KEPT for path in root.glob(f"{folder}/**/test_*.py")}
    below = {path for chosen in paths for path in
             ((root / chosen).glob("**/test_*.py") if (root / chosen).is_dir() else [root / chosen])}
    return sum(every.get(path, 0) for path in below) / max(1, sum(every.values()))


def look_at(commit: str, affected: ModuleType) -> Change:
    """What is selected for a commit against its parent."""
    files = git("diff-tree", "--no-commit-id", "--name-only", "--no-renames", "-r", commit).splitlines()
    with tempfile.TemporaryDirectory() as name:
        root = tree_of(commit, Path(name))
        selection = affected.select(files, affected.Repository(root))
        gate, full = selection.paths("gate"), selection.paths("full")
        return Change(commit, git("log", "-1", "--format=%s", commit).strip(), files, named(gate), share(gate, root),
                      share(full, root), selection.sglang, [*gate, *full])


def named(gate: list[str]) -> str:
    """The selected packages in a few words."""
    if "plugins" in gate:
        return "all"
    packages = [path.split("/")[1].removeprefix("miles-") for path in gate if path.startswith("plugins/")]
    files = sum(path.startswith("tests/") for path in gate)
    return ", ".join([*packages[:4], *([f"{len(packages) - 4} more"] if len(packages) > 4 else []),
                      f"{files} paths of tests/"])


def mended(change: Change, before: Change) -> list[str]:
    """The test files that a mending commit touches and that were there before it; none for any other commit."""
    tests = [path for path in change.files if re.match(r"(tests|plugins/[^/]+/tests)/(.*/)?test_\w+\.py$", path)]
    says_so = len(change.files) <= SMALL and MENDS.search(change.subject)
    if change.is_of_sources and not says_so:
        return []
    there = set(git("ls-tree", "-r", "--name-only", before.commit).splitlines())
    return [path for path in tests if path in there and not path.startswith("tests/gpu")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument("--until", default="HEAD", help="the newest commit")
    given = parser.parse_args()
    affected, changes = load_affected(), []
    for commit in git("log", "--no-merges", "--format=%h", given.until).splitlines():
        if any(map(is_code, git("diff-tree", "--no-commit-id", "--name-only", "-r", commit).splitlines())):
            changes.append(look_at(commit, affected))
        if len(changes) > given.commits and changes[-1].is_of_sources:
            break  # it came before the oldest of the table
    print("| commit | files | packages in the gate | gate | full tier | SGLang | mended test files that were in |")
    print("|---|---|---|---|---|---|---|")
    left_out = []
    for at, change in enumerate(changes[: given.commits]):
        before = next((one for one in changes[at + 1 :] if one.is_of_sources), None)
        tests = mended(change, before) if before else []
        missing = [path for path in tests if not before.covers(path)] if before else []
        left_out += missing
        verdict = f"{len(tests) - len(missing)} of {len(tests)}" if tests else ""
        print(f"| `{change.commit}` {change.subject[:60]} | {len(change.files)} | {change.packages} "
              f"| {change.gate:.0%} | {change.full:.0%} | {'yes' if change.sglang else ''} | {verdict} |")
    for path in left_out:
        print(f"left out: {path}")
    return int(bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
