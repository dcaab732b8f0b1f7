"""The release command refuses what is not ready, changes nothing in a dry run, else commits and tags one version."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import newest
import pytest
from clean import ROOT
from click.testing import CliRunner

import release

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("packages")]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=T", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def run(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(release.main, [*words, "--root", str(folder)])
    return result.exit_code, result.output


@pytest.fixture
def repository(tree, tmp_path, monkeypatch) -> Path:
    """A committed checkout with the core and one plugin."""
    for what, value in (("NAME", "T"), ("EMAIL", "t@example.org")):
        monkeypatch.setenv(f"GIT_AUTHOR_{what}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{what}", value)
    folder = tmp_path / "repository"
    shutil.copytree(tree, folder, ignore=lambda at, names: {
        name for name in names if at == str(tree / "plugins") and name != "miles-grpo"
        or at == str(tree) and name in ("tests", "docs", "examples", "bench")})
    git(folder, "init", "--quiet", "-b", "main")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "A step")


def say(folder: Path, version: str) -> None:
    """What authors write before a release."""
    for path in (folder / "CHANGELOG.md", folder / "plugins/miles-grpo/CHANGELOG.md", folder / "miles/CHANGELOG.md"):
        heading, text = f"## [{version}] - Unreleased", "### Fixed\n\n- A line."
        path.write_text(path.read_text().replace("## [", f"{heading}\n\n{text}\n\n## [", 1))


def test_what_is_not_ready_is_refused_in_one_go(repository):
    (repository / "stray.py").write_text("")
    code, said = run(repository, "99.0.0")
    assert code == 1 and "1 files are not committed, such as stray.py" in said
    assert "the changelogs of miles-core, miles-grpo, miles say nothing" in said
    assert "is no version" in run(repository, "1.0")[1]
    assert "choose a later version" in run(repository, "0.0.1")[1]
    (repository / "stray.py").unlink()
    say(repository, "99.0.0")
    commit(repository)
    git(repository, "tag", "v99.0.0")
    assert "the tag v99.0.0 is there already" in run(repository, "99.0.0")[1]


@pytest.mark.full
def test_a_release_is_rehearsed_and_then_done(repository):
    say(repository, "99.0.0")
    commit(repository)
    before = git(repository, "rev-parse", "HEAD")
    code, said = run(repository, "99.0.0", "--dry-run")
    assert code == 0, said
    assert "miles_core-99.0.0-py3-none-any.whl" in said and "miles_grpo-99.0.0.tar.gz" in said
    assert "git tag --annotate v99.0.0" in said and "twine upload dist/*" in said
    assert git(repository, "rev-parse", "HEAD") == before
    assert not git(repository, "status", "--porcelain", "--ignored") and not git(repository, "tag")

    code, said = run(repository, "99.0.0")
    assert code == 0, said
    assert git(repository, "describe", "--exact-match").strip() == "v99.0.0"
    assert not git(repository, "status", "--porcelain")
    assert len(list((repository / "dist").iterdir())) == 6
    assert release.current(repository) == "99.0.0"
    plugin = repository / "plugins/miles-grpo"
    assert 'version = "99.0.0"' in (plugin / "pyproject.toml").read_text()
    for path in (plugin / "pyproject.toml", repository / release.TEMPLATE):
        assert '"miles-core~=99.0.0"' in path.read_text()
    date, text = release.entry((plugin / "CHANGELOG.md").read_text(), "99.0.0")
    assert date.startswith("2") and text == "### Fixed\n\n- A line."


def test_every_direct_dependency_has_a_tested_version():
    tested = newest.pins(newest.CONSTRAINTS.read_text())
    assert not newest.declared(ROOT).keys() - tested.keys(), "add them to constraints/cpu.txt"


def test_the_table_of_newest_releases_says_what_was_tried_and_what_was_held_back():
    rows = [newest.Row("rich", "15.0.0", "16.0.0", "16.0.0", ">=14"),
            newest.Row("torch", "2.13.0", "2.13.0+cpu", "2.14.0", ""),
            newest.Row("megatron-core", "0.16.1", "0.16.1", "0.17.0", "==0.16.1")]
    assert newest.table(rows, passed=False).splitlines() == [
        "package        tested  newest",
        "rich           15.0.0  16.0.0      failed",
        "torch          2.13.0  2.13.0+cpu  as tested (2.14.0 is out; bounds: of others)",
        "megatron-core  0.16.1  0.16.1      as tested (0.17.0 is out; bounds: ==0.16.1)"]
    assert "16.0.0      passed" in newest.table(rows, passed=True)
