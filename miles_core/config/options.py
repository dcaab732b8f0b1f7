"""How an option is declared, where a value came from, and how text becomes a value.

An options class is a frozen dataclass whose fields are made with `option`; the core's tables and every plugin's options
are declared alike. The declaration can be read without executing it (plugins/manifest.py), so keep to literals.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from miles_core.errors import ConfigError

REQUIRED = dataclasses.MISSING


def option(default: Any, help: str, *, flags: str | tuple[str, ...] = (),
           off: str | tuple[str, ...] = (), within: tuple[float, ...] = ()) -> Any:
    """Declare one option of a table.

    Args:
        default: what holds when nobody says otherwise.
        help: one sentence, shown by --help and in docs/flags.md.
        flags: further spellings beside `--name-of-the-field`.
        off: flags that set a boolean to False, beside `--no-name-of-the-field`.
        within: (least,) or (least, most) of a number; what is beyond is refused.
    """
    kind = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**kind, metadata={"help": help, "flags": words_of(flags), "off": words_of(off),
                                             "within": words_of(within)})


def words_of(value: Any) -> tuple[Any, ...]:
    """What is declared as one word, whose letters are not meant, or as several."""
    return (value,) if isinstance(value, str) else tuple(value)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who set a value: "default", "preset", "file", "plugin", "flag" or "derived", and where exactly."""

    kind: str
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a table, as the command line and the plan see it.

    Args:
        table: "rollout", ..., or a plugin's name.
        name: the key in the table.
        type: the annotation as text, e.g. "int | None" or "Literal['k1', 'k2']".
    """

    table: str
    name: str
    type: str
    default: object
    help: str
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    within: tuple[float, ...] = ()

    @property
    def key(self) -> str:
        """The dotted name, such as rollout.num_rollout."""
        return f"{self.table}.{self.name}"

    @property
    def is_bool(self) -> bool:
        return self.type.replace(" ", "") in ("bool", "bool|None")

    @property
    def is_list(self) -> bool:
        return self.type.startswith(("list[", "tuple["))

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal type allows."""
        kind = _annotation(self.type)
        return get_args(next((part for part in (kind, *get_args(kind)) if get_origin(part) is Literal), None))


def options_of(table: str, kind: type) -> dict[str, Option]:
    """The options of an options class, in the order written."""
    options = {}
    for field in dataclasses.fields(kind):
        made = field.default_factory
        default = made() if field.default is REQUIRED and made is not dataclasses.MISSING else field.default
        words = field.type if isinstance(field.type, str) else inspect.formatannotation(field.type)
        options[field.name] = Option(table, field.name, words, default, field.metadata["help"],
                                   field.metadata["flags"], field.metadata["off"], field.metadata["within"])
    return options


def brief(text: str) -> str:
    """An option's help from a longer text: as many first sentences as fit in 160 characters, at least one."""
    first, *others = re.split(r"(?<=[.!?])\s+(?=[A-Z(])", " ".join(text.split()))
    for sentence in others:
        if len(first) + len(sentence) >= 160:
            break
        first = f"{first} {sentence}"
    return first


_WORDS = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "object": object,
          "Literal": Literal}


@functools.cache
def _annotation(text: str) -> Any:
    """The type that an annotation's text stands for. Walked, never evaluated: manifests come from third parties."""

    def walk(node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name) if name in _WORDS:
                return _WORDS[name]
            case ast.Constant(value=value):
                return value
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return walk(left) | walk(right)
            case ast.Subscript(value=base, slice=ast.Tuple(elts=items)):
                return walk(base)[tuple(walk(item) for item in items)]
            case ast.Subscript(value=base, slice=item):
                return walk(base)[walk(item)]
        raise ConfigError("an option is declared with an unsupported type", code="option-type-unsupported", got=text,
                          fix=f"build the type from {', '.join(_WORDS)}, None and |")

    return walk(ast.parse(text, mode="eval").body)


@functools.cache
def _adapter(text: str) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_annotation(text), config={"allow_inf_nan": False})  # what is to be off has a word for it


def _left_over(option: Option, value: str, origin: Origin) -> None:
    """
    Raises:
        ConfigError: text that a shell has left empty, or that it would have replaced and has not.
    """
    what = None if option.default == value or "dict" in option.type else "is empty" if not value.strip() else (
        f"contains {variable[0]}, which is not expanded" if (variable := _VARIABLE.search(value)) else
        "starts with ~, which is not expanded" if re.match(r"~\w*(/|$)", value) else None)
    if what is not None:
        raise ConfigError(f"{option.key} {what}", got=repr(value), who=str(origin), fix="write the value itself, or "
                          "remove the option; only a shell expands $NAME and a leading ~", code="option-not-expanded")


_VARIABLE = re.compile(r"\$(\{\w+\}|[A-Za-z_]\w*)")


def convert(option: Option, value: object, origin: Origin) -> object:
    """The typed value of an option, from a run file's value or a command line's text.

    Raises:
        ConfigError: the value does not fit the declared type.
    """
    from pydantic import ValidationError

    if origin.kind == "flag" and isinstance(value, str) and "dict" in option.type:
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{option.key} should be JSON", code="option-not-json", got=value, who=str(origin),
                              fix=str(error)) from None
    if isinstance(value, str) and value.lower() == "none" and "None" in option.type and "none" not in option.choices:
        return None
    if isinstance(value, str):
        _left_over(option, value, origin)
    try:
        if isinstance(value, bool) and "bool" not in option.type:
            raise ValueError("a truth value")
        if (made := _adapter(option.type).validate_python(value)) != made:
            raise ValueError("a number")
    except (ValidationError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else f"not {error}"
        if option.is_list and isinstance(value, str):
            reason = f"write [{json.dumps(value)}]"
        wanted = f"one of {', '.join(map(str, option.choices))}" if option.choices else option.type
        raise ConfigError(f"{option.key} should be {wanted}", code="option-wrong-type", got=repr(value),
                          who=str(origin), fix=reason) from None
    _bounded(option, made, origin)
    return made


def _bounded(option: Option, value: object, origin: Origin) -> None:
    """
    Raises:
        ConfigError: a number beyond what its option can mean.
    """
    if not option.within or not isinstance(value, int | float):
        return
    least, most = (*option.within, math.inf)[:2]
    if not least <= value <= most:
        above, spare = f" and at most {most}" * (most < math.inf), ", write none" * ("None" in option.type)
        raise ConfigError(f"{option.key} should be at least {least}{above}", code="option-out-of-range", got=value,
                          who=f"{option.key} ({origin})", fix=f"correct it{spare}, or remove it for the default")
