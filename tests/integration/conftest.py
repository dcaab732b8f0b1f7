"""A folder in which a user does something wrong, and then runs again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from miles_testing.forked import Outcome, miles

NOISE = ("Traceback", "Exception ignored", "never retrieved", "never awaited", "Exception in thread", "ExceptionGroup")
"""What Python prints when nobody caught something: a user should see none of it, whatever went wrong."""


class Place:
    """A folder with a good run file; `run` is `miles run` in it, always into the same run directory.

    Args:
        again: flags that the clean run after a failure keeps, such as --load.
    """

    def __init__(self, path: Path, run_file: Path, tiny: Path):
        self.path, self.tiny = path, tiny
        self.file = self._good = run_file.name
        self.again: list[str] = []

    def run(self, *argv: str, **options) -> Outcome:
        return miles(["run", self.file, "--no-live", "--run-dir", "runs/a", *argv], self.path, **options)

    def rewrite(self, old: str, new: str) -> None:
        """Let the bad run use a copy of the run file in which `old` is `new`."""
        text = (self.path / self._good).read_text()
        assert old in text
        self.file = "bad.toml"
        (self.path / self.file).write_text(text.replace(old, new))

    def model(self) -> Path:
        """A copy of the checkpoint, to be spoilt."""
        return shutil.copytree(self.tiny / "qwen3", self.path / "model")

    def data(self, *lines: object) -> list[str]:
        """The flags for a prompt file of these lines: text as it is, anything else as JSON."""
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (self.path / "data.jsonl").write_text("".join(text + "\n" for text in texts))
        return ["--prompt-data", "data.jsonl"]

    def plugin(self, source: str) -> list[str]:
        """The flags for a plugin file of this source."""
        (self.path / "bad.py").write_text(source)
        return ["--plugin", "./bad.py"]

    def saved(self, *argv: str) -> Path:
        """The checkpoint folder of a good run of one rollout."""
        outcome = self.run("--save", "ckpt", "--num-rollout", "1", *argv)
        assert outcome.code == 0, outcome.err
        return self.path / "ckpt"

    def refused(self, code: int, words: str, *argv: str, **options) -> Outcome:
        """Run into an error that `decent` accepts."""
        outcome = self.run(*argv, **options)
        decent(outcome, code, words)
        return outcome

    def refuses(self, code: int, words: str, *argv: str, **options) -> Outcome:
        """`refused` without having touched a file; else, once something was written, the run as it should have been."""
        before = self._files()
        outcome = self.refused(code, words, *argv, **options)
        if self._files() != before:
            self.clean()
        return outcome

    def _files(self) -> dict[str, tuple[int, int]]:
        """Size and time of every file of the folder."""
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns)
                for path in self.path.rglob("*") if path.is_file() and "__pycache__" not in path.parts}

    decent = staticmethod(lambda *arguments: decent(*arguments))

    def clean(self, *argv: str) -> Outcome:
        """The good run file in the same run directory; it has to succeed."""
        self.file = self._good
        outcome = self.run("--num-rollout", "1", *self.again, *argv)
        assert (outcome.code, outcome.err) == (0, ""), outcome
        return outcome


def decent(outcome: Outcome, code: int, words: str) -> None:
    """It ended with this code and one sentence that has a remedy and matches `words` (gaps are "..."), and no noise."""
    shown = f"code {outcome.code}, {outcome.seconds:.1f} s\n{outcome.out}\n{outcome.err}"
    print(shown)
    assert outcome.code == code, shown
    assert outcome.err.startswith("Error: "), shown
    assert outcome.err.count("Fix: ") == 1, shown
    pattern = ".*".join(re.escape(word) for word in words.split(" ... "))
    assert re.search(pattern, outcome.err, re.DOTALL), f"{words!r} is not in\n{shown}"
    hushed(outcome)


def hushed(outcome: Outcome) -> None:
    """Nothing was shown that somebody should have caught."""
    assert not [noise for noise in NOISE if noise in outcome.out + outcome.err], outcome


@pytest.fixture
def quiet():
    """The check that Python showed nothing on its own."""
    return hushed


@pytest.fixture
def place(tmp_path, run_file, tiny) -> Place:
    """The folder."""
    return Place(tmp_path, run_file(), tiny)


PICKY = '''
"""A filter that looks at what the weights of the moment answer."""
from miles_core import hookimpl
from miles_core.types import Drop


class Picky:
    """Drops about a third of the groups."""

    @hookimpl("filter_group")
    def choose(self, group):
        """Keep or drop."""
        sample = group.samples[0]
        return Drop("unlucky") if sample.tokens[-sample.response_length:].sum() % 3 == 0 else group
'''


@pytest.fixture
def picky(tmp_path) -> Path:
    """A plugin file whose filter drops groups, and others as the weights change."""
    path = tmp_path / "picky.py"
    path.write_text(PICKY)
    return path
