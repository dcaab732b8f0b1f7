"""State: what plugins keep from one start of a run to the next; versioned, migrated, or dropped on purpose.

A plugin with `state_dict()`, which gives plain data, and `load_state_dict(state)` is saved with every checkpoint, once
for each role, and in the trainer once for each rank where ranks differ. Its class says which form that has with
`state_version`, a number, 1 unless it says so; older forms pass its `migrate_state(version, state)` first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from miles_core.errors import MilesError, StateError
from miles_core.plugins import fit
from miles_core.plugins.bind import Hooks
from miles_core.types import Rank

ONE = Rank()


def collect(roles: Sequence[Hooks]) -> dict[str, dict[str, dict]]:
    """Plugin -> role -> {"state_version", "version" (of the distribution), "state"}, as `restore` takes it.

    Raises:
        StateError: a state that is no plain data.
    """
    states: dict[str, dict[str, dict]] = {}
    for hooks in roles:
        for name, instance in hooks.instances.items():
            if hasattr(instance, "state_dict"):
                states.setdefault(name, {})[hooks.role] = {
                    "state_version": version_of(instance), "version": hooks.versions[name],
                    "state": _plain(instance.state_dict(), hooks, name)}
    return states


def with_ranks(collected: dict[str, dict[str, dict]], ranks: Mapping[str, dict]) -> dict[str, dict[str, dict]]:
    """What `collect` gave, and what it gave on each rank of the trainer: as role "trainer" where all ranks have the
    same state, else as "trainer/0", "trainer/1", ...

    Args:
        ranks: rank, as text -> what `collect` gave there.
    """
    merged = {name: dict(states) for name, states in collected.items()}
    for name in next(iter(ranks.values()), {}):
        states = {f"trainer/{rank}": plugins[name]["trainer"] for rank, plugins in ranks.items()}
        first = next(iter(states.values()))
        alike = all(one == first for one in states.values())
        merged.setdefault(name, {}).update({"trainer": first} if alike else states)
    return merged


def restore(roles: Sequence[Hooks], saved: dict[str, dict[str, dict]], drop: Sequence[str] = (),
            rank: Rank = ONE) -> list[str]:
    """Give every plugin its state. All of it is looked at before any is loaded.

    Args:
        saved: what `with_ranks` gave, or `collect`.
        drop: plugins whose state is left out; those that are enabled begin anew.
        rank: of the trainer, in its role.

    Returns:
        What to announce.

    Raises:
        StateError: of a plugin that is not enabled, of another number of ranks, of a newer form, of an older one that
            cannot be migrated.
    """
    remaining = {name: states for name, states in saved.items() if name not in drop}
    _enabled(roles, remaining)
    loads, notes = [], [f"the state of plugin {name} is left out, as --drop-plugin-state says"
                        for name in saved if name in drop]
    for hooks, name, one in _each(roles, remaining, rank):
        state, note = _migrated(hooks, name, one)
        loads.append((hooks, name, state))
        notes += [note] if note else []
    for hooks, name, state in loads:
        try:
            hooks.instances[name].load_state_dict(state)
        except Exception as error:
            raise _failed("its state cannot be loaded", hooks, name, error, "load_state_dict") from error
    return notes


def version_of(instance: object) -> int:
    """The form of a plugin's state."""
    return getattr(instance, "state_version", 1)


def _enabled(roles: Sequence[Hooks], saved: dict[str, dict[str, dict]]) -> None:
    gone = sorted(name for name in saved if all(name not in hooks.instances for hooks in roles))
    if gone:
        version = next(iter(saved[gone[0]].values()))["version"]
        more = f" (nor are {', '.join(gone[1:])})" if len(gone) > 1 else ""
        raise StateError(f"the checkpoint has state of plugin {gone[0]!r}, which is not enabled{more}",
                         code="state-of-disabled-plugin", got=f"saved by {gone[0]} {version}",
                         fix=f"add --plugin {gone[0]}, or discard its state with --drop-plugin-state {gone[0]}")


