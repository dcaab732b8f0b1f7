"""New plugin projects from the template in cookiecutter/, and what became of the template since."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from miles_core import __version__
from miles_core.errors import ConfigError, PluginError
from miles_core.plugins.fit import check_hook
from miles_core.plugins.select import PACKAGE, short

ANSWERS = ".copier-answers.yml"
OURS = "miles-core"
"""What it says of where the template is that miles-core ships; its version stands beside it."""
KEPT = ("CHANGELOG.md",)
"""Files that are the author's alone once they are there."""
SECONDS = 300.0
"""How long copier may take; a template may have to be fetched."""


def template_folder() -> Path:
    """The template of this version: in the checkout, or in the installed package."""
    beside, inside = PACKAGE.parent / "cookiecutter", PACKAGE / "template"
    return beside if (beside / "copier.yml").is_file() else inside


def new(name: str, *, template: str | None, out: Path | None, answers: Mapping[str, object]) -> Path:
    """Render a project; returns its folder.

    Args:
        name: the plugin's, or its distribution's: miles-gmpo is the plugin gmpo in the distribution miles-gmpo.

    Raises:
        ConfigError: an invalid answer, or a folder that already exists.
        HookError: an unknown hook.
        PluginError: copier is missing or fails.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError("not a valid plugin name", got=name, fix="use lower-case letters and digits, "
                          "separated by single dashes: my-reward", code="plugin-name-invalid")
    if (plain := short(name)) != name:
        name, answers = plain, {"distribution": name, **answers}
    for hook in filter(None, re.split(r"[\s,]+", str(answers.get("hooks", "")))):
        check_hook(hook)
    folder = out or Path(str(answers.get("distribution") or f"miles-plugin-{name}"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("the target already exists", code="scaffold-target-exists", who=str(folder),
                          fix="name another folder with --out")
    _render(template or str(template_folder()), folder, {"name": name, **answers})
    return folder


def _render(template: str, folder: Path, answers: Mapping[str, object]) -> None:
    data = [word for key, value in answers.items() if key[0] != "_" for word in ("--data", f"{key}={value}")]
    _copier(["copy", "--defaults", "--quiet", *data, template, str(folder)])


def _template_of(version: str, folder: Path) -> str:
    """The template that a version of miles-core ships: the one here, or that in its wheel, which pip fetches.

    Raises:
        PluginError: pip does not get the wheel.
    """
    if version == __version__:
        return str(template_folder())
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest",
               str(folder), f"miles-core=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    wheel = next(folder.glob("miles_core-*.whl"), None)
    if wheel is None:
        raise PluginError(f"the template of miles-core {version} cannot be fetched", code="template-not-fetched",
                          got=done.stderr.strip()[-200:],
                          fix="see the output of pip; its index is set by PIP_INDEX_URL or PIP_FIND_LINKS")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    return str(folder / "wheel" / "miles_core" / "template")


def _merge(project: Path, base: Path, theirs: Path) -> None:
    """Bring what differs between two renderings into a project; conflicts are marked in the files."""
    for path in sorted({one.relative_to(top) for top in (base, theirs) for one in top.rglob("*") if one.is_file()}):
        mine, old, new = project / path, base / path, theirs / path
        before = old.read_bytes() if old.is_file() else b""
        if path.name in KEPT or not mine.is_file() and old.is_file():  # the author's own, or deleted by the author
            continue
        if not new.is_file():
            if mine.read_bytes() == before:
                mine.unlink()
        elif not mine.is_file() or path.name == ANSWERS and new.read_bytes() != before:
            mine.parent.mkdir(parents=True, exist_ok=True)
            mine.write_bytes(new.read_bytes())
        elif new.read_bytes() != before:
            old.parent.mkdir(parents=True, exist_ok=True)
            old.write_bytes(before)
            labels = [word for name in ("project", "template before", "template") for word in ("-L", name)]
            merged = subprocess.run(["git", "merge-file", "-p", *labels, str(mine), str(old), str(new)],
                                    capture_output=True, check=False)
            mine.write_bytes(merged.stdout)


def update(project: Path, template: str | None) -> str:
    """Merge what changed in the template since the project was made of it, or last updated; what was done, in words.

    Args:
        template: where the template is now, if not where it was.

    Raises:
        ConfigError: no project of the template, or one with changes that are not committed.
        PluginError: copier is missing or fails.
    """
    path = project / ANSWERS
    if not path.is_file():
        raise ConfigError(f"the project has no {ANSWERS}, by which its template is known",
                          code="scaffold-answers-missing", who=str(project),
                          fix="recreate it with miles plugins new, and copy your code over")
    if _git(project, "status", "--porcelain"):
        raise ConfigError("there are uncommitted changes", code="scaffold-uncommitted-changes", who=str(project),
                          fix="commit them first")
    import yaml  # copier's

    answers = yaml.safe_load(path.read_text(encoding="utf-8"))
    if answers.get("_src_path") == OURS:
        with tempfile.TemporaryDirectory() as folder:
            base, theirs = Path(folder) / "base", Path(folder) / "theirs"
            _render(_template_of(str(answers["_commit"]), Path(folder)), base, answers)
            _render(template or str(template_folder()), theirs, answers)
            _merge(project, base, theirs)
        return _git(project, "status", "--short") or "nothing has changed"
    if template is not None:
        text = re.sub(r"(?m)^_src_path: .*$", f"_src_path: {template}", path.read_text(encoding="utf-8"))
        path.write_text(text, encoding="utf-8")
        _git(project, "commit", "--quiet", "-am", "Where the template is")
    _copier(["update", "--defaults", "--quiet", "--conflict", "inline", str(project)])
    return _git(project, "status", "--short") or "nothing has changed"


def _git(project: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(project), *words], capture_output=True, text=True, check=False)
    return done.stdout.rstrip()


def _copier(words: Sequence[str]) -> None:
    if find_spec("copier") is None:
        raise PluginError("copier is not installed in this Python", code="copier-not-installed", got=sys.executable,
                          fix="pip install copier; or use cookiecutter: cookiecutter " + str(template_folder()))
    try:
        done = subprocess.run([sys.executable, "-m", "copier", *words], capture_output=True, text=True, timeout=SECONDS,
                              check=False)
    except subprocess.TimeoutExpired:
        raise PluginError(f"copier did not end within {SECONDS:g} s", code="copier-timeout", got=" ".join(words),
                          fix="check that the template can be reached") from None
    wrong = re.search(r"Validation error for question '(\w+)': (.+)", done.stderr)
    if wrong:
        raise ConfigError(wrong[2].rstrip("."), code="copier-question-invalid", who=wrong[1], fix="give another answer")
    if done.returncode:
        output = [line for line in done.stderr.splitlines() if line.strip()]
        raise PluginError("the template cannot be rendered", code="template-not-rendered",
                          got=output[-1].strip() if output else done.returncode,
                          fix="see what copier says of the template: copier copy " + words[-2])
