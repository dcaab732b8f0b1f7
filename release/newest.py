"""Run the tests with the newest releases of what Miles depends on, and say which those are (`make next`).

A fresh environment in `.venv-next`; torch stays the CPU build of `constraints/cpu.txt` unless `--torch` names another
version, since other builds bring CUDA along. `--only` takes the newest of some packages and leaves the rest as tested:
that finds out which of them a failure comes from.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from release import ROOT, distributions

CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
LEFT_OUT = ("server", "gpu", "liger", "new", "all")
"""Extras that are not installed: SGLang's stack, Transformer Engine and Liger's kernels need CUDA; the others name what
`dev` and the plugins have anyway."""


@dataclass(frozen=True)
class Row:
    """A package that a pyproject.toml names: the version in constraints/cpu.txt, what was installed, what there is.

    `bounds` are those of the pyproject.toml files on it, which may hold it below `newest`.
    """

    package: str
    tested: str
    installed: str
    newest: str
    bounds: str


def declared(root: Path) -> dict[str, str]:
    """package -> bounds, of all that the distributions of Miles depend on, without each other."""
    found: dict[str, set[str]] = {}
    for folder in distributions(root):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = [needs for name, needs in project["optional-dependencies"].items() if name not in LEFT_OUT]
        for text in itertools.chain(project["dependencies"], *extras):
            needed = Requirement(text)
            if not needed.name.startswith("miles-"):
                found.setdefault(canonicalize_name(needed.name), set()).update(str(needed.specifier).split(","))
    return {name: ",".join(sorted(bounds - {""})) for name, bounds in sorted(found.items())}


def pins(text: str) -> dict[str, str]:
    """package -> version, of a constraints file."""
    lines = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def table(rows: list[Row], passed: bool) -> str:
    """What is printed; a row says "as tested" where nothing newer was tried."""
    cells = [("package", "tested", "newest", "")]
    for row in rows:
        same = row.tested == row.installed.partition("+")[0]
        verdict = "as tested" if same else "passed" if passed else "failed"
        held = Version(row.newest) > Version(row.installed)
        cells.append((row.package, row.tested, row.installed,
                      verdict + (f" ({row.newest} is out; bounds: {row.bounds or 'of others'})" if held else "")))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return "\n".join("  ".join([*(word.ljust(width) for word, width in zip(line, widths)), line[3]]).rstrip()
                     for line in cells)


def install(folder: Path, constraints: str) -> Path:
    """A fresh environment with the newest versions that the constraints and all bounds allow; torch goes first."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    path = folder / "constraints.txt"
    path.write_text(constraints + "\n")
    plugins = [word for each in distributions(ROOT)[1:-1] for word in ("-e", f"{each}[test]")]
    for what in (["--upgrade", "pip"], ["torch", "setuptools"],
                 ["--no-build-isolation", "-e", f"{ROOT}[dev]", *plugins]):  # 27 environments to build in take minutes
        _pip(folder, "install", "--quiet", "--constraint", str(path), *what)
    return folder / "bin" / "python"


def _pip(folder: Path, *words: str) -> str:
    done = subprocess.run([folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *words], text=True,
                          stdout=subprocess.PIPE, timeout=3600, check=False)
    if done.returncode:
        raise click.ClickException(f"pip {words[0]} failed; above is why.")
    return done.stdout


def _listed(folder: Path, *options: str) -> dict[str, dict[str, str]]:
    found = json.loads(_pip(folder, "list", "--format", "json", *options))
    return {canonicalize_name(each["name"]): each for each in found}


@click.command(help=__doc__.replace("`", ""), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="PACKAGE", help="The newest of this one alone; can be repeated.")
@click.option("--torch", metavar="VERSION", help="Another version of torch, such as 2.14.0.")
@click.option("--venv", "folder", type=click.Path(path_type=Path), default=ROOT / ".venv-next", help="Where it goes.")
@click.argument("tests", nargs=-1)
def main(only: tuple[str, ...], torch: str | None, folder: Path, tests: tuple[str, ...]) -> None:
    """Installs, tests (pytest's arguments may be given) and prints the table; fails if a test does."""
    tested, bounds = pins(CONSTRAINTS.read_text()), declared(ROOT)
    free = {canonicalize_name(name) for name in only} or set(bounds) | set(tested)
    if unknown := free - set(bounds) - set(tested):
        raise click.ClickException(f"Nothing needs {', '.join(sorted(unknown))}; --only takes {', '.join(bounds)}.")
    fixed = {name: version for name, version in tested.items() if name not in free}
    fixed["torch"] = torch or tested["torch"]
    install(folder, "\n".join(f"{name}=={version}" for name, version in fixed.items()))
    there, later = _listed(folder), _listed(folder, "--outdated")
    rows = [Row(name, tested.get(name, "-"), there[name]["version"],
                later.get(name, {}).get("latest_version", there[name]["version"]), bound)
            for name, bound in bounds.items() if name in there]
    click.echo(f"torch {there['torch']['version']}" + (" as in constraints/cpu.txt" if not torch else ""))
    done = subprocess.run([folder / "bin" / "python", "-m", "pytest", "-q", "-n", "2", *tests], cwd=ROOT, check=False,
                          env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"})
    click.echo(table(rows, not done.returncode))
    if done.returncode:
        raise click.ClickException("Tests failed with these versions; --only PACKAGE tries the newest of one alone.")


if __name__ == "__main__":
    main()