def _each(roles: Sequence[Hooks], saved: dict[str, dict[str, dict]], rank: Rank) -> Iterator[tuple[Hooks, str, dict]]:
    for hooks in roles:
        for name, states in saved.items():
            if ranks := [role for role in states if role.startswith(f"{hooks.role}/")]:
                if len(ranks) != rank.size:
                    raise StateError("its saved state differs between ranks, and the number of ranks has changed",
                                     code="state-rank-count", who=_who(hooks, name, "load_state_dict"),
                                     got=f"state of {len(ranks)} ranks, {rank.size} in this run", fix="resume with "
                                     f"{len(ranks)} ranks, or discard its state with --drop-plugin-state {name}")
                yield hooks, name, states[f"{hooks.role}/{rank.index}"]
            elif hooks.role in states:
                yield hooks, name, states[hooks.role]


def _migrated(hooks: Hooks, name: str, one: dict) -> tuple[dict, str | None]:
    """The state in the form that the instance takes, and what to announce of it."""
    instance, have = hooks.instances[name], one["state_version"]
    want, fix = version_of(instance), f"or discard its state with --drop-plugin-state {name}"
    if not hasattr(instance, "load_state_dict"):
        raise StateError("the checkpoint has state for it, and it has no load_state_dict", code="state-not-wanted",
                         who=_who(hooks, name, "load_state_dict"), got=f"state of {name} {one['version']}",
                         fix=f"install that version, {fix}")
    if have > want:
        raise StateError(f"its saved state has state_version {have}, and this version reads up to {want}",
                         who=_who(hooks, name, "load_state_dict"), got=f"saved by {name} {one['version']}",
                         code="state-too-new", fix=f"install {name} {one['version']} or newer, {fix}")
    if have == want:
        return one["state"], None
    if not hasattr(instance, "migrate_state"):
        raise StateError(f"its saved state has state_version {have}, and this version reads only {want}",
                         code="state-form-unsupported", who=_who(hooks, name, "load_state_dict"),
                         got=f"saved by {name} {one['version']}",
                         fix=f"add migrate_state(version, state) to it, install {name} {one['version']}, {fix}")
    try:
        state = instance.migrate_state(have, one["state"])
    except Exception as error:
        raise _failed(f"its state of form {have} cannot be migrated", hooks, name, error, "migrate_state") from error
    if not isinstance(state, dict):
        raise StateError("migrate_state should return the state in its current form, a dict",
                         code="migrated-state-not-dict", got=type(state).__name__,
                         who=_who(hooks, name, "migrate_state"), fix="check for a path without `return`")
    return state, f"plugin {name} ({hooks.role}): its state of form {have} was migrated to {want}"


def _plain(state: object, hooks: Hooks, name: str) -> dict:
    """
    Raises:
        StateError: JSON would not give it back.
    """
    problem = None if isinstance(state, dict) else f"a {type(state).__name__}"
    try:
        if problem is None and json.loads(json.dumps(state)) != state:
            problem = "something that JSON changes (a tuple, a key that is no text, NaN)"
    except (TypeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        raise StateError("state_dict should return plain data: a dict of numbers, strings, lists and dicts",
                         code="state-not-plain-data", got=problem, who=_who(hooks, name, "state_dict"),
                         fix="convert arrays with x.tolist() and keys with str()")
    return state


def _failed(what: str, hooks: Hooks, name: str, error: Exception, method: str) -> MilesError:
    if isinstance(error, StateError):
        return error
    return StateError(what, code="state-load-failed", got=f"{type(error).__name__}: {error}",
                      who=_who(hooks, name, method),
                      fix=f"correct its load_state_dict, or discard its state with --drop-plugin-state {name}")


def _who(hooks: Hooks, name: str, method: str) -> str:
    function = getattr(type(hooks.instances[name]), method, type(hooks.instances[name]))
    return f"plugin {name} {hooks.versions[name]}, {hooks.role}, {fit.definition(function)}"
