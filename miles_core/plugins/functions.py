"""Functions that plugins' options name, as FILE.py:NAME or MODULE.NAME: their source is read, nothing imported."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from miles_core.errors import ConfigError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_function(name: str, value: str, call: str | None, packages: Sequence[str]) -> None:
    """
    Args:
        name, value: an option and what it says, of a function or not.
        call: how the function is called, "reward(args, sample) -> float", where a function it has to be: "async " is
            before one that waits, "async? " before one that may, "class " before one that makes an object.
        packages: what can be imported whether it is installed or not.

    Raises:
        ConfigError: a file that is not there, that is no Python, that imports what is not there, or without the name;
            a function that takes something else.
    """
    origin, text = f"--{name.replace('_', '-')} {value}", (call or "").replace("async? ", "")
    found, dotted = re.fullmatch(r"(.+\.py):(\w+)", value), re.fullmatch(r"(\w+)(?:\.\w+)*[.:](\w+)", value)
    if value.endswith(".py") and name.endswith("_path"):
        raise ConfigError("the file is named, and none of its functions", who=origin, fix=f"write {value}:FUNCTION")
    if call and not (found or dotted):
        raise ConfigError("this is no path of a function", who=origin,
                          fix=f"write package.module.function or ./file.py:function, of {text}")
    if not found and not (dotted and name.endswith("_path") and not Path(value).exists()):
        return
    if found and not Path(found[1]).is_file():
        raise _absent("no such file", origin, "write ./file.py:function, relative to the working directory")
    if dotted and not found and not _importable(dotted[1], packages):
        raise _absent(f"no module {dotted[1]}", origin,
                      "install it, name its folder in PYTHONPATH, or write ./file.py:function")
    try:
        tree = _source(value)
    except (SyntaxError, ValueError) as error:
        raise ConfigError("the module of the function is not Python", got=error, who=origin,
                          fix="mend the line") from None
    if tree is not None:
        _check_source(tree, value, (call, text), origin, packages if found else None)


def _check_source(tree: ast.Module, value: str, call: tuple[str | None, str], origin: str,
                  packages: Sequence[str] | None) -> None:
    function = re.split(r"[.:]", value)[-1]
    if not {bound for bound, _ in _bound(tree.body)} & {function, "*", "__getattr__"}:
        raise ConfigError("there is no such function", got=f"{value[:-len(function) - 1]} has no {function!r}",
                          who=origin, fix="define it there, outside of classes and functions, or name another after it")
    if call[0] and (got := _misfit(tree, function, call[0])):
        raise ConfigError("the function cannot be called as it would be", got=got, who=origin,
                          fix=f"it is called as {call[1]}")
    for line, module in _imports(tree) if packages is not None else ():
        if not _importable(module, packages or ()):
            raise _absent(f"line {line}: " + (f"no module {module}" if module else "a file has no relative imports"),
                          origin, "install it, or name its folder in PYTHONPATH; or write package.module.function")


def _absent(got: str, origin: str, fix: str) -> ConfigError:
    return ConfigError("the module of the function cannot be imported", got=got, who=origin, fix=fix)


def _misfit(tree: ast.Module, name: str, call: str) -> str | None:
    """What a function is that cannot be called so."""
    node = next((one for bound, one in _bound(tree.body) if bound == name), None)
    takes = [re.split(r",\s*", one) for one in re.findall(r"(?:^|[ ?])\w+\((.*?)\)", call)]
    if isinstance(node, ast.ClassDef):
        own = {one.name: one.args for one in node.body if isinstance(one, FUNCTIONS)}
        if not call.startswith("class ") or node.bases or node.decorator_list:
            return None
        method, _, words = call.rpartition(".")[2].rstrip(")").partition("(")
        for one, asked in (("__init__", takes[0]), (method, re.split(r",\s*", words))):
            if one not in own or not _binds(own[one], ["self", *asked]):
                return f"{name} has no {one}" if one not in own else f"{name}.{one}({ast.unparse(own[one])})"
        return None
    if not isinstance(node, FUNCTIONS) or node.decorator_list:
        given = node.value if isinstance(node, ast.Assign) else None
        fits = not isinstance(given, ast.Constant | ast.Lambda) or isinstance(given, ast.Lambda) and any(
            _binds(given.args, one) for one in takes)
        return None if fits or given is None else ast.unparse(given)
    if isinstance(node, ast.AsyncFunctionDef) and not call.startswith("async"):
        return "a coroutine function"
    if isinstance(node, ast.FunctionDef) and call.startswith("async "):
        return "a plain function, and it is awaited"
    inner = {id(one) for part in [*ast.walk(node)][1:] if isinstance(part, FUNCTIONS) for one in ast.walk(part)}
    answers = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and id(one) not in inner]
    if "->" in call and all(one is None or isinstance(one, ast.Constant) and one.value is None for one in answers):
        return "a function that returns nothing"
    if not any(_binds(node.args, one) for one in takes):
        return f"{name}({ast.unparse(node.args)})"
    wrong = next((one for one in answers if one and _unlike(one, node.args, call.rpartition("-> ")[2])), None)
    return None if wrong is None else f"a function that returns {ast.unparse(wrong)[:60]}"


def _unlike(answer: ast.expr, given: ast.arguments, wanted: str) -> bool:
    """Whether an answer, as it is written, can be no `wanted`; of `samples` a scorer gives a list."""
    listed = (ast.List, ast.ListComp) if [one.arg for one in given.args][1:2] != ["samples"] or wanted == "bool" else ()
    alone = (ast.Dict, ast.DictComp, ast.Tuple, ast.Set, ast.JoinedStr, *listed)
    kinds = {"(": (ast.Dict, ast.DictComp, ast.ListComp, ast.Constant, ast.UnaryOp), "f": alone, "b": alone}
    return isinstance(answer, kinds.get(wanted[:1], ())) or (
        wanted == "float" and isinstance(answer, ast.Constant) and isinstance(answer.value, str))


def _binds(given: ast.arguments, call: Sequence[str]) -> bool:
    """Whether a function takes these arguments, by position up to a *, and after it by name."""
    count = call.index("*") if "*" in call else len(call)
    places, named = [*given.posonlyargs, *given.args], set(call[count + 1:])
    needed = {one.arg for one in places[:len(places) - len(given.defaults)][count:]}
    needed |= {one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None}
    known = {one.arg for one in [*places[count:], *given.kwonlyargs]}
    if any(one.arg in call[:count] and call[place] != one.arg for place, one in enumerate(places[:count])):
        return False  # the same ones in another order
    return (count <= len(places) or given.vararg is not None) and needed <= named and (
        named <= known or given.kwarg is not None)


def _bound(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module's statements bind, and by what; * for those of a whole other module."""
    for node in body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        else:
            yield from ((one.id, node) for one in ast.walk(node)
                        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))
            for part in (node, *getattr(node, "handlers", ())):
                for inner in ("body", "orelse", "finalbody"):
                    yield from _bound(getattr(part, inner, ()))


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, package) of what is imported in any case; "" for a relative import."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield node.lineno, "" if node.level else str(node.module).partition(".")[0]
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)


def _importable(package: str, packages: Sequence[str]) -> bool:
    return package in packages or package in sys.modules or bool(package) and bool(
        find_spec(package) or PathFinder.find_spec(package, ["."]))


def _source(path: str) -> ast.Module | None:
    """The module of a function; None where it is not here as a file of Python."""
    where = Path(path.rpartition(":")[0])
    if ".py:" not in path:
        root, *inner = re.split(r"[.:]", path)[:-1] or [""]
        spec = PathFinder.find_spec(root, [".", *sys.path]) if root.isidentifier() else None
        inside = Path(spec.origin).parent.joinpath(*inner) if spec and spec.origin else Path("none")
        where = next(filter(Path.is_file, [inside.with_suffix(".py"), inside / "__init__.py"]), inside)
        where = Path(str(spec.origin)) if spec and not inner else where
    return ast.parse(where.read_text(encoding="utf-8", errors="replace")) if (
        where.is_file() and where.suffix == ".py") else None
