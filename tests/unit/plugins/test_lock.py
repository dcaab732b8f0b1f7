"""A lock holds what a run is made of: any other code, version, order or value is told and refused."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import ConfigError, LockError
from miles_core.plugins import lock
from miles_core.plugins.plan import prepare
from tests.unit.plugins.installed import install

BASE = ["--hf-checkpoint", "x", "--prompt-data", "y", "--rollout-batch-size", "2", "--num-rollout", "1", "--rm-type",
        "one-reward"]  # fmt: skip
BOTH = ["--plugin", "one", "--plugin", "two"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    install(folder, "one")
    install(folder, "two")
    return folder


def locked(*flags: str) -> dict:
    return json.loads(lock.text(lock.of(prepare(None, [*BASE, *flags]))))


def test_the_same_run_is_the_same_wherever_it_writes(site):
    then = locked(*BOTH)
    assert lock.differences(then, locked(*BOTH)) == []
    lock.check(then, prepare(None, [*BASE, *BOTH, "--run-dir", "elsewhere"]), "a test")


def test_edited_code_is_told_though_its_version_is_the_same(site):
    then = locked(*BOTH)
    with (site / "miles_two" / "plugin.py").open("a") as file:
        file.write("# a word\n")
    (said,) = lock.differences(then, locked(*BOTH))
    assert "plugin two 1.0: its code is another" in said
    with pytest.raises(LockError, match=r"plugins.lock: .*two 1.0: its code.*\[lock-mismatch\]"):
        lock.check(then, prepare(None, [*BASE, *BOTH]), "plugins.lock")


@pytest.mark.parametrize(("flags", "message"), [
    (["--plugin", "one"], "plugin two takes part no longer"),
    (["--plugin", "two", "--plugin", "one"], "the order of plugins"),
    ([*BOTH, "--lr", "3e-5"], "optimizer.lr: 1e-06 -> 3e-05"),
    ([*BOTH, "--one.width", "7"], "one.width: 3 -> 7"),
])  # fmt: skip
def test_each_difference_is_a_sentence(site, flags, message):
    assert any(message in line for line in lock.differences(locked(*BOTH), locked(*flags)))


def test_a_scorer_more_changes_the_owners_of_its_hook_alone(site):
    """Owners are a list, in which those behind it move on by a place."""
    then, now = locked(*BOTH), locked(*BOTH, "--rm-type", "one-reward", "two-reward", "--rm-weights", "1", "1")
    for ours, theirs in ((then, now), (now, then)):
        (said,) = [line for line in lock.differences(ours, theirs) if line.startswith("owner of")]
        assert "owner of reward" in said and "two-reward of two" in said


def test_another_version_is_told(site):
    then = locked(*BOTH)
    (site / "miles_two-1.0.dist-info").rename(site / "miles_two-1.1.dist-info")
    assert any("plugin two: miles-two 1.0 -> miles-two 1.1" in line for line in lock.differences(then, locked(*BOTH)))


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[]"])
def test_what_is_no_lock_is_refused(tmp_path, content):
    path = tmp_path / "plugins.lock"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"\[lock-unreadable\]"):
        lock.read(path)


def test_a_file_plugin_is_locked_by_its_content(tmp_path):
    path = tmp_path / "one.py"
    path.write_text("from miles_core import hookimpl\nclass P:\n  @hookimpl('reward', name='one-reward')\n"
                    "  def score(self, sample): return 0.0\n")
    then = locked("--plugin", str(path))
    path.write_text(path.read_text() + "\n# more\n")
    assert any("plugin one" in line for line in lock.differences(then, locked("--plugin", str(path))))
