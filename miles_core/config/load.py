"""Load: run file + flags + plugin options -> one typed RunConfig that knows who set what."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.config import flags
from miles_core.config.flags import Assignment, Given, Spellings
from miles_core.config.options import Option, Origin, convert, options_of
from miles_core.config.surfaces import Surface, advice, surfaces_of
from miles_core.config.tables import TABLES, RunConfig
from miles_core.errors import ConfigError, OwnerError, UnknownKeyError, did_you_mean
from miles_core.plugins import presets, resolve, select
from miles_core.plugins.scan import KNOWN, installed
from miles_core.plugins.select import Selected
from miles_core.reading import parse_json


@dataclass(slots=True)
class Loaded:
    """What a run is made of.

    Args:
        selected: the plugins that take part, in order, the built-in ones first.
        notes: announcements, such as a flag that is not needed.
        assigned: key -> (value, origin) of everything that sets it; the last one counts.
    """

    config: RunConfig
    selected: list[Selected]
    notes: list[str] = field(default_factory=list)
    assigned: dict[str, list[tuple[object, Origin]]] = field(default_factory=dict)


def load(run_file: Path | None, argv: Sequence[str] = ()) -> Loaded:
    """Read a run file and flags; flags win over the file, the file over defaults.

    Args:
        run_file: TOML; ./miles.toml is read when None and present.
        argv: the flags as typed, without the run file.

    Raises:
        ConfigError, UnknownKeyError: names the key or flag, where it stands, and the fix.
        PluginError: a plugin that is not there or cannot be read.
    """
    path, document, lines = _read(run_file)
    cli_flags = flags.split(argv)
    chosen = presets.find(_named("preset", document, lines, path, cli_flags))
    named, gone = _enabled(chosen, _named("plugin", document, lines, path, cli_flags), cli_flags)
    cli_flags = [one for one in cli_flags if one.flag not in flags.NAMING]

    selected = select.select(named, select.built_in())
    selected = select.select(_by_flags(cli_flags, selected), selected)
    from_file = [*(Assignment(key, value, Origin("preset", one.origin)) for one in chosen
                   for key, value in one.values.items() if key.partition(".")[0] not in gone),
                 *_assignments(document, path, lines)]
    # Named parts may bring plugins of their own (--rm-type math), whose flags are only known then: look twice.
    first = _build(from_file, cli_flags, selected, named, path, lenient=True)
    selected = select.select(resolve.missing(selected, first.config), selected)
    selected = select.select(resolve.called_for(selected, first.config, None), selected)
    loaded = _build(from_file, cli_flags, selected, named, path, lenient=False)
    if more := resolve.called_for(selected, loaded.config, quantised(loaded.config)):  # with Megatron's flags read
        selected = select.select(more, selected)
        loaded = _build(from_file, cli_flags, selected, named, path, lenient=False)
    if loaded.config.algorithm.policy_loss is None:
        name, reason = resolve.policy_loss(selected, loaded.config)
        loaded.config = with_values(loaded.config, reason, algorithm__policy_loss=name)
    return loaded


def plugins_named(run_file: Path | None, argv: Sequence[str] = ()) -> list[Selected]:
    """The plugins that a run file and flags name, themselves or by presets, and no other.

    Raises:
        PluginError, ConfigError: one is not there or cannot be read, or so the run file.
    """
    path, document, lines = _read(run_file)
    cli_flags = flags.split(argv)
    chosen = presets.find(_named("preset", document, lines, path, cli_flags))
    return select.select(_enabled(chosen, _named("plugin", document, lines, path, cli_flags), cli_flags)[0], ())


def _enabled(chosen: Sequence[presets.Preset], mine: Sequence[tuple[str, str]],
             cli_flags: Sequence[Given]) -> tuple[list[tuple[str, str]], set[str]]:
    """(plugin, who wrote it) of presets and of the run's own list, less what --no-plugin takes out; what that is.

    Raises:
        ConfigError: a flag names nothing.
    """
    if bare := next((one.flag for one in cli_flags if one.flag in flags.NAMING and not one.words), None):
        raise ConfigError(f"{bare} needs a name", code="flag-needs-name", got="none", fix=f"write {bare} NAME")
    theirs = {plugin: one.origin for one in chosen for plugin in one.plugins}
    twice = {select.short(text) for text, _ in mine}
    named = [(plugin, origin) for plugin, origin in theirs.items() if select.short(plugin) not in twice] + list(mine)
    dropped = [(word, one.flag) for one in cli_flags if one.flag == "--no-plugin" for word in one.words]
    return select.without(named, dropped), {select.short(text) for text, _ in dropped}


def _by_flags(cli_flags: Sequence[Given], selected: Sequence[Selected]) -> list[tuple[str, str]]:
    """(official plugin, flag) for flags that are a plugin's by a surface: --use-tis says tis as clearly as --plugin."""
    have, spellings = {one.manifest.name for one in selected}, _spellings(declared(selected))
    enabled: dict[str, str] = {}
    for one in cli_flags:
        for surface in surfaces_of(selected) if one.flag not in spellings else ():
            if (name := surface.plugin(one.flag)) is not None and name not in have:
                enabled.setdefault(name, one.flag)
    return list(enabled.items())


