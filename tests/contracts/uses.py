"""Which members of a part the code reads, told from annotations: parameters, fields, and what is assigned from them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from source import tree

ASKED = ("getattr", "hasattr", "setattr", "delattr")
COMPUTED = "a name that is computed"

Use = tuple[Path, int, str, str]
"""File, line, the part's type, the member."""


def named(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation: {"Engine", "None"} of `Engine | None`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):
        return named(annotation.left) | named(annotation.right)
    return {annotation.id} if isinstance(annotation, ast.Name) else set()


class Typed:
    """What annotations say: fields of classes, and what functions return.

    A class is known by its name. Where several files define one of the same name, each means its own.

    Args:
        parts: names of the types whose uses are wanted.
    """

    def __init__(self, files: Iterable[Path], parts: Iterable[str]):
        self.files, self.parts = list(files), set(parts)
        self.classes = {(node.name, path): node for path in self.files for node in ast.walk(tree(path))
                        if isinstance(node, ast.ClassDef)}
        self.homes: dict[str, list[Path]] = {}
        for name, path in self.classes:
            self.homes.setdefault(name, []).append(path)
        self.fields = {(name, path): self._fields(node, path) for (name, path), node in self.classes.items()}
        self.returns = {(node.name, path): kind for path in self.files for node in tree(path).body
                        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                        and (kind := self.kind(node.returns, path))}

    def kind(self, annotation: ast.expr | None, path: Path) -> str | None:
        """The one known type in an annotation of this file."""
        found = {name for name in named(annotation) if self._means_ours(name, path)}
        return found.pop() if len(found) == 1 else None

    def _means_ours(self, name: str, path: Path) -> bool:
        homes = self.homes.get(name, [])
        if name in self.parts:
            return path not in homes or "miles_core" in path.parts
        return path in homes or len(homes) == 1

    def field(self, kind: str | None, name: str, path: Path) -> str | None:
        """The type of a field of a class, as this file knows the class."""
        homes = self.homes.get(kind or "", [])
        home = path if path in homes else homes[0] if len(homes) == 1 else None
        return self.fields.get((kind or "", home), {}).get(name)

    def of_parameters(self, function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> dict[str, str]:
        """Parameter -> type."""
        every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        return {one.arg: kind for one in every if (kind := self.kind(one.annotation, path))}

    def _fields(self, node: ast.ClassDef, path: Path) -> dict[str, str]:
        """Those that are annotated, and those that the constructor fills with its parameters."""
        found = {one.target.id: self.kind(one.annotation, path) for one in node.body
                 if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
        for init in (one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"):
            given = self.of_parameters(init, path)
            for one in ast.walk(init):
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Attribute):
                    found[one.target.attr] = self.kind(one.annotation, path)
                elif isinstance(one, ast.Assign):
                    found |= {target.attr: given.get(value.id) for target, value in pairs(one)
                              if isinstance(target, ast.Attribute) and isinstance(value, ast.Name)}
        return {name: kind for name, kind in found.items() if kind}

    def uses(self) -> Iterator[Use]:
        """Every member of a part that is read, set or asked for."""
        for path in self.files:
            yield from Reader(self, path).read()


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, also of several at once."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts)
        else:
            yield target, node.value


class Reader(ast.NodeVisitor):
    """Goes through a file and knows in each function what the names stand for."""

    def __init__(self, typed: Typed, path: Path):
        self.typed, self.path = typed, path
        self.names: Mapping[str, str] = {}
        self.within: str | None = None
        self.method = ""
        self.found: list[Use] = []

    def read(self) -> list[Use]:
        self.visit(tree(self.path))
        return self.found

    def kind(self, node: ast.expr) -> str | None:
        """What an expression stands for, where that is known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.typed.field(self.kind(node.value), node.attr, self.path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.typed.returns.get((node.func.id, self.path))
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.within = self.within, node.name
        self.generic_visit(node)
        self.within = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before, method, self.method = self.names, self.method, node.name
        own = {"self": self.within} if self.within and self.within not in self.typed.parts else {}
        self.names = {**before, **own, **self.typed.of_parameters(node, self.path)}
        self.generic_visit(node)
        self.names, self.method = before, method

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and (kind := self.typed.kind(node.annotation, self.path)):
            self.names = {**self.names, node.target.id: kind}

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target, value in pairs(node):
            if isinstance(target, ast.Name) and (kind := self.kind(value)):
                self.names = {**self.names, target.id: kind}

    def visit_If(self, node: ast.If) -> None:
        """`if isinstance(engine, ServerEngine)` says more of it inside."""
        test, before = node.test, self.names
        self.visit(test)
        if isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance" and isinstance(test.args[0], ast.Name):
            name = test.args[0].id
            self.names = {**before, name: self.typed.kind(test.args[1], self.path) or before.get(name, "")}
        for one in node.body:
            self.visit(one)
        self.names = before
        for one in node.orelse:
            self.visit(one)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._note(node, node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        # What a __getattr__ hands on was asked for elsewhere.
        if isinstance(node.func, ast.Name) and node.func.id in ASKED and self.method != "__getattr__":
            name = node.args[1]
            self._note(node, node.args[0], str(name.value) if isinstance(name, ast.Constant) else COMPUTED)
        self.generic_visit(node)

    def _note(self, node: ast.expr, whose: ast.expr, member: str) -> None:
        if (kind := self.kind(whose)) in self.typed.parts:
            self.found.append((self.path, node.lineno, str(kind), member))
