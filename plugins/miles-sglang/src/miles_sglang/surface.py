"""The arguments of the installed SGLang server and router, read from their source without importing it.

`ServerArgs` and the router's `add_cli_args` are plain source; reading them costs 0.07 s, once per version, and the
result is kept (miles_megatron/cache.py). Where a package is not installed in this Python, the bundled list of one known
version (server_args.toml) stands in, and whoever checks against it says so.

Types are texts of option types (config/options.py): "int", "bool | None", "Literal['a', 'b']", "list[str] | None" ...
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from miles_megatron import cache

from miles_core.config.options import Option

# Raised when the shape or the meaning of the cached JSON changes, so that an older file is not read.
SCHEMA = 1

BUNDLED = Path(__file__).with_name("server_args.toml")
SOURCES = {"sglang": "srt/server_args.py", "smg": "router_args.py", "sglang_router": "router_args.py"}
"""Package -> the file that declares its arguments."""
TITLES = {"sglang": "SGLang", "smg": "smg", "sglang_router": "sglang-router"}


@dataclass(frozen=True, slots=True)
class Field:
    """One argument of a server or a router.

    Args:
        name: the field of ServerArgs, or the router's flag as an identifier.
        type: text of an option's type, with its choices where the source names them.
        default: as plain data.
        flag: as the program itself spells it, such as "--tp-size".
        form: how a value is written after the flag: as words; as one word of JSON; a flag alone that only switches on;
            a flag and its --no-; a flag repeated for every item.
        also: further spellings, older ones included.
        help: the first sentences of the program's own help; not in the bundled list.
    """

    name: str
    type: str
    default: object
    flag: str
    form: Literal["words", "json", "switch", "pair", "repeat"] = "words"
    also: tuple[str, ...] = ()
    help: str = ""

    def option(self, table: str) -> Option:
        """The field as an option of a table."""
        return Option(table, self.name, self.type, self.default, self.help)


@dataclass(frozen=True, slots=True)
class Surface:
    """Every argument of one program.

    Args:
        old: flags of earlier versions that stand for one value of a field: flag -> (field, value).
        installed: False for the bundled list.
    """

    package: str
    version: str
    fields: Mapping[str, Field]
    old: Mapping[str, tuple[str, object]]
    installed: bool

    def __str__(self) -> str:
        return f"{TITLES[self.package]} {self.version}" + ("" if self.installed else ", which is not installed here")

    def spellings(self) -> dict[str, str]:
        """Every flag of the program -> the field that it sets."""
        return {flag: field.name for field in self.fields.values() for flag in (field.flag, *field.also)}


def server() -> Surface:
    """The fields of SGLang's ServerArgs."""
    return surface("sglang")


def router(package: str | None = None) -> Surface:
    """The arguments of a router: of the package, else of the one that is installed, smg first."""
    package = package or next((name for name in ("smg", "sglang_router") if folder_of(name)), "smg")
    return surface(package if package == "smg" or folder_of(package) else "smg")


def surface(package: str) -> Surface:
    """The arguments of "sglang", "smg" or "sglang_router", of the bundled version where it is not installed."""
    folder = folder_of(package)
    return bundled(package) if folder is None else _installed(package, folder)


@functools.cache
def folder_of(package: str) -> Path | None:
    """Where a top-level package lies; finding it runs none of its code."""
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or ()) if spec else ()
    return next((Path(place) for place in places if (Path(place) / SOURCES[package]).is_file()), None)


def version_of(folder: Path) -> str:
    """The version of the distribution that a package in site-packages is from."""
    name = folder.name.replace("_", "-")
    distributions = importlib.metadata.Distribution.discover(name=name, path=[str(folder.parent)])
    return next((one.version for one in distributions), "of unknown version")


@functools.cache
def _installed(package: str, folder: Path) -> Surface:
    version, file = version_of(folder), folder / SOURCES[package]
    stamp = cache.stamp([file, Path(__file__).with_name("source.py")])
    data = cache.cached(f"{package}-surface-{version}-{SCHEMA}", stamp, lambda: read(package, folder))
    return _decode(package, version, data["fields"], data["old"], True)


def read(package: str, folder: Path) -> dict:
    """What the source says, as plain data: {"fields": {name: Field as a dict}, "old": {flag: [field, value]}}."""
    # Only now: a warm start has no use for the reader.
    from miles_sglang import source

    fields, old = (source.server_args if package == "sglang" else source.router_args)(folder / SOURCES[package])
    return {"fields": {name: asdict(field) for name, field in fields.items()}, "old": old}


@functools.cache
def bundled(package: str) -> Surface:
    """The arguments of the one version that Miles carries a list of."""
    data = _lists()[package]
    fields = {name: {"name": name, **usual(name, entry["type"]), **entry} for name, entry in data["fields"].items()}
    return _decode(package, data["version"], fields, data.get("old", {}), False)


@functools.cache
def _lists() -> dict[str, dict]:
    """Parsed once: that takes as long as all other tables of a plan together."""
    with BUNDLED.open("rb") as file:
        return tomllib.load(file)


def usual(name: str, kind: str) -> dict[str, object]:
    """What the bundled list leaves out of a field, because most fields of that type have it."""
    switch = {"default": False, "form": "switch"} if kind == "bool" else {"default": None, "form": "words"}
    return {"flag": "--" + name.replace("_", "-"), "also": (), **switch}


def _decode(package: str, version: str, fields: dict, old: dict, installed: bool) -> Surface:
    made = {name: Field(**{**entry, "also": tuple(entry.get("also", ()))}) for name, entry in fields.items()}
    return Surface(package, version, made, {flag: tuple(pair) for flag, pair in old.items()}, installed)
