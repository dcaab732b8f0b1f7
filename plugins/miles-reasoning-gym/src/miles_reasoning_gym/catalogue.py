"""What the installed package reasoning_gym says of its tasks, read as source.

Importing it takes more than a second of CPU and brings SymPy and matplotlib, which a plan has no use for.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import ConfigError

_NAME = re.compile(r'^DATASET_NAME\s*=\s*"(\w+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Known:
    """A task.

    Args:
        keys: of its configuration.
        curriculum: whether it has one.
    """

    keys: tuple[str, ...]
    curriculum: bool


def version() -> str:
    """Of the package, by which problems may differ."""
    return importlib.metadata.version("reasoning_gym")


@functools.cache
def names() -> dict[str, Path]:
    """The file of every task.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the package reasoning-gym is not installed", code="reasoning-gym-not-installed",
                          who="reasoning-gym", fix="pip install reasoning-gym")
    files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return {name[1]: path for path, text in texts.items() if "register_dataset(" in text
            for name in _NAME.finditer(text)}


@functools.cache
def known(name: str) -> Known:
    """What the file of a task declares."""
    tree = ast.parse(names()[name].read_text(encoding="utf-8"))
    fields = {node.name: tuple(one.target.id for one in node.body if isinstance(one, ast.AnnAssign)
                               and isinstance(one.target, ast.Name))
              for node in tree.body if isinstance(node, ast.ClassDef)}
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                and node.func.id == "register_dataset")
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]  # name, dataset, configuration, curriculum
    classes = [one.id if isinstance(one, ast.Name) else "" for one in arguments]
    return Known(tuple(key for key in fields[classes[2]] if key not in ("seed", "size")), len(arguments) > 3)
