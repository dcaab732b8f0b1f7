"""Fit: does an implementation suit its hook? Asked once, when a plugin is bound; each mistake is an error of its own.

What pluggy would let pass in silence (a forgotten or foreign marker, an argument with a default, a coroutine where
nobody awaits, a method that never returns) is refused here, with plugin, version, hook, definition and remedy.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import re
import time
import types
from collections.abc import Callable
from pathlib import Path

from miles_core.errors import HookError, MilesError, did_you_mean
from miles_core.plugins.load import marked
from miles_core.plugins.manifest import Offer
from miles_core.plugins.select import Selected, all_specs

STREAMS = ("Iterable", "Iterator")
"""How the result of a hook begins whose implementation may be a generator."""


def who(one: Selected, hook: str, where: str) -> str:
    """How errors refer to an implementation: plugin, version, hook, definition."""
    return f"plugin {one.manifest.name} {one.version}, hook {hook}, {where}"


def definition(function: Callable | type) -> str:
    """Where a function or class is written: FILE:LINE and its name; files of packages from the package on."""
    code = getattr(inspect.unwrap(function), "__code__", None) if not isinstance(function, type) else None
    try:
        path = Path(code.co_filename if code else inspect.getsourcefile(function) or "?")
        line = code.co_firstlineno if code else inspect.getsourcelines(function)[1]
        first = line  # of its markers
        while code and line < first + 20 and not re.match(r"\s*(async )?def ", linecache.getline(str(path), line)):
            line += 1
    except (OSError, TypeError):
        return function.__qualname__
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if root == path.parent and path.is_relative_to(Path.cwd()):
        root = Path.cwd()
    shown = path if root == path.parent and root != Path.cwd() else path.relative_to(root)
    return f"{shown}:{line} {function.__qualname__}"


def located(one: Selected, offer: Offer) -> str:
    """`definition` of a plugin's method as its manifest tells, without importing it."""
    where, _, kind = one.manifest.plugin.rpartition(":")
    return f"{where}:{offer.line} {kind}.{offer.method}" if offer.line else f"{where} {kind}.{offer.method}"


def check_hook(name: str) -> None:
    """
    Raises:
        HookError: there is no hook of this name.
    """
    if name not in (table := all_specs()):
        raise HookError(f"unknown hook {name!r}", code="hook-unknown",
                        fix=did_you_mean(name, table) or "`miles hooks` lists them")


def hook_of(one: Selected, offer: Offer) -> Callable:
    """The specification of what a plugin offers.

    Raises:
        HookError: there is no such hook.
    """
    table = all_specs()
    if offer.hook not in table:
        raise HookError(f"plugin {one.manifest.name!r} implements {offer.hook!r}, which is not a hook",
                        code="hook-not-declared", who=who(one, offer.hook, located(one, offer)),
                        fix=did_you_mean(offer.hook, table) or "see docs/hooks.md")
    return table[offer.hook]


def check_markers(one: Selected, kind: type) -> None:
    """
    Raises:
        HookError: a method with a hook's name and no marker, or another project's.
    """
    table, methods = all_specs(), marked(kind)
    for base in kind.__mro__[:-1]:
        for name, value in vars(base).items():
            if not inspect.isfunction(value) or name in methods:
                continue
            foreign = [key.removesuffix("_impl") for key, marker in vars(value).items()
                       if key.endswith("_impl") and isinstance(marker, dict) and "hookwrapper" in marker]
            hook = next((vars(value)[f"{project}_impl"].get("specname") for project in foreign), None) or name
            if hook in table and (foreign or not name.startswith("_")):
                what = f"its marker is pluggy's for {foreign[0]!r}, not miles_core.hookimpl" if foreign else (
                    f"it has a hook's name but no @hookimpl: {name}")
                raise HookError(what, code="hook-marker-missing", who=who(one, hook, definition(value)),
                                fix="mark it with miles_core.hookimpl, or rename it")


def check(one: Selected, kind: type, method: str, hook: str, spec: Callable) -> Callable:
    """The function behind a method that implements a hook.

    Raises:
        HookError: it does not suit the hook.
    """
    function = inspect.getattr_static(kind, method)
    if problem := _problem(function, marked(kind)[method][2], hook, spec):
        raise HookError(problem[0], code="hook-signature-unfit",
                        who=who(one, hook, definition(inspect.unwrap(getattr(kind, method)))), fix=problem[1])
    return function


