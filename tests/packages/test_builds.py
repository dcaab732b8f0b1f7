"""Every distribution is built, holds what it should, and works alone: with what it declares and nothing else."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from clean import PIP, ROOT, environment, install, shell, wheel

import release

NAMES = ["miles-core", *(path.name for path in release.distributions(ROOT)[1:])]
MOST = 45
"""Packages of an environment with the core, pip and setuptools counted; docs/benchmarks.md has how many there are."""
MILES = ("-c", "from miles_core.cli import main; main()")

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("packages")]


def sources(tree: Path, name: str) -> set[str]:
    """The files of a distribution's packages, as a wheel names them."""

    def below(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    if name == "miles-core":
        return {f"miles_core/{file}" for file in below(tree / "miles_core")} | {
            f"miles_core/template/{file}" for file in below(tree / "cookiecutter")}
    return below(tree / "plugins" / name / "src")


def looked_at(archives: Path, tree: Path, name: str) -> None:
    """The wheel holds each source file and nothing else, both archives hold the licence, and the metadata says so."""
    licence = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel(archives, name)) as archive:
        files = {file for file in archive.namelist() if ".dist-info/" not in file}
        assert files == sources(tree, name)
        (metadata,) = (file for file in archive.namelist() if file.endswith(".dist-info/METADATA"))
        said = email.message_from_bytes(archive.read(metadata))
        assert archive.read(metadata.replace("METADATA", "licenses/LICENSE")) == licence
    (path,) = archives.glob(f"{name.replace('-', '_')}-*.tar.gz")
    with tarfile.open(path) as archive:
        held = {file.partition("/")[2] for file in archive.getnames()}
        assert archive.extractfile(f"{path.name.removesuffix('.tar.gz')}/LICENSE").read() == licence
    tests = tree / "plugins" / name / "tests"
    assert {"CHANGELOG.md", *(f"tests/{file.name}" for file in tests.glob("*.py"))} <= held
    assert (said["Name"], said["Version"]) == (name, release.current(ROOT))
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Description-Content-Type"] == "text/markdown" and said.get_payload().startswith("# ")


@pytest.mark.full
def test_core_and_one_plugin_are_built_and_installed(tree, tmp_path):
    """The quick sample; the dependencies are those of this environment."""
    few = tmp_path / "few"
    shutil.copytree(tree, few, ignore=lambda at, names: {name for name in names if at == str(tree / "plugins")
                                                         and name != "miles-grpo"})
    release.build(few, tmp_path / "dist")
    for name in ("miles-core", "miles-grpo"):
        looked_at(tmp_path / "dist", tree, name)
    python = environment(tmp_path / "venv", below=Path(sysconfig.get_paths()["purelib"]))
    shell(sys.executable, *PIP, "--python", python, "install", "--quiet", "--no-deps",
          *(tmp_path / "dist").glob("*.whl"), cwd=tmp_path)
    code = "import miles_core, miles_grpo; print(miles_core.__file__, miles_grpo.__file__)"
    assert shell(python, "-c", code, cwd=tmp_path).count(str(tmp_path / "venv")) == 2
    listed = shell(python.parent / "miles", "plugins", "list", cwd=tmp_path).splitlines()
    assert any(line.split()[:2] == ["grpo", release.current(ROOT)] for line in listed), listed


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_archives_hold_what_they_should(archives, tree, name):
    looked_at(archives, tree, name)


EVERY_MODULE = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.startswith(tuple(sys.argv[2:])):
        importlib.import_module(module.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_plugin_works_alone(archives, alone, project, tree, name):
    """Its modules are imported with what it declares; then its tests run, with what it declares for them."""
    python, add = alone
    add(wheel(archives, name))
    shell(python, "-c", EVERY_MODULE, name.replace("-", "_"), cwd=project)
    plugin = name.removeprefix("miles-")
    listed = shell(python, *MILES, "plugins", "list", cwd=project)
    installed = [line.split()[0] for line in listed.splitlines() if release.current(ROOT) in line.split()]
    assert plugin in installed, listed
    shell(python, *MILES, "plugins", "doctor", plugin, cwd=project)
    add(f"{wheel(archives, name)}[test]")
    shutil.copytree(tree / "plugins" / name, project / "plugins" / name,
                    ignore=shutil.ignore_patterns("src", "pyproject.toml"))
    shell(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"plugins/{name}/tests", cwd=project)


@pytest.mark.slow
def test_the_core_alone_says_what_a_run_needs(archives, alone, core, project, tmp_path):
    """It is small, its commands work, and a run without plugins is one sentence that names what to install."""
    there = {one["name"] for one in json.loads(shell(core, *PIP, "list", "--format", "json", cwd=project))}
    assert {name for name in there if name.startswith("miles")} == {"miles-core"}
    assert not there & {"megatron-core", "ray", "sglang", "pytest", "aiohttp"} and len(there) <= MOST, sorted(there)
    for words in (["--help"], ["plugins", "list"], ["run", "--help"]):
        assert shell(core.parent / "miles", *words, cwd=project)
    done = subprocess.run([core.parent / "miles", "run", "examples/demo.toml"], cwd=project, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "pip install miles-grpo miles-math" in done.stderr and "pip install miles " in done.stderr
    python, add = alone
    add(f"{wheel(archives, 'miles-testing')}[new]")
    shell(python, *MILES, "plugins", "new", "brief", "--hooks", "filter_group", "--summary", "Drops nothing.",
          "--author", "Ada", cwd=tmp_path)
    made = tmp_path / "miles-plugin-brief"
    add("--no-build-isolation", "--no-deps", made)
    shell(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_contract.py", cwd=made)


@pytest.mark.slow
def test_the_core_works_alone(archives, pins, core, project, tree, tmp_path):
    """Its modules are imported without plugins; its unit tests name the official ones, which are the extra `all`."""
    shell(core, "-c", EVERY_MODULE, "miles_core", cwd=project)
    python = environment(tmp_path / "venv", pip=True)  # of its own: some tests start the scripts beside this Python
    install(python, pins, "torch", f"{wheel(archives, 'miles-core')}[dev,all]")
    for part in ("tests/unit", "tests/misconfigurations", "tests/conftest.py", "bench"):
        (shutil.copytree if (tree / part).is_dir() else shutil.copy)(tree / part, project / part)
    shell(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit", cwd=project, seconds=3600)