def declared(selected: Sequence[Selected]) -> dict[str, dict[str, Option]]:
    """Table -> its options: the core's, then those of plugins, which may have none.

    Raises:
        OwnerError: a plugin has options and the name of a table of the core.
    """
    core = {name: options_of(name, kind) for name, kind in TABLES.items()}
    plugins = {one.manifest.name: dict(one.manifest.options) for one in selected
               if one.manifest.options or one.manifest.name not in core}
    if clash := sorted(set(core) & set(plugins)):
        raise OwnerError(f"a plugin cannot be called {clash[0]!r}: [{clash[0]}] is a table of the core",
                         code="plugin-option-table-reserved", fix="rename the plugin")
    return {**core, **plugins}


def _spellings(tables: Mapping[str, Mapping[str, Option]]) -> Spellings:
    return flags.owners(option for table in tables.values() for option in table.values())


def _build(from_file: Sequence[Assignment], cli_flags: Sequence[Given], selected: list[Selected],
           named: Sequence[tuple[str, str]], path: Path | None, *, lenient: bool) -> Loaded:
    tables = declared(selected)
    plugins, spellings = [name for name in tables if name not in TABLES], _spellings(tables)
    absent, surfaces = _absent(plugins), surfaces_of(selected)
    if lenient:
        cli_flags = [one for one in cli_flags if one.flag in spellings]
        from_file = [one for one in from_file if one.key.partition(".")[0] in TABLES]
    made, notes = flags.assign(cli_flags, spellings, absent, surfaces)
    assigned: dict[str, list[tuple[object, Origin]]] = {}
    for one in (*from_file, *made):
        key, value = _typed(one, tables, absent, surfaces)
        if value == [] and one.origin.kind == "flag" and key not in assigned:
            raise ConfigError(f"{one.origin} needs at least one value", code="option-needs-values", got="none",
                              fix="list the values, or remove the flag")
        assigned.setdefault(key, []).append((value, one.origin))
    for one in _implied(selected, tables, lenient, assigned):
        key, value = _typed(one, tables, absent, surfaces)
        if key in assigned and assigned[key][-1][0] != value:
            notes.append(_outvoted(key, value, one.origin, *assigned[key][-1]))
        assigned.setdefault(key, []).insert(0, (value, one.origin))
    values = {key: history[-1][0] for key, history in assigned.items()}
    config = RunConfig(
        **{name: kind(**_of(values, name)) for name, kind in TABLES.items()},
        plugins=tuple(text for text, _ in named),
        options={name: _of(values, name) for name in plugins},
        surfaces={table: _of(values, table) for surface in surfaces for table in surface.stored},
        origin={key: history[-1][1] for key, history in assigned.items()}, name=path.stem if path else "run",
        stated={f"{hook}:{name}": tuple(words) for one in selected for hook, name, *words in
                (word.split(":") for word in one.manifest.provides
                 if word.startswith(("engine:", "generate:", "model_spec:", "trainer:", "weight_sync:")))})
    return Loaded(_with_model_name(config), selected, notes, assigned)


