"""New plugin projects from the template in cookiecutter/, and what became of the template since."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from miles_core.errors import ConfigError, PluginError
from miles_core.plugins.select import PACKAGE

ANSWERS = ".copier-answers.yml"
SECONDS = 300.0
"""How long copier may take; a template may have to be fetched."""


def template_folder() -> Path:
    """The template of this version: in the checkout, or in the installed package."""
    beside, inside = PACKAGE.parent / "cookiecutter", PACKAGE / "template"
    return beside if (beside / "copier.yml").is_file() else inside


def new(name: str, *, template: str | None, out: Path | None, answers: Mapping[str, object]) -> Path:
    """Render a project; returns its folder.

    Raises:
        ConfigError: an answer that makes no plugin, or a folder that is there already.
        PluginError: copier is missing or fails.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ConfigError("that is no name for a plugin", got=name, fix="lower-case letters and digits, with single "
                          "dashes between: my-reward")
    folder = out or Path(str(answers.get("distribution") or f"miles-plugin-{name}"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("there is something already", who=str(folder), fix="name another folder with --out")
    data = [word for key, value in {"name": name, **answers}.items() for word in ("--data", f"{key}={value}")]
    _copier(["copy", "--defaults", "--quiet", *data, template or str(template_folder()), str(folder)])
    return folder


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
        raise ConfigError(f"the project has no {ANSWERS}, by which its template is known", who=str(project),
                          fix="make it anew with miles plugins new, and copy your code over")
    if _git(project, "status", "--porcelain"):
        raise ConfigError("there are changes that are not committed", who=str(project),
                          fix="commit them, so that nothing can be lost")
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
        raise PluginError("copier is not installed in this Python", got=sys.executable,
                          fix="pip install copier; or use cookiecutter: cookiecutter " + str(template_folder()))
    try:
        done = subprocess.run([sys.executable, "-m", "copier", *words], capture_output=True, text=True, timeout=SECONDS,
                              check=False)
    except subprocess.TimeoutExpired:
        raise PluginError(f"copier did not end within {SECONDS:g} s", got=" ".join(words),
                          fix="see whether the template can be reached") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise PluginError("the template cannot be rendered", got=said[-1].strip() if said else done.returncode,
                          fix="mend the answer, or the template")
