"""Archives of all distributions, and environments that hold nothing but what one of them declares."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "release")]

from clean import PIP, ROOT, environment, install, shell, wheel  # noqa: E402

import release  # noqa: E402 - the command that builds what is published


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """What git does not ignore of this checkout."""
    return release.copy(ROOT, tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="session")
def archives(tree, tmp_path_factory) -> Path:
    """A folder with sdist and wheel of every distribution."""
    out = tmp_path_factory.mktemp("dist")
    release.build(release.copy(ROOT, tmp_path_factory.mktemp("built")), out)  # setuptools leaves files where it builds
    return out


@pytest.fixture(scope="session")
def pins(archives) -> Path:
    """pip's constraints: the tested versions, and all that is called miles-* from the archives, from nowhere else."""
    ours = [f"{path.name.partition('-')[0].replace('_', '-')} @ {path.as_uri()}" for path in archives.glob("*.whl")]
    path = archives.parent / "pins.txt"
    path.write_text("\n".join([(ROOT / "constraints/cpu.txt").read_text(), *ours]) + "\n")
    return path


@pytest.fixture(scope="session")
def core(archives, pins, tmp_path_factory) -> Path:
    """The Python of an environment with miles-core and what it declares, nothing else; torch goes first, as in make."""
    python = environment(tmp_path_factory.mktemp("core") / "venv", pip=True)
    install(python, pins, "torch", wheel(archives, "miles-core"))
    return python


@pytest.fixture
def alone(core, pins, tmp_path):
    """(Python of an environment that sees the core's and nobody else's packages, function that installs into it)."""
    (below,) = core.parents[1].glob("lib/python*/site-packages")
    python = environment(tmp_path / "venv", below=below)

    def add(*what: object) -> str:
        return shell(core, *PIP, "--python", python, "install", "--quiet", "--constraint", pins, *what, cwd=tmp_path)

    return python, add


@pytest.fixture
def project(tree, tmp_path) -> Path:
    """A folder for tests of one distribution: the examples, the configuration of pytest, and no sources."""
    shutil.copytree(tree / "examples", tmp_path / "project" / "examples")
    text = (tree / "pyproject.toml").read_text()
    for old, new in ((" --dist loadgroup", ""), ("markers = [", 'markers = [\n  "xdist_group: of pytest-xdist",')):
        assert text.count(old) == 1, "no distribution needs pytest-xdist"
        text = text.replace(old, new)
    (tmp_path / "project" / "pyproject.toml").write_text(text)
    return tmp_path / "project"
