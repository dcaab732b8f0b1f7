"""Bind: one instance of each plugin per role, its hooks checked and turned into plain callables.

Specifications and implementations carry pluggy's markers; `fit` checks one against the other, and no call goes through
pluggy. Each hook becomes an attribute of `Hooks`: for named hooks a dict of callables by name, for the others one
callable, or None when nobody implements it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from miles_core.config.tables import RunConfig
from miles_core.errors import HookError, MilesError, OwnerError, PluginError, SharedStateError
from miles_core.plugins import fit
from miles_core.plugins.load import compare, imported, marked, options_class
from miles_core.plugins.manifest import Manifest
from miles_core.plugins.select import Selected, all_specs, declare
from miles_core.types import Drop

STATEMENTS = frozenset(field.name for field in dataclasses.fields(Manifest))
"""What a class body says for its manifest, which nobody reads from the class."""


EVALUATING: ContextVar[bool] = ContextVar("EVALUATING", default=False)
"""Whether what runs is part of an evaluation."""


class Figures:
    """Numbers that plugins log, of one role; from any thread."""

    def __init__(self) -> None:
        self._mutex, self._sums = threading.Lock(), {}

    def log(self, plugin: str, name: str, value: float) -> None:
        """A number that becomes the metric PLUGIN/NAME of the rollout, or eval/PLUGIN/NAME: the mean of all that are
        logged meanwhile."""
        key = f"{'eval/' if EVALUATING.get() else ''}{plugin}/{name}"
        with self._mutex:
            count, total = self._sums.get(key, (0, 0.0))
            self._sums[key] = count + 1, total + float(value)

    def take(self) -> dict[str, float]:
        """The means since they were last taken."""
        with self._mutex:
            sums, self._sums = self._sums, {}
        return {key: total / count for key, (count, total) in sums.items()}


class Hooks(types.SimpleNamespace):
    """The bound hooks of one role; `instances` and `versions` are those of the plugins, by name. Frozen once bound."""

    def timings(self) -> dict[str, float]:
        """Metrics since they were last asked for: seconds and calls of each plugin's hooks, and what it has logged."""
        metrics = {}
        for name, tallies in self.tallies.items():
            if calls := sum(count for count, _ in tallies):
                metrics[f"perf/hooks/{name}"] = max(0.0, sum(seconds for _, seconds in tallies))
                metrics[f"perf/hook_calls/{name}"] = float(calls)
            for tally in tallies:
                tally[:] = 0, 0.0
        return metrics | self.figures.take()

    def __setattr__(self, name: str, value: object) -> None:
        raise HookError(f"hooks cannot be changed once the run has begun: {name!r}", code="hooks-frozen")

    def __reduce_ex__(self, protocol: object) -> object:
        raise HookError("bound hooks cannot be sent to another process", code="hooks-not-picklable",
                        who=f"the hooks of role {self.role}",
                        fix="send the selected plugins, which are plain data, and bind them there")


def bind(selected: Sequence[Selected], config: RunConfig, role: str) -> Hooks:
    """Build each plugin's instance for this role and bind its hooks.

    The role "plan" imports those plugins alone that have a hook of that role.

    Raises:
        HookError, OwnerError: an implementation breaks its specification.
        SharedStateError: a class keeps state that every role would share.
    """
    for one in selected:
        if one.manifest.hookspecs:
            declare(one.manifest.hookspecs)
    table = all_specs()
    if role == "plan":
        planning = {name for name, spec in table.items() if spec.role == role}
        selected = [one for one in selected if any(offer.hook in planning for offer in one.manifest.offers)]
    instances, implementations, tallies, figures = {}, {name: [] for name in table}, {}, Figures()
    for one in selected:
        kind = imported(one.manifest)
        _check_class(one, kind)
        compare(one.manifest, kind)
        instance = instances[one.manifest.name] = _instance(one, kind, config, figures)
        for offer in one.manifest.offers:
            spec = fit.hook_of(one, offer)
            function = fit.check(one, kind, offer.method, offer.hook, spec)
            if spec.role in ("every", role):
                call = fit.caller(getattr(instance, offer.method), one, offer.hook, spec, function)
                implementations[offer.hook].append((one.manifest.name, offer.name, call))
                if call.tally is not None:
                    tallies.setdefault(f"{one.manifest.name}/{offer.hook}", []).append(call.tally)
    hooks = {name: _combine(name, spec, implementations[name]) for name, spec in table.items()}
    versions = {one.manifest.name: one.version for one in selected}
    return Hooks(role=role, instances=instances, versions=versions, tallies=tallies, figures=figures, **hooks)


