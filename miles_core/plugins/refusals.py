"""What plugins say of runs that cannot be meant, checked by a plan without importing them.

A manifest's `refuses` are rules: {"when": {key: test, ...}, "what": sentence, "fix": sentence}. A run for which all
tests hold is refused. Keys are an option ("rollout.n_samples_per_prompt", "tis.use_tis"), a field of Megatron-core
("megatron.fp8"), SGLang's server or router, a size of the model ("architecture.experts") or a hook ("reward"), which
stands for the names chosen for it, or for the plugins that offer it where all do. A test is a value, or some of TESTS,
COMPARES and SAID: {"above": 2}, {"above": "optimizer.lr"}, {"outside": "(0, 1]"}. The core's rules: refusals.toml.

Words in `provides` are the shorter way to say what several plugins say alike:
    compares:NAME   the estimator NAME compares the answers to one prompt
    labels:NAME     the scorer NAME needs the row's label
    modules:NAME    functions that its options name may come from the package NAME, installed or not
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from miles_core import hookspecs
from miles_core.config.architecture import architecture_of
from miles_core.config.bounds import stated, within
from miles_core.config.check_paths import astray
from miles_core.config.check_rows import present
from miles_core.config.check_sampling import trains
from miles_core.config.load import who
from miles_core.config.tables import TABLES, RunConfig
from miles_core.errors import ConfigError, ManifestError
from miles_core.plugins.resolve import choices
from miles_core.plugins.scan import BUILT_IN, KNOWN
from miles_core.plugins.select import Selected


def _compiles(pattern: object) -> bool:
    try:
        return bool(re.compile(str(pattern)))
    except re.error:
        return False


TESTS: dict[str, Callable[[list, object], bool]] = {
    "not": lambda values, wanted: wanted not in values,
    "set": lambda values, wanted: bool(values) == wanted,
    "like": lambda values, wanted: any(re.fullmatch(str(wanted), str(value)) for value in values),
    "unlike": lambda values, wanted: not any(re.fullmatch(str(wanted), str(value)) for value in values),
    "unlisted": lambda values, wanted: not all(re.fullmatch(str(wanted), str(value)) for value in values),
    "outside": lambda values, wanted: not all(within(value, wanted) for value in values),
    "missing": lambda values, wanted: any(astray(str(value)) for value in values) == wanted,
    "malformed": lambda values, wanted: all(map(_compiles, values)) != wanted,
}
"""Name -> whether it holds of a key's values: none for one that is not set, several for a list."""
COMPARES: dict[str, Callable[[object, object], bool]] = {
    "above": operator.gt, "below": operator.lt, "from": operator.ge, "apart": operator.ne,
    "rest": lambda value, other: bool(other and value % other),
    "is": lambda value, other: str(value).rstrip("/") == str(other).rstrip("/"),
}
"""Further tests: with a number, or with the value of another key; where that is not set, none of them holds."""
SAID = "said"
"""And whether a run file, a preset or a flag gives the key a value."""


def check_statements(selected: Sequence[Selected], config: RunConfig) -> None:
    """
    Raises:
        ConfigError: by a plugin's statement the run cannot be meant.
        ManifestError: a statement that cannot be read.
    """
    if not config.debug.debug_train_only:
        _scored(selected, config)
    if trains(config):
        _compared(selected, config)
    for one in selected:
        own = one.manifest.name == "core"
        files = [file for file in stated() if own and all(
            _holds(one, key, test, selected, config) for key, test in file.get("given", {}).items())]
        for rule in (*one.manifest.refuses, *(rule for file in files for rule in file["refuses"])):
            if set(rule) != {"when", "what", "fix"} or not isinstance(rule["when"], Mapping) or not rule["when"]:
                raise _unreadable(one, rule, "it is {when = {...}, what = ..., fix = ...}")
            if all(_holds(one, key, test, selected, config) for key, test in rule["when"].items()):
                keys = [key for key in rule["when"] if "." in key and not key.startswith("architecture.")]
                values = _values(one, next(iter(rule["when"])), selected, config)
                raise ConfigError(rule["what"], got=", ".join(map(str, values)) or None,
                                  who=", ".join(filter(None, [who(config, *keys), "" if own else
                                                              f"plugin {one.manifest.name}"])),
                                  fix=rule["fix"])
    _functions(selected, config)


def _holds(one: Selected, key: str, test: object, selected: Sequence[Selected], config: RunConfig) -> bool:
    values = _values(one, key, selected, config)
    if not isinstance(test, Mapping):
        return test in values
    if unknown := set(test) - {*TESTS, *COMPARES, SAID}:
        raise _unreadable(one, key, f"tests are {', '.join([*TESTS, *COMPARES, SAID])}, not {unknown.pop()!r}")
    for name, wanted in test.items():
        if name == SAID:
            found = (key in config.origin and config.origin[key].kind in ("file", "preset", "flag")) == wanted
        elif name in COMPARES:
            bounds = _values(one, wanted, selected, config) if isinstance(wanted, str) else [wanted]
            found = any(COMPARES[name](value, bound) for value in values for bound in bounds)
        else:
            try:
                found = TESTS[name](values, wanted)
            except ValueError as error:  # of an interval
                raise _unreadable(one, key, str(error)) from None
        if not found:
            return False
    return True


