"""Keys that are handed on: `--sglang-*` to SGLang's server, `--router-*` to its router.

Both are checked against the installed package (surface.py). In a run file both stand in [sglang]: a field of ServerArgs
under its own name, an argument of the router as `router_NAME`. In the plan they are server.NAME and router.NAME. The
options of [sglang] itself come first.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping

from miles_core.config import surfaces
from miles_core.config.flags import Assignment, Given, value_of
from miles_core.config.options import Option, Origin, convert, options_of
from miles_core.errors import ConfigError, UnknownKeyError
from miles_sglang import surface
from miles_sglang.plugin import SglangOptions
from miles_sglang.surface import Field, Surface

PREFIXES = {"server": "sglang", "router": "router"}
"""Table of the plan -> what its flags begin with."""

PLACED = "--placement decides where servers run and what they listen on: leave it out"
SPANNED = "it follows from --rollout-num-gpus-per-engine and --num-gpus-per-node: leave it out"
TRUSTED = "requests travel inside the run, which sends no key: leave it out, and keep the network closed"
PHASES = "this version of Miles has no servers that only prefill or only decode: leave it out"
OWNED: Mapping[str, Mapping[str, str]] = {
    "server": {
        "model_path": "the servers serve --hf-checkpoint: write that",
        **dict.fromkeys(("host", "port", "base_gpu_id", "gpu_id_step", "nccl_port", "use_ray"), PLACED),
        **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), SPANNED),
        "random_seed": "the servers' seeds are --rollout-seed and the engine's number: write that",
        "custom_weight_loader": "the servers load weights with Miles's own loader, which verifies them: leave it out",
        "enable_memory_saver": "it follows from --offload-rollout: write that",
        "weight_version": "the weight sync counts versions: leave it out",
        **dict.fromkeys(("api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs",
                         "ssl_keyfile_password", "enable_ssl_refresh"), TRUSTED),
        **dict.fromkeys(("disaggregation_mode", "encoder_only", "language_only"), PHASES),
        **dict.fromkeys(("smg_grpc_mode", "grpc_mode"), "Miles speaks HTTP with the servers: leave it out"),
    },
    "router": {
        "host": "--placement decides where the router runs: leave it out",
        "port": "write --sglang-router-port",
        "worker_urls": "Miles tells the router which servers there are: leave it out",
        **dict.fromkeys(("api_key", "tls_cert_path", "tls_key_path"), TRUSTED),
        **dict.fromkeys(("pd_disaggregation", "epd_disaggregation"), PHASES),
    },
}
"""Fields that Miles sets itself, and what to write instead."""

SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def surface_of(table: str) -> Surface:
    """What a table's keys are checked against."""
    return surface.server() if table == "server" else surface.router()


def from_flag(one: Given) -> list[Assignment]:
    """The assignment that a --sglang-* or --router-* flag makes.

    Raises:
        UnknownKeyError: the program has no such argument, or Miles sets it itself; says what to write.
        ConfigError: too many or too few words after it.
    """
    prefix, _, name = one.flag.removeprefix("--no-").lstrip("-").partition("-")
    table = next(table for table, begin in PREFIXES.items() if begin == prefix)
    known, origin = surface_of(table), Origin("flag", one.flag)
    if f"--{name}" in known.old:
        field, value = known.old[f"--{name}"]
        return [Assignment(f"{table}.{field}", value, origin)]
    off = one.flag.startswith("--no-")
    if name.startswith("no-") and f"--{name}" not in known.spellings():
        name, off = name[3:], True
    option = _field(table, f"--{name}", origin).option(table)
    if off and not option.is_bool:
        raise UnknownKeyError(f"unknown flag {one.flag}", code="sglang-flag-unknown",
                              fix=f"write --{prefix}-{name} VALUE")
    return [Assignment(option.key, value_of(one, option, off), origin)]


def typed(one: Assignment) -> tuple[str, object]:
    """Key and typed value of an assignment to server.NAME, router.NAME, or sglang.NAME where that is no own option.

    Raises:
        UnknownKeyError: the program has no such argument, or Miles sets it itself.
        ConfigError: the value does not fit, or no flag of the program can say it.
    """
    table, _, name = one.key.partition(".")
    if table == "sglang":
        table = "router" if name.startswith("router_") else "server"
        name = name.removeprefix("router_") if table == "router" else name
    field = _field(table, "--" + name.replace("_", "-"), one.origin)
    option = field.option(table)
    value = convert(option, _read(one.value, field, option, one.origin), one.origin)
    if value is False and field.form == "switch" and field.default is not False:
        raise ConfigError(f"{option.key} can only be switched on", code="sglang-switch-only", who=str(one.origin),
                          fix="leave it out")
    return option.key, value


def words(table: str, values: Mapping[str, object]) -> list[str]:
    """The words of a command line that say `values`; what is None is left out."""
    fields, argv = surface_of(table).fields, []
    for name, value in values.items():
        if value is not None:
            argv += _words(fields[name], value)
    return argv