def check_roles_apart(roles: Sequence[Hooks]) -> None:
    """Refuse plugins whose instances in two roles reach the same mutable object, however they came by it.

    Looks at instance attributes, and at module-level objects that the hook methods of two roles name.

    Raises:
        SharedStateError: names plugin, object and roles.
    """
    seen: dict[int, tuple[str, str, str]] = {}
    for hooks in roles:
        for name, instance in hooks.instances.items():
            reach = {f"self.{key}": value for key, value in vars(instance).items()}
            reach.update(_globals(type(instance), hooks.role))
            for where, value in reach.items():
                if not _mutable(value):
                    continue
                first = seen.setdefault(id(value), (name, hooks.role, where))
                if first[1] != hooks.role and first[0] == name:
                    raise SharedStateError(f"plugin {name!r} shares {where} between its roles {first[1]} and "
                                           f"{hooks.role}", code="state-shared-between-roles", got=type(value).__name__,
                                           fix="create it in __init__, which runs once per role; make constants a "
                                           "tuple, frozenset or types.MappingProxyType; pass data between roles in "
                                           "columns")


def _instance(one: Selected, kind: type, config: RunConfig, figures: Figures) -> object:
    wanted = inspect.signature(kind).parameters
    arguments: dict[str, Any] = {}
    if "options" in wanted:
        arguments["options"] = options_class(kind)(**config.options.get(one.manifest.name, {}))
    if "config" in wanted:
        arguments["config"] = config
    if "log" in wanted:
        arguments["log"] = functools.partial(figures.log, one.manifest.name)
    unknown = set(wanted) - {"options", "config", "log"}
    if unknown:
        raise HookError(f"the constructor of plugin {one.manifest.name!r} has unknown arguments: "
                        f"{', '.join(sorted(unknown))}", code="constructor-arguments-unknown", who=one.manifest.plugin,
                        fix="it may take `options`, `config` and `log`")
    try:
        return kind(**arguments)
    except MilesError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugin {one.manifest.name!r} cannot be constructed", code="plugin-constructor-failed",
                          got=f"{type(error).__name__}: {error}", who=one.manifest.plugin,
                          fix="correct its __init__ or its options") from error


def _check_class(one: Selected, kind: type) -> None:
    fit.check_markers(one, kind)
    for name, value in vars(kind).items():
        if not name.startswith("_") and name not in STATEMENTS and _mutable(value):
            raise SharedStateError(f"plugin {one.manifest.name!r} keeps {name} on its class, which all roles share",
                                   code="state-shared-on-class", got=type(value).__name__,
                                   who=f"{one.manifest.name} {one.version}, {fit.definition(kind)}",
                                   fix="create it in __init__")


def _combine(name: str, spec: Callable, implementations: list[tuple[str, str, Callable]]) -> Any:
    """found: (plugin, offered name, callable) in the order of the run."""
    calls = [call for _, _, call in implementations]
    if spec.kind == "named":
        return {offered: call for _, offered, call in implementations}
    if not calls:
        return None
    if spec.kind == "gather":
        return _gather(name, implementations, lists=spec.__annotations__["return"].startswith("Iterable"))
    if spec.kind == "chain":
        return _chain(name, implementations)
    return _observe(calls) if spec.kind == "observe" else _around(name, implementations)