def _implied(selected: Sequence[Selected], tables: Mapping[str, object], lenient: bool,
             assigned: Mapping[str, object]) -> list[Assignment]:
    """What plugins' manifests give the run; the run file and flags have the last word.

    A plugin that nobody has named gives less: for the checkpoint's sake nothing, for an option's sake what is not said.
    """
    implied = []
    for one in selected:
        if one.origin.startswith(resolve.OF_CHECKPOINT):
            continue
        called = one.origin.startswith(resolve.OPTIONS)
        origin = Origin("plugin", f"plugin {one.manifest.name}")
        implied += [Assignment(key, value, origin) for key, value in one.manifest.implies.items()
                  if (not lenient or key.partition(".")[0] in tables) and not (called and key in assigned)]
    return implied


def _outvoted(key: str, implied: object, by: Origin, value: object, origin: Origin) -> str:
    """What to announce of a value that a plugin implies and the run does not have.

    Raises:
        OwnerError: two plugins want two values of one key, and nobody has said which.
    """
    if origin.kind == "plugin":
        raise OwnerError(f"{origin} and {by} set {key} to different values", code="settings-conflict",
                         got=f"{value!r} and {implied!r}", fix="set it in the run file, or enable only one of them")
    return f"{key} = {value!r} ({origin}) in place of the {implied!r} that {by} would have it be"


def config_json(config: RunConfig) -> tuple[Path, Mapping[str, object] | None]:
    """Where the config.json of --hf-checkpoint lies, and what it says; of a text_config inside, what it leaves open.

    None where it is missing or cannot be read: no error here, for the start says so, with all that is wrong with it.
    """
    path = Path(config.checkpoint.hf_checkpoint or "") / "config.json"
    try:
        constants = parse_json(path.read_text(encoding="utf-8"))
        return path, {**(constants.get("text_config") or {}), **constants}
    except (OSError, ValueError, AttributeError, TypeError):
        return path, None


def shape_json(config: RunConfig) -> tuple[Path, dict | None]:
    """config.json under the names that most families have, by what the family's plugin states of it: `KEY=OTHER`, it
    calls KEY so, and `KEY=8`, what it has where config.json leaves KEY out."""
    path, constants = config_json(config)
    stated = [word.partition("=") for word in config.stated.get(f"model_spec:{config.model.model_name}", ())]
    default = {key: int(word) for key, _, word in stated if word.isdecimal()}
    return path, constants and {**default, **constants, **{
        key: constants[word] for key, _, word in stated if word in constants}}


def vocabulary_of(config: RunConfig) -> int | None:
    """What every token id is below; None where config.json does not say."""
    return (shape_json(config)[1] or {}).get("vocab_size")


def quantised(config: RunConfig) -> str | None:
    """What config.json of --hf-checkpoint says its weights are quantised by; None for plain ones."""
    constants = config_json(config)[1] or {}
    quantization = constants.get("quantization_config") or constants.get("compression_config")
    return str(quantization.get("quant_method", "quantised")) if isinstance(quantization, Mapping) else None


def _with_model_name(config: RunConfig) -> RunConfig:
    """The architecture that config.json names, so that its plugin is known; a script may leave its underscores out."""
    path, constants = config_json(config)
    name = (constants or {}).get("model_type")
    if not isinstance(name, str) or config.model.model_name not in (None, name.replace("_", "")):
        return config
    return with_values(config, str(path), model__model_name=name)


def _of(values: Mapping[str, object], table: str) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.partition(".")[0] == table}


def _typed(one: Assignment, tables: Mapping[str, Mapping[str, Option]],
           absent: Mapping[str, str], surfaces: Sequence[Surface]) -> tuple[str, object]:
    table, _, name = one.key.partition(".")
    if name in tables.get(table, {}):
        return one.key, convert(tables[table][name], one.value, one.origin)
    for surface in surfaces:
        mine = table in surface.tables or table in surface.stored and one.origin.kind != "file"
        if mine and (typed := surface.typed(one)) is not None:
            return typed
    if table not in tables:
        if table in absent:
            raise UnknownKeyError(f"the table [{table}] belongs to a plugin that is not enabled", who=str(one.origin),
                                  fix=absent[table], code="table-of-disabled-plugin")
        near = difflib.get_close_matches(table, tables, 1)
        fix = f"did you mean [{near[0]}]?" if near else f"tables are {', '.join(TABLES)} and plugins"
        raise UnknownKeyError(f"unknown table [{table}]", code="table-unknown", who=str(one.origin), fix=fix)
    home = [t for t, options in tables.items() if name in options]
    fix = f"it belongs in [{home[0]}]" if home else (
        advice(surfaces, name.replace("_", "-")) or did_you_mean(name, tables[table])
        or f"see `miles run --help` for the keys of [{table}]")
    raise UnknownKeyError(f"[{table}] has no key {name!r}", code="key-unknown", who=str(one.origin), fix=fix)


