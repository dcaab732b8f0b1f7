"""Intervals that values have to lie in, and the core's rules about runs that cannot be meant: refusals.toml, three."""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from miles_core.config import cache
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

CORE = Path(__file__).parents[1]
FILES = [CORE / folder / "refusals.toml" for folder in ("config", "backends/megatron", "backends/sglang")]
"""The core's own rules, those of the trainer and those of the engine."""


@functools.cache
def stated() -> Sequence[Mapping[str, Mapping]]:
    """What each file says: `bounds`, `refuses` as in a plugin's manifest (plugins/refusals.py), and `given`, without
    which they are not looked at."""
    return cache.cached("refusals", cache.stamp(FILES), lambda: {
        "files": [tomllib.loads(file.read_text(encoding="utf-8")) for file in FILES]})["files"]


def within(value: object, interval: str) -> bool:
    """Whether a number lies in an interval such as "[0, 1)"; what is no number does.

    Raises:
        ValueError: no interval is written like this.
    """
    found = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
    if found is None:
        raise ValueError(f'{interval!r} is no interval such as "[0, 1)"')
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    low, high = float(found[2]), float(found[3])
    return (low <= value if found[1] == "[" else low < value) and (value <= high if found[4] == "]" else value < high)


def check_bounds(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: a value outside of its interval.
    """
    for interval, keys in (pair for file in stated() for pair in file["bounds"].items()):
        for key in keys:
            table, _, name = key.partition(".")
            held = getattr(config, table)
            value = held.get(name) if isinstance(held, Mapping) else getattr(held, name)
            for one in value if isinstance(value, list) else [value]:
                if not within(one, interval):
                    raise ConfigError(f"{name} should {_words(interval)}", got=one, who=who(config, key),
                                      fix="correct it, or leave it out for its default")
    return config


def _words(interval: str) -> str:
    low, high = (float(edge) for edge in interval[1:-1].split(", "))
    if math.isinf(low):
        return "be a number"
    if not math.isinf(high):
        return f"lie in {interval}"
    if low == 0 and interval[0] == "[":
        return "not be negative"
    return f"be at least {low:g}" if interval[0] == "[" else f"be above {low:g}"
