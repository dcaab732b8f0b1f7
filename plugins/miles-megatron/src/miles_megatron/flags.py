"""What becomes of Megatron-LM's flags: accepted, derived or refused, by the dated list in megatron_lm.toml."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from miles_megatron.surface import SurfaceField, surface

# A key with this prefix is an option of Miles's own, written "miles:table.option"; others are megatron-core's fields.
OWN = "miles:"

_LIST = Path(__file__).with_name("megatron_lm.toml")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of a launch script and what it means here.

    Args:
        name: the flag as written, with its two hyphens.
        status: "accepted" is used as it is; "derived" is not needed and changes nothing; "refused" is an error.
        set: what the flag stands for, by key; None when it sets nothing by itself.
        key: what the argument of the flag sets; None when the flag takes no argument.
        text: what it is derived from, or what to write instead of it; empty when accepted.
        switch: a derived flag takes no value.
        values: arguments with which it is derived all the same, and what from.
    """

    name: str
    status: Literal["accepted", "derived", "refused"]
    set: Mapping[str, object] | None
    key: str | None
    text: str
    switch: bool = False
    values: Mapping[str, str] = field(default_factory=dict)


@functools.lru_cache(maxsize=1)
def megatron_lm_flags() -> Mapping[str, Flag]:
    """Every flag of the Megatron-LM that the list is of, by name."""
    return MappingProxyType({name: _flag(name, entry) for name, entry in _read()["flags"].items()})


@functools.lru_cache(maxsize=1)
def megatron_lm_defaults() -> Mapping[str, object]:
    """Fields for which Megatron-LM's scripts hand megatron-core another value than the dataclass's default."""
    return MappingProxyType(_read()["defaults"])


def source() -> Mapping[str, object]:
    """Repository, tag, commit and date of the Megatron-LM that the list was made from."""
    return MappingProxyType(_read()["source"])


def lookup(flag: str) -> Flag | SurfaceField | None:
    """What a flag means, or None when neither Megatron-LM nor megatron-core knows it.

    Megatron-LM's own spelling comes first, so that a flag which is refused or derived is not accepted by way of
    the field of the same name; a run-file key is checked alike by asking for its flag. After that comes the field
    of that name, also as `--no-<field>` for a boolean: the caller tells the two from the field's name.
    """
    known = megatron_lm_flags().get(flag)
    if known is not None or not flag.startswith("--"):
        return known
    name = flag[2:].replace("-", "_")
    if name in _read()["fields"]:
        return _flag(flag, _read()["fields"][name])
    fields = surface()
    if name in fields:
        return fields[name]
    positive = fields.get(name.removeprefix("no_")) if name.startswith("no_") else None
    return positive if positive is not None and "bool" in positive.type.split(" | ") else None


def taken() -> list[SurfaceField]:
    """The fields of megatron-core that a run may set: those of the surface that are neither derived nor refused."""
    entries = [(field, lookup("--" + name.replace("_", "-"))) for name, field in surface().items()]
    return [field for field, entry in entries if not isinstance(entry, Flag) or entry.status == "accepted"]


def layer_pattern(text: str) -> int | list[int]:
    """The value of a per-layer option in Megatron-LM's notation: "2", "0,1,1" or "([0]*3+[1]*45)*1".

    Upstream evaluates such text as Python; here only lists of integers, + and * are understood.

    Raises:
        ValueError: for any other text.
    """
    import ast

    def value(node: ast.expr) -> int | list[int]:
        match node:
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                return number
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return _integers([value(item) for item in items])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return _integers(value(left) + value(right))
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                first, second = value(left), value(right)
                # No model has more layers: a slip of the keyboard must not allocate gigabytes.
                if isinstance(first, list) and isinstance(second, int) and len(first) * second <= 10_000:
                    return first * second
        raise ValueError("neither a list of integers nor one repeated")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"not a layer pattern: {text!r} ({error})") from error


def _integers(value: int | list) -> int | list[int]:
    if isinstance(value, list) and not all(isinstance(item, int) for item in value):
        raise ValueError("a list within a list")
    return value


@functools.lru_cache(maxsize=1)
def _read() -> dict:
    with _LIST.open("rb") as file:
        return tomllib.load(file)


def _flag(name: str, entry: Mapping[str, object]) -> Flag:
    for status in ("derived", "refused"):
        if status in entry:
            text = entry[status]
            text = _read()["families"][text[1:]] if text.startswith("@") else text
            return Flag(name, status, None, None, text, entry.get("switch", False))
    if "value" in entry:
        return Flag(name, "accepted", MappingProxyType({entry["key"]: entry["value"]}), None, "")
    fixed = entry.get("set")
    return Flag(name, "accepted", None if fixed is None else MappingProxyType(fixed), entry.get("key"), "",
                values=entry.get("values", {}))
