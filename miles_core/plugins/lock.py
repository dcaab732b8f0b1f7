"""Locks: what a run is made of, in a file; `miles run --locked FILE` refuses anything else.

A lock holds versions and digests of every plugin in order, who owns what, and all values. It is JSON with one fact a
line, so that two of them compare in any tool; `miles plugins diff` says it in sentences.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path

from miles_core.errors import ConfigError, LockError
from miles_core.plugins import digest
from miles_core.plugins.plan import Plan
from miles_core.reading import parse_json

FORMAT = 1
PACKAGES = ("miles-core", "torch", "megatron-core", "transformers", "ray", "sglang", "transformer-engine")
PLACES = ("checkpoint.run_dir", "checkpoint.load", "checkpoint.save", "checkpoint.save_hf")
"""Where a run lies is no part of what it is."""
SHOWN = 5
"""Differences that an error tells one by one."""


def of(plan: Plan) -> dict:
    """What a plan is made of, here and now."""
    stated = plan.to_json()
    return {
        "format": FORMAT, "plan": plan.digest, "python": platform.python_version(), "core": digest.core(),
        "packages": {name: version for name in PACKAGES if (version := digest.installed_version(name))},
        "plugins": [{"name": one.manifest.name, "source": one.source, "version": one.version, "digest": digest.of(one)}
                    for one in plan.selected],
        "owners": stated["owners"], "order": stated["order"],
        "options": {key: value for key, value in stated["options"].items() if key not in PLACES}}


def text(lock: Mapping) -> str:
    """As it is written."""
    return json.dumps(lock, indent=1, sort_keys=True, default=str) + "\n"


def read(path: Path) -> dict:
    """A lock file, or the plan in a run directory.

    Raises:
        ConfigError: neither.
    """
    path = path / "plugins.lock" if path.is_dir() else path
    try:
        lock = parse_json(path.read_text(encoding="utf-8"))
        if lock["format"] != FORMAT:
            raise ValueError(f"format {lock['format']} where this version reads {FORMAT}")
        differences(lock, lock)  # whether it has all that is compared
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("the file is not a lock", code="lock-unreadable", got=str(error), who=str(path),
                          fix="write one with `miles plugins lock RUN_FILE --out plugins.lock`") from None
    return lock


def differences(then: Mapping, now: Mapping) -> list[str]:
    """In sentences, the weightiest first; none where both are the same."""
    same = then["core"] == now["core"]
    changes = [] if same else [f"miles_core: its code is another ({then['core']} -> {now['core']})"]
    before, after = ({one["name"]: one for one in lock["plugins"]} for lock in (then, now))
    changes += [f"plugin {name} takes part no longer" for name in before if name not in after]
    changes += [f"plugin {name} is new" for name in after if name not in before]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if (old["source"], old["version"]) != (new["source"], new["version"]):
            changes.append(f"plugin {name}: {old['source']} {old['version']} -> {new['source']} {new['version']}")
        elif old["digest"] != new["digest"]:
            changes.append(f"plugin {name} {old['version']}: its code is another ({old['digest']} -> {new['digest']})")
    names = [one["name"] for one in then["plugins"]], [one["name"] for one in now["plugins"]]
    if set(names[0]) == set(names[1]) and names[0] != names[1]:
        changes.append(f"the order of plugins: {', '.join(names[0])} -> {', '.join(names[1])}")
    for prefix, what in (("", "packages"), ("", "options"), ("call order of ", "order")):
        changes += _changed(prefix, then[what], now[what])
    owners = ({hook: [f"{name} of {plugin}" for own, name, plugin, *_ in lock["owners"] if own == hook]
               for hook, *_ in lock["owners"]} for lock in (then, now))
    return changes + _changed("owner of ", *owners)


def check(lock: Mapping, plan: Plan, who: str) -> None:
    """
    Raises:
        LockError: the plan is made of something else than the lock says.
    """
    if changes := differences(lock, json.loads(text(of(plan)))):
        more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        raise LockError("the run differs from its lock", code="lock-mismatch", got="; ".join(changes[:SHOWN]) + more,
                        who=who, fix="go back to what is locked, or write a new lock with `miles plugins lock`")


def _changed(prefix: str, then: Mapping, now: Mapping) -> list[str]:
    return [f"{prefix}{key}: {then.get(key)!r} -> {now.get(key)!r}" for key in sorted({*then, *now})
            if then.get(key) != now.get(key)]
