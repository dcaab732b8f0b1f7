"""Environments that see nothing of this checkout, and commands that run in them."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = re.compile(r"(__editable__.*|miles[_-].*|.*\.pth)")
PIP = ("-m", "pip", "--disable-pip-version-check")


def shell(*words: object, cwd: Path, seconds: int = 900) -> str:
    """Runs a command out of sight of this checkout and gives what it printed; its failure fails the test."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=seconds,
                          env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


NOTHING = re.compile(r"(?!)")


def environment(folder: Path, *, below: Path | None = None, pip: bool = False,
                but: re.Pattern[str] = NOTHING) -> Path:
    """The Python of a new environment; one that sees the packages of the folder `below` as well.

    Args:
        but: of these packages, besides Miles's own, it sees none.
    """
    venv.create(folder, with_pip=pip, symlinks=True)
    if below:
        (site,) = folder.glob("lib/python*/site-packages")
        others = folder / "others"
        others.mkdir()
        for path in below.iterdir():
            if not OURS.fullmatch(path.name) and not but.fullmatch(path.name):
                (others / path.name).symlink_to(path)
        (site / "below.pth").write_text(f"{others}\n")
    return folder / "bin" / "python"


def wheel(archives: Path, name: str) -> Path:
    """The wheel of a distribution."""
    (found,) = archives.glob(f"{name.replace('-', '_')}-*.whl")
    return found


def install(python: Path, pins: Path, *what: object) -> None:
    """Installs one after the other, and lets pip check what it did."""
    shell(python, *PIP, "install", "--quiet", "--upgrade", "pip", cwd=pins.parent)  # 23.2 has no extras of pinned files
    for each in what:
        shell(python, *PIP, "install", "--quiet", "--constraint", pins, each, cwd=pins.parent)
    shell(python, *PIP, "check", cwd=pins.parent)


def editable(python: Path, *projects: Path) -> None:
    """Let an environment see projects where they lie, as `pip install --no-deps --editable` does, in no time."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    for project in projects:
        said = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        where, name = project / "src" if (project / "src").is_dir() else project, said["name"].replace("-", "_")
        (site / f"{name}.pth").write_text(f"{where}\n")
        info = site / f"{name}-{said.get('version', '0.1.0')}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {said['name']}\n"
                                       f"Version: {said.get('version', '0.1.0')}\n")
        lines = [line for group, entries in said.get("entry-points", {}).items()
                 for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
