"""The plugins of this repository: manifests, names, what the core's table of official plugins says, run files."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from source import ROOT

from miles_core.cli import cli
from miles_core.hookspecs import API
from miles_core.plugins.manifest import of_source
from miles_core.plugins.plan import prepare
from miles_core.plugins.scan import GROUP, KNOWN

PROJECTS = sorted(path for path in ROOT.glob("plugins/miles-*") if (path / "pyproject.toml").is_file())
RUN_FILES = sorted(path for folder in ("examples", "docs", "plugins") for path in (ROOT / folder).rglob("*.toml")
                   if path.name not in ("pyproject.toml", "miles-plugin.toml", "parity.toml", "cases.toml",
                                        "refused.toml")
                   and "src" not in path.parts)


def test_manifests_are_what_the_code_says():
    result = CliRunner().invoke(cli, ["plugins", "manifest", "--check", *map(str, PROJECTS)])
    assert result.exit_code == 0, result.exception or result.output


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_a_plugin_is_laid_out_like_the_others(project):
    data = tomllib.loads((project / "pyproject.toml").read_text())
    (name, entry), = data["project"]["entry-points"][GROUP].items()
    assert project.name == data["project"]["name"] == f"miles-{name}"
    package = f"miles_{name.replace('-', '_')}"
    assert entry.startswith(f"{package}.")
    assert (project / "src" / package / "py.typed").is_file()
    assert any(project.glob("tests/test_*.py")), "a plugin brings its tests"
    readme = (project / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# miles-{name}\n")
    manifest = of_source(project / "src" / Path(*entry.partition(":")[0].split(".")).with_suffix(".py"), name=name)
    assert manifest.api == API
    assert manifest.summary.endswith(".")
    unknown = [option for option in manifest.options if f"`{option}`" not in readme]
    assert not unknown, f"the README does not explain {unknown}"


def test_the_list_of_official_plugins_is_what_their_manifests_say():
    command = [sys.executable, ROOT / "release" / "official.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert set(KNOWN) == {project.name.removeprefix("miles-") for project in PROJECTS}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_run_file_of_the_repository_makes_a_plan(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert prepare(path).digest
