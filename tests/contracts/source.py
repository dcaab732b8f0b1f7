"""What the contract tests know about the repository's own source: files, modules, imports, lines."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "miles_core"
PACKAGES = {path.name: path.parents[1] for path in sorted(ROOT.glob("plugins/miles-*/src/*")) if path.suffix == ""}
"""Import name of every package of this repository beside the core -> its folder."""

BUDGETS = tomllib.loads((ROOT / ".ci" / "budgets.toml").read_text())


def core_files() -> list[Path]:
    """Every Python file of the core."""
    return sorted(CORE.rglob("*.py"))


def plugin_files() -> list[Path]:
    """Every Python file of the plugins' packages."""
    return sorted(ROOT.glob("plugins/miles-*/src/**/*.py"))


def repository_files() -> Iterator[Path]:
    """Every file of the repository that a person wrote: neither hidden nor made by a tool."""
    for folder in ("miles_core", "plugins", "tests", "docs", "examples", "bench", "cookiecutter", "release"):
        for path in (ROOT / folder).rglob("*"):
            made = any(part[0] == "." or part == "__pycache__" or part.endswith(".egg-info")
                       for part in path.relative_to(ROOT).parts)
            if path.is_file() and not made:
                yield path
    yield from (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith("."))


@functools.cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """The dotted name of a file of the core."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True, checkers: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what a file imports; `from a import b` gives a.b where that is a module of the core.

    Args:
        lazy: also imports inside functions.
        checkers: also those under `if TYPE_CHECKING`.
    """

    def walk(node: ast.AST) -> Iterator[ast.stmt]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not checkers:
                continue
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child
            yield from walk(child)

    for node in walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif node.module:
            for alias in node.names:
                package = PACKAGES.get(node.module.partition(".")[0])
                inner = (package / "src" if package else ROOT).joinpath(*node.module.split("."), alias.name)
                is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                yield node.lineno, f"{node.module}.{alias.name}" if is_module else node.module


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function and method that is not inside another function."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + node.name, node

    yield from walk(tree(path).body, "")


def where(path: Path, line: int = 0) -> str:
    """How messages refer to a place."""
    return f"{path.relative_to(ROOT)}:{line}" if line else str(path.relative_to(ROOT))
