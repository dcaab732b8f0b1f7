"""Signatures: does a plugin's source suit its hooks? Read as text; nothing of the plugin is imported or run.

What binding a plugin would refuse is said by a plan already, with the line; and annotations that contradict the hook's.
"""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from miles_core.errors import HookError
from miles_core.plugins import fit
from miles_core.plugins.fit import Problems
from miles_core.plugins.select import Selected


def check_signatures(plugins: Sequence[Selected]) -> None:
    """
    Raises:
        HookError: a method of a plugin that is not the core's own does not suit its hook.
    """
    for one in plugins:
        if not one.ours:
            check_source(one)


def check_source(one: Selected) -> None:
    """What `check` finds in a plugin's source, before anything of it is imported or run.

    Raises:
        HookError: a method does not suit its hook.
    """
    methods = fit.source_of(one.manifest)[1]
    for offer in one.manifest.offers:
        node = methods.get(offer.method)
        if node is None or len(node.decorator_list) > 1:  # another decorator may have changed the arguments
            continue
        markers = [marker for marker in node.decorator_list if isinstance(marker, ast.Call)]
        refused = tuple(str(k.arg) for marker in markers for k in marker.keywords if k.arg not in ("name", "spec"))
        spec, function = fit.hook_of(one, offer), _defined(node)
        wrong = (*fit.problems(function, refused, offer.hook, spec), *_contradictions(function, offer.hook, spec))
        for what, fix in wrong:
            raise HookError(what, who=fit.who(one, offer.hook, fit.located(one, offer.method)), fix=fix)


def _defined(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    """The function, with nothing of its source run: no decorators, no defaults, annotations as text."""
    node.decorator_list = []
    node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
    module = ast.fix_missing_locations(ast.Module([node], []))
    namespace: dict[str, Callable[..., Any]] = {}
    exec(compile(module, "<source>", "exec", __future__.annotations.compiler_flag), namespace)
    return namespace[node.name]


def _contradictions(function: Callable[..., Any], hook: str, spec: Callable[..., Any]) -> Problems:
    """Annotations that no value could satisfy together with the hook's."""
    theirs, mine = spec.__annotations__, getattr(function, "__annotations__", {})
    for name in ("return", *(p.name for p in fit.parameters(function))):
        if name in mine and name in theirs and _contradict(_parsed(theirs[name]), _parsed(mine[name])):
            what = "result" if name == "return" else f"argument {name!r}"
            yield (f"its {what} is annotated {_shown(mine[name])}, and that of {hook} is {theirs[name]}",
                   f"write {theirs[name]}, or leave the annotation out")


FAMILIES = (
    {"list", "tuple", "set", "Sequence", "Iterable", "Iterator", "Collection", "Generator", "List", "Tuple"},
    {"dict", "Mapping", "MutableMapping", "Metrics", "Dict"},
    {"int", "float", "bool"}, {"None"}, {"str"}, {"Path"}, {"Callable"}, {"Tensor"}, {"ndarray"}, {"Module"},
    *({name} for name in ("Sample", "Group", "Batch", "Prompt", "Drop", "Request", "Response", "Generation", "Packed",
                          "LossInputs", "TokenWeights", "TrainerAccess", "RunConfig", "Gradients", "Column", "Model")),
)  # fmt: skip
"""Types that stand for each other. What is in none of them is not judged: an alias, a protocol of the author's own."""


def _parsed(annotation: object) -> ast.expr | None:
    try:
        return ast.parse(_shown(annotation), mode="eval").body
    except SyntaxError:
        return None


def _shown(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _alternatives(node.left) + _alternatives(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        inner = _parsed(node.value)
        return [node] if inner is None else _alternatives(inner)
    return [node]


def _contradict(theirs: ast.expr | None, mine: ast.expr | None) -> bool:
    """Whether no value can be of both annotations, as far as their names tell."""
    if theirs is None or mine is None:
        return False
    return not any(_compatible(a, b) for a in _alternatives(theirs) for b in _alternatives(mine))


def _compatible(theirs: ast.expr, mine: ast.expr) -> bool:
    (one, first), (other, second) = _head(theirs), _head(mine)
    if one is None or other is None:
        return True
    if one is not other:
        return False
    return len(first) != len(second) or not any(map(_contradict, first, second))


def _head(node: ast.expr) -> tuple[set[str] | None, list[ast.expr]]:
    """(the family of a type, the types in its brackets)."""
    inner: list[ast.expr] = []
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        node = node.value
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    if isinstance(node, ast.Constant) and node.value is None:
        name = "None"
    return next((family for family in FAMILIES if name in family), None), inner