def _absent(enabled: Sequence[str]) -> dict[str, str]:
    """Plugins that could be meant but are not enabled -> what to write."""
    have = {one.name for one in installed()}
    names = {*KNOWN, *have} - set(enabled)
    return {name: f"add --plugin {name}" + ("" if name in have else f" (pip install miles-{name})") for name in names}


def _named(what: str, document: Mapping[str, object], lines: Mapping[str, int], path: Path | None,
           cli_flags: Sequence[Given]) -> list[tuple[str, str]]:
    """(name, who wrote it) of the plugins or presets that the run file lists and flags add."""
    key = f"{what}s"
    named = document.get(key, [])
    if not isinstance(named, list) or not all(isinstance(item, str) for item in named):
        raise ConfigError(f"{key} should be a list of names", got=repr(named), who=str(path),
                          fix='write plugins = ["grpo", "math"]', code="plugin-list-malformed")
    # A file plugin is meant relative to the run file that names it, wherever the run is started.
    names = [str(path.parent / item) if item.startswith((".", "/")) and path else item for item in named]
    flagged = [(word, f"--{what}") for one in cli_flags if one.flag == f"--{what}" for word in one.words]
    return [(text, f"{path.name}:{lines.get(key, 1)}") for text in names] + flagged


def _assignments(document: Mapping[str, object], path: Path | None, lines: Mapping[str, int]):
    for table, content in document.items():
        if table in ("plugins", "presets"):
            continue
        where = f"{path.name}:{lines.get(table, 1)}"
        if not isinstance(content, Mapping):
            fix = (f"write [{table}] in place of [[{table}]]" if table in TABLES else "did you mean plugins?"
                   if table == "plugin" else "move it into its table; only `plugins` and `presets` stand at the top")
            raise UnknownKeyError(f"the key {table!r} is outside any table", code="key-outside-table", who=where,
                                  fix=fix)
        for key, value in content.items():
            spot = Origin("file", f"{path.name}:{lines.get(f'{table}.{key}', lines.get(table, 1))}")
            yield Assignment(f"{table}.{key.replace('-', '_')}", value, spot)


def _read(path: Path | None) -> tuple[Path | None, dict, dict[str, int]]:
    """The run file, ./miles.toml where none is named, parsed, and the line of each key."""
    path = path or (Path("miles.toml") if Path("miles.toml").is_file() else None)
    if path is None:
        return None, {}, {}
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError("the run file does not exist", code="run-file-missing", who=str(path), fix=did_you_mean(
            str(path), map(str, path.parent.glob("*.toml"))) or "check the path; options are --KEY VALUE") from None
    except OSError as error:
        raise ConfigError("the run file cannot be read", code="run-file-unreadable", got=error.strerror, who=str(path),
                          fix="name a .toml file that you may read") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("the run file is not valid TOML", code="run-file-not-toml", got=str(error), who=str(path),
                          fix="write it in UTF-8" if isinstance(error, UnicodeError) else "correct that line") from None
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            table = header[1].strip('"')
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([A-Za-z0-9_\-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return path, document, lines


def with_values(config: RunConfig, origin: str, **values: object) -> RunConfig:
    """A copy with derived values, "table__key"=value, also of a plugin's table; what somebody set keeps its origin."""
    changed: dict[str, dict[str, object]] = {}
    origins = dict(config.origin)
    for name, value in values.items():
        table, _, key = name.partition("__")
        changed.setdefault(table, {})[key] = value
        origins.setdefault(f"{table}.{key}", Origin("derived", origin))
    options = {name: {**config.options.get(name, {}), **new} for name, new in changed.items() if name not in TABLES}
    tables = {name: dataclasses.replace(getattr(config, name), **changed[name]) for name in changed.keys() - options}
    return dataclasses.replace(config, **tables, options={**config.options, **options}, origin=origins)


def who(config: RunConfig, *keys: str) -> str:
    """Each dotted key with who set it, for messages."""
    return ", ".join(f"{key} ({config.origin.get(key, 'default')})" for key in keys)
