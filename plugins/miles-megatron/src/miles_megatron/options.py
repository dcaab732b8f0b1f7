"""The options of Megatron-core and Megatron-LM as a surface (miles_core/config/surfaces.py)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from miles_core.config.flags import Assignment, alone, needless, words_of
from miles_core.config.options import REQUIRED, Option, Origin, convert
from miles_core.config.surfaces import Surface, alike
from miles_core.errors import ConfigError, UnknownKeyError
from miles_megatron import flags
from miles_megatron.flags import OWN, Flag
from miles_megatron.surface import SurfaceField, surface, version

if TYPE_CHECKING:
    from miles_core.config.flags import Given

FIELDS = """\
Fields of Megatron-core {version} that this table takes as well, read from its source; their flags are spelled alike
(`--{example}`).
"""

MEGATRON_LM = """\
What becomes of every flag of {repository} {tag}. A flag that is accepted sets the field beside it; one that is derived
is not needed and changes nothing, which is announced; one that is refused ends the command with this text.
"""


class MegatronOptions(Surface):
    """Fields of the installed Megatron-core, and Megatron-LM's names for them."""

    tables: tuple[str, ...] = ("model", "perf", "optimizer")
    stored: tuple[str, ...] = ("megatron",)

    def from_flag(self, flag: Given, notes: list[str]) -> list[Assignment] | None:
        """See Surface."""
        meaning, origin = flags.lookup(flag.flag), Origin("flag", flag.flag)
        if meaning is None:
            return None
        if isinstance(meaning, SurfaceField):
            off = flag.flag == "--no-" + meaning.name.replace("_", "-")
            return [Assignment(f"megatron.{meaning.name}", False if off else words_of(flag), origin)]
        if meaning.status == "refused":
            raise UnknownKeyError(f"{flag.flag} does not apply here", code="megatron-flag-not-applicable",
                                  who="Megatron-LM's flag", fix=meaning.text)
        if meaning.status == "derived" or " ".join(flag.words) in meaning.values:
            return needless(flag, meaning.switch, meaning.values.get(" ".join(flag.words), meaning.text), notes)
        made = [Assignment(_key(key), value, origin) for key, value in (meaning.set or {}).items()]
        if meaning.key is None:
            alone(flag)
        else:
            made.append(Assignment(_key(meaning.key), words_of(flag), origin))
        return made

    def typed(self, assignment: Assignment) -> tuple[str, object] | None:
        """See Surface."""
        name, origin = assignment.key.partition(".")[2], assignment.origin
        meaning = flags.lookup("--" + name.replace("_", "-"))
        if isinstance(meaning, Flag) and meaning.status != "accepted" and origin.kind == "file":
            raise UnknownKeyError(f"the key {name!r} does not apply here", code="megatron-key-not-applicable",
                                  who=str(origin), fix=meaning.text)
        if (field := surface().get(name)) is None:
            return None
        kind, value = _type(field), assignment.value
        if kind.startswith("list") and not isinstance(value, list):
            value = [value]
        if kind.startswith("list[int]"):  # Megatron-LM's --window-size 128,0
            value = [one for each in value for one in (each.split(",") if isinstance(each, str) else [each])]
        if isinstance(value, str) and kind.startswith("int") and value.startswith(("[", "(")):
            try:
                value, kind = flags.layer_pattern(value), "list[int]"
            except ValueError as error:
                raise ConfigError(f"megatron.{name} should be a layer pattern", code="layer-pattern-malformed",
                                  got=str(error), who=str(origin), fix="write [0,1,1], or ([0]*3+[1]*45)") from None
        option = Option("megatron", name, kind, field.default, field.help)
        return option.key, convert(option, value, origin)

    def suggest(self, flag: str) -> Iterable[tuple[float, str]]:
        """See Surface."""
        listed = flags.megatron_lm_flags()
        accepted = [name for name, entry in listed.items() if entry.status == "accepted"]
        fields = ["--" + name.replace("_", "-") for name in surface()]
        return alike(flag, [*fields, *accepted], 0.7) or alike(flag, [*listed], 0.85)

    def complete(self, prefix: str) -> Iterable[tuple[str, str]]:
        """See Surface; there are many, so only once there is a letter to go by."""
        for field in surface().values() if len(prefix) > 2 else ():
            flag = "--" + field.name.replace("_", "-")
            if flag.startswith(prefix):
                yield flag, field.help or "A field of Megatron-core."

    def page(self, table: str) -> Iterable[str | Option]:
        """See Surface."""
        from miles_core.config.options import options_of
        from miles_core.config.tables import TABLES

        own = options_of(table, TABLES[table])
        fields = [field for field in flags.taken() if field.table == table and field.name not in own]
        example = fields[0].name.replace("_", "-")
        return [f"### Megatron-core's fields in [{table}]", "", FIELDS.format(version=version(), example=example),
                *(_option(field) for field in fields)]

    def appendix(self) -> Iterable[str | tuple[str, str, str]]:
        """See Surface."""
        yield from ("## Megatron-LM's flags", "", MEGATRON_LM.format(**flags.source()))
        for flag in flags.megatron_lm_flags().values():
            sets = [f"`{key.removeprefix(OWN)} = {json.dumps(value)}`" for key, value in (flag.set or {}).items()]
            sets += [f"`{flag.key.removeprefix(OWN)}`"] if flag.key else []
            yield flag.name, flag.status, flag.text or "sets " + ", ".join(sets)


def _key(name: str) -> str:
    """The dotted key of what a flag of Megatron-LM sets."""
    return name.removeprefix(OWN) if name.startswith(OWN) else f"megatron.{name}"


def _type(field: SurfaceField) -> str:
    """The type of a field as an option's type is written."""
    kind = {"dtype": "str"}.get(field.type.split(" | ")[0], field.type)
    if "choice[" not in kind:
        return kind
    words = kind[kind.index("[") + 1 : kind.index("]")].split("|")
    return f"Literal[{', '.join(map(repr, words))}]" + (" | None" if field.type.endswith("None") else "")


def _option(field: SurfaceField) -> Option:
    default = field.default if field.has_default else REQUIRED
    return Option("megatron", field.name, _type(field), default, field.help)
