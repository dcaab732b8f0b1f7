"""Release all distributions of Miles under one version.

    python release/release.py 0.2.0 --dry-run     everything but the commit and the tag, in a copy of the tree
    python release/release.py 0.2.0               commits, tags, leaves the archives in dist/, says how to upload them

The version is said in `miles_core/__init__.py`; this command writes it there and wherever else it has to stand.
"""

from __future__ import annotations

import datetime
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
TEMPLATE = Path("cookiecutter/{{cookiecutter.distribution}}/pyproject.toml")


def distributions(root: Path) -> list[Path]:
    """The folders of all distributions: the core's, those of the plugins by name, the metapackage."""
    return [root, *sorted(path.parent for path in root.glob("plugins/miles-*/pyproject.toml")), root / "miles"]


def current(root: Path) -> str:
    """The version in `miles_core/__init__.py`."""
    return re.findall(r'^__version__ = "(.+)"$', (root / "miles_core/__init__.py").read_text(), re.MULTILINE)[0]


def entry(changelog: str, version: str) -> tuple[str, str] | None:
    """(the date in the heading or Unreleased, text below it) of a version; None: there is no such heading."""
    found = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found and (found[1], found[2].strip())


def set_version(root: Path, version: str, date: str) -> None:
    """Writes the version, the packages' bounds on each other and the date of the changelogs' entries below `root`."""
    _replace(root / "miles_core/__init__.py", r'^__version__ = ".+"$', f'__version__ = "{version}"')
    for folder in distributions(root)[1:]:
        _replace(folder / "pyproject.toml", r'^version = ".+"$', f'version = "{version}"')
        project = (folder / "pyproject.toml").read_text(encoding="utf-8")
        bounds = re.sub(r'"(miles-[a-z0-9-]+(?:\[[a-z,]+\])?)~=[^"]+"', rf'"\1~={version}"', project)
        (folder / "pyproject.toml").write_text(bounds, encoding="utf-8")
    _replace(root / TEMPLATE.with_name(".copier-answers.yml"), r"(?<=set version = ')[^']+", version)
    for name in ("miles-core", "miles-megatron"):
        _replace(root / TEMPLATE, rf'"{name}~=[^"]+"', f'"{name}~={version}"')
    for folder in distributions(root):
        _replace(folder / "CHANGELOG.md", rf"^## \[{re.escape(version)}\] - \S+$", f"## [{version}] - {date}")


def build(root: Path, out: Path) -> list[Path]:
    """Builds sdist and wheel of every distribution, the wheel from the sdist, with the tools of this environment.

    Returns:
        The archives, in `out`.
    """
    for folder in distributions(root):
        _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder)
    archives = sorted((*out.glob("*.whl"), *out.glob("*.tar.gz")))
    _run(sys.executable, "-m", "twine", "check", "--strict", *archives)
    return archives


def copy(root: Path, to: Path) -> Path:
    """A copy of the files that git does not ignore, so that nothing else that lies about gets into an archive."""
    for name in _run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=root).split("\0")[:-1]:
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


def obstacles(root: Path, version: str) -> list[str]:
    """What has to be done before this version can be released."""
    found = []
    if not VERSION.fullmatch(version):
        found.append(f"{version!r} is no version: write three numbers, as 0.2.0 or 0.2.0rc1")
    elif Version(version) < Version(current(root)):
        found.append(f"the tree is at {current(root)} already: choose a later version")
    if changed := _run("git", "status", "--porcelain", cwd=root).splitlines():
        found.append(f"{len(changed)} files are not committed, such as {changed[0][3:]}: commit or remove them")
    if _run("git", "tag", "--list", f"v{version}", cwd=root).strip():
        found.append(f"the tag v{version} is there already: choose the next version")
    entries = {folder.name if folder != root else "miles-core":
               entry((folder / "CHANGELOG.md").read_text(encoding="utf-8"), version) for folder in distributions(root)}
    if silent := [name for name, said in entries.items() if not said or not re.search(r"^- ", said[1], re.MULTILINE)]:
        found.append(f"the changelogs of {', '.join(silent)} say nothing: write what changed below a heading "
                     f"'## [{version}] - Unreleased'")
    return found


def _replace(path: Path, pattern: str, text: str) -> None:
    old = path.read_text(encoding="utf-8")
    new, count = re.subn(pattern, lambda _: text, old, flags=re.MULTILINE)
    if count != 1:
        raise click.ClickException(f"{path} should have one line like {pattern}, and has {count}.")
    path.write_text(new, encoding="utf-8")


def _run(*command: object, cwd: Path | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(words[:6])} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


@click.command(help=__doc__.split("\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("version")
@click.option("--dry-run", is_flag=True, help="Change nothing: set the version and build in a copy of the tree.")
@click.option("--upload", is_flag=True, help="Upload the archives by twine once the tag is there.")
@click.option("--root", type=click.Path(path_type=Path, file_okay=False), default=ROOT, hidden=True)
def main(version: str, dry_run: bool, upload: bool, root: Path) -> None:
    """Checks, sets, builds, and then commits and tags or says what it would do."""
    if found := obstacles(root, version):
        raise click.ClickException("\n  ".join([f"{version} cannot be released yet:", *found]))
    before, date, out = current(root), datetime.datetime.now(datetime.UTC).date().isoformat(), root / "dist"
    with tempfile.TemporaryDirectory() as folder:
        tree = copy(root, Path(folder) / "tree")
        set_version(tree, version, date)
        archives = build(tree, Path(folder) / "dist")
        click.echo(f"{before} -> {version}, {len(distributions(root))} distributions; twine finds nothing wrong with")
        for path in archives:
            click.echo(f"  {path.name:<56}{path.stat().st_size / 1e3:9,.0f} kB")
        if not dry_run:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(Path(folder) / "dist", out)
    steps = [["git", "commit", "--quiet", "--all", "--allow-empty", "--message", f"Release {version}"],
             ["git", "tag", "--annotate", f"v{version}", "--message", f"Miles {version}"]]
    left = f"  git push origin HEAD v{version}" + ("" if upload else "\n  python -m twine upload dist/*")
    if dry_run:
        said = "\n".join("  " + shlex.join(step) for step in steps)
        click.echo(f"Nothing was changed. Without --dry-run:\n{said}\nand left to do:\n{left}")
        return
    set_version(root, version, date)
    for step in steps:
        _run(*step, cwd=root)
    click.echo(f"Committed and tagged v{version}; the archives are in dist/.")
    if upload:
        _run(sys.executable, "-m", "twine", "upload", "--non-interactive", *sorted(out.iterdir()), cwd=root)
        click.echo("They are uploaded.")
    click.echo(f"Left to do:\n{left}")



if __name__ == "__main__":
    main()
