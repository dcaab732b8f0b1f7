"""How many lines look at a run before it starts: miles-preflight, and what only `check` hooks of others reach.

    python tests/contracts/checks.py

Of miles-preflight all modules count but those of its command. Elsewhere a function, class or constant counts when a
`check` hook reaches it by name and nothing else of the packages does, and a module whole when nothing else is in it.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from source import ROOT, plugin_files, tree, where

PREFLIGHT = ROOT / "plugins/miles-preflight/src/miles_preflight"
Unit = tuple[Path, str]
"""A definition at the top of a file, or a method of a class there, as Class.method."""


def lines_by_file() -> dict[str, int]:
    """File -> its lines that look at a run."""
    whole = {path for path in sorted(PREFLIGHT.rglob("*.py")) if path.parent.name != "commands"}
    nodes = {unit: node for path in plugin_files() if PREFLIGHT not in path.parents for unit, node in _units(path)}
    counted = _only_checks(nodes)
    sizes: dict[str, int] = {}
    for path, name in sorted(counted):
        node = nodes[path, name]
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        sizes[where(path)] = sizes.get(where(path), 0) + node.end_lineno - first + 1
        if all(unit in counted for unit in nodes if unit[0] == path):
            whole.add(path)
    return sizes | {where(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sorted(whole)}


def _units(path: Path) -> Iterable[tuple[Unit, ast.stmt]]:
    for node in tree(path).body:
        if isinstance(node, ast.ClassDef) and any(isinstance(one, ast.FunctionDef) for one in node.body):
            yield from (((path, f"{node.name}.{one.name}"), one) for one in node.body
                        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (path, node.name), node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (((path, one.id), node) for one in targets if isinstance(one, ast.Name))


def _only_checks(nodes: Mapping[Unit, ast.stmt]) -> set[Unit]:
    """What is reached from `check` hooks, less what anything that they do not reach reaches as well."""
    names: dict[Path, dict[str, set[Unit]]] = {}
    for path, name in nodes:
        for part in {name, *name.split(".")}:  # a method goes by its own name and by its class's
            names.setdefault(path, {}).setdefault(part, set()).add((path, name))
    modules = {".".join(path.with_suffix("").parts[path.parts.index("src") + 1:]): path for path in names}
    imported = {path: dict(_imported(tree(path).body, modules)) for path in names}
    uses = {unit: _used(unit, node, names, imported[unit[0]], modules) for unit, node in nodes.items()}
    hooks: set[Unit] = set()
    for path in ROOT.glob("plugins/miles-*/src/*/miles-plugin.toml"):
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
        module, _, kind = manifest["plugin"].partition(":")
        hooks |= {(modules[module], f"{kind}.{offer['method']}") for offer in manifest["offers"]
                  if offer["hook"] == "check" and module in modules}
    reached = _closure(hooks, uses)
    return reached - _closure(set(nodes) - reached, uses)


def _imported(statements: Iterable[ast.AST], modules: Mapping[str, Path]) -> Iterable[tuple[str, tuple[Path, str]]]:
    """Local name -> (file of the packages, name there)."""
    for node in statements:
        if isinstance(node, ast.ImportFrom) and (path := modules.get(node.module or "")):
            yield from ((alias.asname or alias.name, (path, alias.name)) for alias in node.names)


def _used(unit: Unit, node: ast.stmt, names: Mapping[Path, Mapping[str, set[Unit]]],
          imported: Mapping[str, tuple[Path, str]], modules: Mapping[str, Path]) -> set[Unit]:
    """Units that a unit names: of its own file, and what it or its file imports."""
    walked, used = list(ast.walk(node)), set()
    imported = {**imported, **dict(_imported(walked, modules))}
    for one in walked:
        name = one.id if isinstance(one, ast.Name) else one.attr if isinstance(one, ast.Attribute) else None
        path, name = imported.get(name, (unit[0], name))
        used |= names.get(path, {}).get(name, set())
    return used


def _closure(start: set[Unit], uses: Mapping[Unit, set[Unit]]) -> set[Unit]:
    reached, left = set(), set(start)
    while left:
        unit = left.pop()
        reached.add(unit)
        left |= uses.get(unit, set()) - reached
    return reached


if __name__ == "__main__":
    for file, size in (counted := lines_by_file()).items():
        print(f"{size:5}  {file}")
    print(f"{sum(counted.values()):5}  in all")