def _words(field: Field, value: object) -> list[str]:
    match field.form:
        case "json":
            return [field.flag, json.dumps(value)]
        case "switch":
            return [field.flag] if value else []
        case "pair":
            return [field.flag if value else f"--no-{field.flag[2:]}"]
        case "repeat":
            return [word for item in value for word in (field.flag, str(item))]
    return [field.flag, *map(str, value)] if isinstance(value, list) else [field.flag, str(value)]


def _field(table: str, flag: str, origin: Origin) -> Field:
    """The field of a flag of the program, unless it is Miles that sets it."""
    known, as_flag = surface_of(table), origin.kind == "flag"
    spellings = known.spellings()
    name = flag[2:].replace("-", "_")
    field = known.fields.get(spellings.get(flag, name))
    shown = _shown(table, flag, as_flag)
    if field is None:
        bare = {one[2:]: _shown(table, one, as_flag) for one in (*spellings, *known.old)}
        for option in options_of("sglang", SglangOptions).values():
            dashed = option.name.replace("_", "-")
            bare[dashed] = [f"--{dashed}", *option.flags][-1] if as_flag else option.name
        near = difflib.get_close_matches(flag[2:], bare, 1, 0.6)
        what = f"unknown flag {shown}" if as_flag else f"[sglang] has no key {shown!r}"
        raise UnknownKeyError(f"{what}; checked against {known}", code="sglang-name-unknown",
                              who=None if as_flag else str(origin),
                              fix=f"did you mean {bare[near[0]]}?" if near else "`miles flags` lists what there is")
    if (reason := OWNED[table].get(field.name)) is not None:
        raise UnknownKeyError(f"{shown} does not apply here", code="sglang-flag-not-applicable", who=str(origin),
                              fix=reason)
    return field


def _shown(table: str, flag: str, as_flag: bool) -> str:
    """A flag of the program as a flag or a key of a run file spells it."""
    if as_flag:
        return f"--{PREFIXES[table]}-{flag[2:]}"
    return ("router_" if table == "router" else "") + flag[2:].replace("-", "_")


def _read(value: object, field: Field, option: Option, origin: Origin) -> object:
    """What the program's own parsers would make of a word: JSON, 32k or 32Ki for a number, a choice of numbers."""
    if field.form == "json" and option.is_list and origin.kind == "flag":
        try:
            return json.loads(" ".join(map(str, value)))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{option.key} takes JSON", code="sglang-option-not-json", got=value, who=str(origin),
                              fix=str(error)) from None
    if isinstance(value, str) and option.choices:
        return next((choice for choice in option.choices if str(choice) == value), value)
    short = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|k|M|G)", value) if isinstance(value, str) else None
    return int(float(short[1]) * SUFFIXES[short[2]]) if short and field.type.startswith("int") else value


SERVED = """\
Arguments of {title} {version} that this table takes as well; the flag is `--{prefix}-` and the name{key}.
They are checked against the installed version, or against this list where none is installed; what Miles sets itself is
not in it.
"""


class ServerArguments(surfaces.Surface):
    """The arguments of SGLang's server and of its router as a surface (miles_core/config/surfaces.py)."""

    tables: tuple[str, ...] = ("sglang",)
    stored: tuple[str, ...] = ("server", "router")

    def from_flag(self, flag: Given, notes: list[str]) -> list[Assignment] | None:
        """See Surface."""
        prefixes = tuple(f"{prefix}-" for prefix in PREFIXES.values())
        return from_flag(flag) if flag.flag.removeprefix("--no-").lstrip("-").startswith(prefixes) else None

    def typed(self, assignment: Assignment) -> tuple[str, object] | None:
        """See Surface."""
        return typed(assignment)

    def suggest(self, flag: str) -> Iterable[tuple[float, str]]:
        """See Surface: the server's own spelling of one of its flags."""
        return [(1.0, f"--sglang-{flag[2:]}")] if flag in surface_of("server").spellings() else []

    def complete(self, prefix: str) -> Iterable[tuple[str, str]]:
        """See Surface."""
        for table, begin in PREFIXES.items():
            known = surface_of(table).fields.values() if prefix.startswith(f"--{begin}-") else ()
            for field in known:
                flag = f"--{begin}-{field.flag[2:]}"
                if flag.startswith(prefix):
                    yield flag, field.help or f"An argument of {surface_of(table)}."

    def page(self, table: str) -> Iterable[str | Option]:
        """See Surface."""
        return [*_served("server", "sglang"), *_served("router", "smg")]


def _served(table: str, package: str) -> list[str | Option]:
    """Arguments of SGLang or its router, of the bundled list: the page does not depend on what is installed."""
    known, title = surface.bundled(package), surface.TITLES[package]
    key = ", the key `router_` and the name" if table == "router" else ""
    return [f"### {title}'s arguments in [sglang]", "",
            SERVED.format(title=title, version=known.version, prefix=PREFIXES[table], key=key),
            *(field.option(table) for field in known.fields.values() if field.name not in OWNED[table])]