def _chain(name: str, implementations: list[tuple[str, str, Callable]]) -> Callable:
    def chained(value: object, *rest: object) -> object:
        for _, _, call in implementations:
            before, value = value, call(value, *rest)
            odd = {*map(type, value)} - {*map(type, before)} if type(value) is type(before) is list and before else ()
            if odd or not isinstance(value, type(before) | Drop):
                raise HookError(f"{name} should return its argument, a {type(before).__name__}, changed or not",
                                got=", ".join(kind.__name__ for kind in odd) or type(value).__name__, who=call.who,
                                code="filter-returned-other-type", fix="check for a path without `return`")
            if isinstance(value, Drop):
                break
        return value

    return chained


def _gather(name: str, implementations: list[tuple[str, str, Callable]], *, lists: bool) -> Callable:
    wanted = Iterable if lists else Mapping

    def results(args: tuple) -> Iterator[tuple[str, Any]]:
        for plugin, _, call in implementations:
            if not isinstance(result := call(*args), wanted):
                raise HookError(f"{name} should return {'an iterable' if lists else 'a dict'}",
                                got=type(result).__name__, code="hook-returned-other-type", who=call.who,
                                fix="check for a path without `return`")
            yield plugin, result

    def listed(*args: object) -> list:
        return [item for _, result in results(args) for item in result]

    def merged(*args: object) -> dict:
        everything: dict[object, object] = {}
        owner: dict[object, str] = {}
        for plugin, result in results(args):
            for key, value in result.items():
                if key in everything:
                    raise OwnerError(f"{owner[key]} and {plugin} both return the key {key!r} from {name}",
                                     code="hook-keys-clash", fix="rename one of them")
                everything[key], owner[key] = value, plugin
        return everything

    return listed if lists else merged


def _observe(calls: list[Callable]) -> Callable:
    """All are called, also after one that fails; then the first error is raised."""

    def observed(*args: object) -> None:
        errors = []
        for call in calls:
            try:
                call(*args)
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
        if errors:
            raise errors[0]

    return observed


def _around(name: str, implementations: list[tuple[str, str, Callable]]) -> Callable:
    """around(proceed, value, *rest): the first plugin of the run is outermost. `proceed` takes the value, changed or
    not, or nothing where the hook says so."""

    def outer(call: Callable, proceed: Callable, value: object, others: tuple, *changed: object) -> object:
        result = call(fit.apart(proceed, call.tally), *(changed or (value,)), *others)
        if result is None:
            raise HookError(f"{name} should return what `proceed` returns, changed or not", got="None",
                            who=call.who, code="wrapper-returned-nothing", fix="check for a path without `return`")
        return result

    def wrapped(proceed: Callable, value: object, *rest: object) -> object:
        for _, _, call in reversed(implementations):
            proceed = functools.partial(outer, call, proceed, value, rest)
        return proceed()

    return wrapped


_CONSTANT = (str, bytes, int, float, complex, bool, type(None), type, property, staticmethod, classmethod,
             functools.partial, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
             types.MappingProxyType, types.GenericAlias, types.UnionType, RunConfig)

_HARMLESS = frozenset({"typing", "re", "enum", "pathlib", "logging", "_thread"})
"""Modules of the standard library whose objects roles may share: patterns, paths, loggers, locks."""


def _mutable(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return any(_mutable(item) for item in value)
    parameters = getattr(type(value), "__dataclass_params__", None)
    if isinstance(value, _CONSTANT) or (parameters is not None and parameters.frozen):
        return False
    return type(value).__module__.partition(".")[0] not in _HARMLESS


def _globals(kind: type, role: str) -> dict[str, object]:
    """Module-level objects that the hook methods of this role, and what they call on self, name."""
    table, reachable = all_specs(), {}
    for method, (hook, _, _) in marked(kind).items():
        if hook in table and table[hook].role == role:
            function = inspect.getattr_static(kind, method)
            for name in _names(function.__code__):
                if name in function.__globals__ and not name.startswith("__"):
                    reachable[f"{function.__module__}.{name}"] = function.__globals__[name]
    return reachable


def _names(code: types.CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(item) for item in inner))