def _values(one: Selected, key: str, selected: Sequence[Selected], config: RunConfig) -> list:
    table, dot, name = key.partition(".")
    if not dot:
        if key not in hookspecs.specs():
            raise _unreadable(one, key, "there is no such hook")
        if hookspecs.specs()[key].kind == "named":
            return [chosen for hook, chosen, _ in choices(config) if hook == key]
        return [other.manifest.name for other in selected for offer in other.manifest.offers if offer.hook == key]
    try:
        if table == "architecture":
            value = getattr(architecture_of(config), name)
        elif table in TABLES:
            value = getattr(getattr(config, table), name)
        elif table in ("megatron", "server", "router"):
            value = getattr(config, table).get(name)
        else:  # of a plugin, which may be another that is not enabled
            declared = next((o.manifest.options[name] for o in selected if o.manifest.name == table), None)
            value = declared and config.options.get(table, {}).get(name, declared.default)
    except (AttributeError, KeyError):
        raise _unreadable(one, key, "there is no such option") from None
    return value if isinstance(value, list) else [] if value is None else [value]


def _unreadable(one: Selected, what: object, why: str) -> ManifestError:
    return ManifestError(f"what plugin {one.manifest.name!r} refuses cannot be read", got=f"{what!r}: {why}",
                         who=one.manifest.plugin, fix="see miles_core/plugins/refusals.py")


def _scored(selected: Sequence[Selected], config: RunConfig) -> None:
    """Somebody scores what the core's generator makes, and has what it compares with."""
    rollout, official = config.rollout, {*BUILT_IN, *KNOWN}
    others = any(one.manifest.name not in official and offer.hook == "generate_response"
                 for one in selected for offer in one.manifest.offers)
    if not rollout.rm_type and rollout.generate == "single-turn" and (
            rollout.num_rollout != 0 and present(config) and not others):
        raise ConfigError("nobody scores the answers", who=who(config, "rollout.rm_type"),
                          fix="name a scorer with --rm-type: math compares with the row's --label-key")
    for name in rollout.rm_type:
        if rollout.label_key is None and rollout.prompt_source == "jsonl" and present(config) and any(
                f"labels:{name}" in one.manifest.provides for one in selected):
            raise ConfigError(f"the scorer {name!r} compares with labels, and none are read",
                              who=who(config, "rollout.rm_type", "rollout.label_key"),
                              fix="name the rows' key of the ground truth with --label-key")


def _functions(selected: Sequence[Selected], config: RunConfig) -> None:
    """Options of plugins that name a function as FILE.py:NAME: the file is Python, and the name is in it.

    Of MODULE.NAME, the module's package can be found.
    """
    for one in selected:
        for name, value in config.options.get(one.manifest.name, {}).items():
            found = re.fullmatch(r"(.+\.py):(\w+)", value) if isinstance(value, str) else None
            origin, here = f"--{name.replace('_', '-')} {value}", [".", *sys.path]
            dotted = re.fullmatch(r"(\w+)(\.\w+)*[.:]\w+", value) if isinstance(value, str) and not found else None
            if isinstance(value, str) and value.endswith(".py") and name.endswith("_path"):
                raise ConfigError("the file is named, and none of its functions", who=origin,
                                  fix=f"write {value}:FUNCTION")
            if dotted and name.endswith("_path") and not Path(value).exists() and f"modules:{dotted[1]}" not in (
                    one.manifest.provides) and not PathFinder.find_spec(dotted[1], here):
                raise ConfigError("the module of the function cannot be imported", got=f"no module {dotted[1]}",
                                  who=origin,
                                  fix="install it, name its folder in PYTHONPATH, or write ./file.py:function")
            if found is None:
                continue
            path = Path(found[1])
            if not path.is_file():
                raise ConfigError("the module of the function cannot be imported", got="no such file", who=origin,
                                  fix="write ./file.py:function, relative to the working directory")
            try:
                ast.parse(text := path.read_text(encoding="utf-8", errors="replace"))
            except (SyntaxError, ValueError) as error:
                raise ConfigError("the module of the function is not Python", got=error, who=origin,
                                  fix="mend the line") from None
            if not re.search(rf"\b{found[2]}\b", text):
                raise ConfigError("there is no such function", got=f"{path} has no {found[2]!r}", who=origin,
                                  fix="define it there, or name another after the colon")


def _compared(selected: Sequence[Selected], config: RunConfig) -> None:
    """Estimators that compare answers have several. Raw rewards, and advantages that others shape, do without."""
    algorithm, rollout = config.algorithm, config.rollout
    name = next((name for hook, name, _ in choices(config) if hook == "advantage"), None)
    compares = any(f"compares:{name}" in one.manifest.provides for one in selected)
    known = present(config) or "rollout.n_samples_per_prompt" in config.origin
    shaped = any(offer.hook == "shape_advantages" for one in selected for offer in one.manifest.offers)
    if compares and known and rollout.n_samples_per_prompt == 1 and algorithm.rewards_normalization and not shaped:
        raise ConfigError(f"{name} compares the answers to one prompt, and of one answer all advantages are 0",
                          got="n_samples_per_prompt = 1",
                          who=who(config, "rollout.n_samples_per_prompt", "algorithm.advantage_estimator"),
                          fix="--n-samples-per-prompt 8 is usual; or an estimator that looks at one answer alone")
