"""What `.ci/run` gives to pytest: a change selects all that it can break, and never nothing."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest
from source import ROOT

spec = importlib.util.spec_from_file_location("affected", ROOT / ".ci" / "affected.py")
affected = sys.modules["affected"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(affected)

REPOSITORY = affected.Repository()
ALL = ["plugins", "tests"]


def covers(paths: list[str], wanted: str) -> bool:
    return any(wanted == path or wanted.startswith(f"{path}/") for path in paths)


@pytest.mark.parametrize("changed", [
    "miles_core/loop.py", "miles_core/stages/loss.py", "constraints/cpu.txt", ".ci/run", ".ci/affected.py", "Makefile",
    "pyproject.toml", "setup.py", "conftest.py", "tests/conftest.py", "tests/cpu_budget.py",
    "tests/contracts/source.py", "cookiecutter/README.md", "plugins/miles-gone/src/miles_gone/plugin.py",
    "a_new_folder/x.py",
])
def test_what_all_stands_on_runs_everything(changed):
    chosen = affected.select(["docs/log.md", changed], REPOSITORY)
    assert (chosen.paths("gate"), chosen.paths("full"), chosen.sglang) == (ALL, ALL, True)


@pytest.mark.parametrize(("changed", "wanted", "spared"), [
    ("plugins/miles-tis/src/miles_tis/plugin.py",
     ["plugins/miles-tis/tests", "plugins/miles-compat/tests", "tests/integration/test_worked_example.py"],
     ["plugins/miles-fp8/tests", "plugins/miles-megatron/tests", "tests/integration/test_resume.py"]),
    ("plugins/miles-fp8/src/miles_fp8/plugin.py", ["plugins/miles-fp8/tests", "plugins/miles-int4-qat/tests"],
     ["plugins/miles-r3/tests", "tests/integration/test_resume.py"]),
    ("plugins/miles-megatron/src/miles_megatron/step.py",
     ["plugins/miles-r3/tests", "plugins/miles-specs-gemma/tests", "plugins/miles-testing/tests",
      "tests/integration/test_layouts.py"],
     ["plugins/miles-tis/tests", "plugins/miles-ppo/tests"]),
    ("plugins/miles-sglang/src/miles_sglang/engine.py",
     ["plugins/miles-sglang/tests", "plugins/miles-lora/tests", "tests/integration/test_faults.py"],
     ["plugins/miles-r3/tests", "tests/integration/test_timing.py"]),
    ("plugins/miles-partial-rollout/src/miles_partial_rollout/plugin.py",
     ["plugins/miles-r3/tests", "tests/integration/test_partial_rollout.py"], ["plugins/miles-fp8/tests"]),
    ("plugins/miles-remote-rm/src/miles_remote_rm/plugin.py",
     ["plugins/miles-remote-rm/tests", "tests/integration/test_subsets.py"], ["plugins/miles-math/tests"]),
    ("plugins/miles-fp8/tests/test_fp8_run.py", ["plugins/miles-fp8/tests"], ["plugins/miles-int4-qat/tests"]),
    ("docs/tutorials/loss.md", ["tests/integration/test_tutorials.py"],
     ["plugins/miles-tis/tests", "tests/unit/test_loop.py"]),
    ("release/release.py", ["tests/packages"], ["tests/unit/test_loop.py"]),
    ("tests/unit/test_loop.py", ["tests/unit/test_loop.py"], ["tests/unit/test_rng.py"]),
    ("tests/unit/test_gone.py", ["tests/unit"], ["tests/integration/test_run.py"]),
    ("tests/integration/faults.py", ["tests/integration"], ["tests/unit/test_loop.py"]),
    ("launch/slurm.sh", ["tests/launch"], ["tests/unit/test_loop.py"]),
    ("tests/gpu/moe.py", [], ["tests/unit/test_loop.py"]),
])  # fmt: skip
def test_a_change_runs_itself_its_dependents_and_the_contracts(changed, wanted, spared):
    gate = affected.select([changed], REPOSITORY).paths("gate")
    assert all(covers(gate, path) for path in [*wanted, "tests/contracts"]), gate
    assert not any(covers(gate, path) for path in spared), gate


def test_the_full_tier_of_a_leaf_is_its_own():
    full = affected.select(["plugins/miles-fp8/src/miles_fp8/plugin.py"], REPOSITORY).paths("full")
    assert covers(full, "plugins/miles-fp8/tests")
    assert not covers(full, "plugins/miles-int4-qat/tests")


@pytest.mark.parametrize(("changed", "runs"), [
    ("plugins/miles-sglang/src/miles_sglang/engine.py", True), ("miles_core/run.py", True),
    ("plugins/miles-megatron/src/miles_megatron/step.py", True), ("tests/sglang/test_sync.py", True),
    ("plugins/miles-local/src/miles_local/logits.py", True), ("plugins/miles-lora/src/miles_lora/plugin.py", False),
    ("docs/sglang.md", False), ("tests/unit/test_loop.py", False),
])
def test_a_real_server_is_set_up_only_where_it_can_matter(changed, runs):
    assert affected.select([changed], REPOSITORY).sglang is runs


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in listed.split("\0") if path]


def test_every_file_of_the_repository_selects_something_that_is_there():
    """Of the sources of a package one stands for all: they differ in nothing that the selection looks at."""
    seen = set()
    for path in tracked():
        alike = re.sub(r"^(plugins/[^/]+/(?:src|tests))/.*", r"\1", path)
        if alike in seen:
            continue
        seen.add(alike)
        chosen = affected.select([path], REPOSITORY)
        assert "nothing is known" not in chosen.reasons[0], chosen.reasons[0]
        for tier in ("gate", "full", "sglang"):
            assert all((ROOT / target).exists() for target in chosen.paths(tier)), (path, tier)
        assert covers(chosen.paths("gate"), affected.CONTRACTS)


def test_every_test_file_runs_when_it_changes():
    for path in tracked():
        if re.match(r"(?!tests/gpu/)(tests|plugins)/.*/test_\w+\.py$", path):
            chosen = affected.select([path], REPOSITORY)
            assert covers(chosen.paths("gate") + chosen.paths("sglang"), path), path


@pytest.mark.parametrize("package", sorted(REPOSITORY.runtime.keys() - {"miles-core"}))
def test_the_tests_of_a_package_run_when_it_changes(package):
    chosen = affected.select([f"plugins/{package}/pyproject.toml"], REPOSITORY)
    for tier in ("gate", "full"):
        assert not REPOSITORY.tests_of({package}) or covers(chosen.paths(tier), f"plugins/{package}/tests")


@pytest.fixture
def checkout(tmp_path):
    """A repository whose branch `work` left `main`, and a function that runs git in it."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")
        return subprocess.run(["git", *identity, *words], cwd=tmp_path / "here", check=True, capture_output=True,
                              text=True).stdout

    (tmp_path / "here").mkdir()
    git("init", "-q")
    for name in ("first", "second"):
        (tmp_path / "here" / name).write_text(name)
        git("add", name)
        git("commit", "-q", "-m", name)
    git("checkout", "-q", "-b", "work")
    (tmp_path / "here" / "third").write_text("third")
    git("add", "third")
    git("mv", "first", "renamed")
    git("commit", "-q", "-m", "third")
    (tmp_path / "here" / "untracked").write_text("")
    return tmp_path / "here", git


def test_a_change_is_what_left_main_and_what_is_not_committed(checkout):
    here, git = checkout
    wanted = ["first", "renamed", "third", "untracked"]
    assert sorted(affected.changed_since("main", here)) == wanted
    assert sorted(affected.changed_since("HEAD~1", here)) == wanted
    git("update-ref", "refs/remotes/origin/main", "main")
    assert sorted(affected.changed_since(None, here)) == wanted


def test_everything_runs_where_it_is_not_known_what_changed(checkout, tmp_path):
    here, git = checkout
    assert affected.changed_since(None, here) is None, "no main of another repository"
    assert affected.changed_since("v9.9", here) is None, "no such base"
    git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert affected.changed_since(None, here) is None, "main itself"
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{here}", shallow], check=True)
    assert affected.changed_since(None, shallow) is None and affected.changed_since("main", shallow) is None
    (tmp_path / "plain").mkdir()
    assert affected.changed_since(None, tmp_path / "plain") is None, "no repository"
    assert affected.selection("v9.9", here).paths("full") == ALL
    git("stash", "-q", "--include-untracked")
    assert affected.selection("HEAD", here).paths("gate") == ALL, "nothing changed"