@functools.cache  # each role asks
def _problem(function: Callable, refused: tuple[str, ...], hook: str, spec: Callable) -> tuple[str, str] | None:
    """(what does not suit the hook, what to do); `refused` are the marker's arguments that are not used here."""
    if refused:
        return f"@hookimpl({refused[0]}=...) is not used here", "order is the order of the run file"
    if isinstance(function, staticmethod | classmethod):
        return "it is no method of an instance", "def NAME(self, ...): every role has an instance of its own"
    mine, allowed = parameters(function), list(inspect.signature(spec).parameters)
    if unknown := [p.name for p in mine if p.name not in allowed]:
        return f"it takes {unknown[0]!r}, which {hook} does not have", f"{hook} has: {', '.join(allowed) or 'none'}"
    if [p for p in mine if p.default is not p.empty or p.kind is not p.POSITIONAL_OR_KEYWORD]:
        return "its arguments have defaults or are keyword-only", "take plain arguments; leave out what you do not need"
    if hook == "reward" and not {"sample", "samples"} & {p.name for p in mine}:
        return "a scorer takes `sample`, or `samples` for a whole group", "def reward(self, sample): ..."
    is_async, wants_async = inspect.iscoroutinefunction(function), inspect.iscoroutinefunction(spec)
    if wants_async and not is_async:
        return f"{hook} is async and this is not", "write async def"
    if is_async and not wants_async and hook != "reward":
        return f"{hook} is not async and this is", "write def"
    streams = spec.__annotations__["return"].startswith(STREAMS)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function) and not streams:
        return ("it has a yield, so that calling it runs none of it",
                "return the result; a hook of the kind around calls `proceed`")
    if spec.__annotations__["return"] != "None" and _returns_nothing(function):
        return "it returns None whatever it is given", f"return {spec.__annotations__['return']}"
    return None


def _returns_nothing(function: Callable) -> bool:
    """Whether a method can only return None."""
    if inspect.isgeneratorfunction(function):
        return False
    steps = list(dis.get_instructions(inspect.unwrap(function)))
    returns = [(before, step) for before, step in zip([None, *steps], steps) if step.opname.startswith("RETURN_")
             and step.opname != "RETURN_GENERATOR"]
    nothing = [step.argval is None if step.opname == "RETURN_CONST" else
               before.opname == "LOAD_CONST" and before.argval is None for before, step in returns]
    return bool(returns) and all(nothing)


def parameters(function: Callable | staticmethod) -> list[inspect.Parameter]:
    """The parameters of a method, without self."""
    return [p for p in inspect.signature(function).parameters.values() if p.name != "self"]


ALL, EACH = 16, 16
"""Of a hook's calls in a rollout the first ALL are timed, then each EACH-th, which counts for as many."""


def caller(call: Callable, one: Selected, hook: str, spec: Callable, function: Callable) -> Callable:
    """What the core calls: takes the hook's own arguments, no more and no fewer, hands on those that the implementation
    wants, and adds to an error whose it is. Made once; a call costs no more than a frame and a `try`.

    `tally`, [calls, seconds], grows with each call; None for the core's own parts and for streams, whose time is not
    that of the call. Seconds are of the clock on the wall: an async hook's waits are among them.
    """
    mine, everything = [p.name for p in parameters(function)], list(inspect.signature(spec).parameters)
    taken = mine if hook == "reward" else everything  # whoever scores looks at which of the two it wants
    wait = ("async ", "await ") if inspect.iscoroutinefunction(function) else ("", "")
    tally = None if one.ours or inspect.isgeneratorfunction(function) else [0, 0.0]
    body = run = f"return {wait[1]}__call({', '.join(mine)})\n"
    if tally is not None:  # around: each, as what `proceed` takes is always subtracted
        plain = "" if spec.kind == "around" else f"  if __n > {ALL} and __n % {EACH}:\n   {run}"
        body = (f"__n = __tally[0] = __tally[0] + 1\n{plain}  __begin = __clock()\n  try:\n   {run}"
                f"  finally:\n   __tally[1] += (__clock() - __begin)")
        body += "\n" if not plain else f" * (1 if __n <= {ALL} else {EACH})\n"
    source = (f"{wait[0]}def {hook}({', '.join(taken)}):\n try:\n  {body}"
              " except (Exception, SystemExit) as error:\n  raise __blame(error)\n")
    names = {"__call": call, "__blame": _blamer(one, hook, function), "__tally": tally, "__clock": time.perf_counter}
    exec(compile(source, f"<hook {hook} of plugin {one.manifest.name}>", "exec"), names)
    made: types.FunctionType = names[hook]
    made.__doc__, made.who, made.tally = call.__doc__, who(one, hook, definition(function)), tally
    return made


def apart(proceed: Callable, tally: list | None) -> Callable:
    """What a hook of the kind around is given as `proceed`: its seconds are not the plugin's."""
    if tally is None:
        return proceed

    def others(*args: object) -> object:
        begin = time.perf_counter()
        try:
            return proceed(*args)
        finally:
            tally[1] -= time.perf_counter() - begin

    return others


def _blamer(one: Selected, hook: str, function: Callable) -> Callable[[BaseException], BaseException]:
    note = f"in plugin {one.manifest.name} {one.version}, {definition(function)} ({one.source}), hook {hook}"

    def blame(error: BaseException) -> BaseException:
        if isinstance(error, SystemExit):  # the driver's loop would end by it, and the run pass for interrupted
            error = RuntimeError(f"SystemExit: {error}")
        if not (one.ours and isinstance(error, MilesError) or note in getattr(error, "__notes__", ())):  # it says more
            error.add_note(note)
        return error

    return blame
