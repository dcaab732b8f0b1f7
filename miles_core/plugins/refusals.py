"""What plugins say of runs that cannot be meant, checked by a plan without importing them.

A manifest's `refuses` are rules: {"when": {key: test, ...}, "what": sentence, "fix": sentence}. A run for which all
tests hold is refused. Keys are an option ("rollout.n_samples_per_prompt", "tis.use_tis"), a field of Megatron-core
("megatron.fp8"), SGLang's server or router, a size of the model ("architecture.experts") or a hook ("reward"), which
stands for the names chosen for it, or for the plugins that offer it where all do. A test is a value, or some of TESTS,
COMPARES and SAID: {"above": 2}, {"above": "optimizer.lr"}, {"outside": "(0, 1]"}. The core's rules: refusals.toml.

A key may go on into a file of the folder that an option names: "checkpoint.hf_checkpoint/config.json/hidden_act". Of a
*.safetensors file that is its header; * in a part stands for any text, and a number for a place in a list. A key
"environment.NAME" is a variable, or all that NAME with a * stands for. "share.ffn" is a width on one rank of the
trainer: ffn, expert_ffn or values. "template.asks" is what the chat template tells the model once there are tools, and
"template.text" the template, if it heeds them; "template.opens" the tag that it has every answer begin with.

Words in `provides` are the shorter way to say what several plugins say alike:
    files:NAME      the folder that the option NAME is has whole files
    weights:NAME    and they are weights of a model that reads the policy's tokens; weights:NAME:HEAD with a tensor HEAD
    compares:NAME   the estimator NAME compares the answers to one prompt
    labels:NAME     the scorer NAME needs the row's label
    rows:NAME:KEY   the scorer NAME needs of a row, or of its metadata, what the option KEY names, else the label
    answers:NAME:KEY  so does the generator NAME, or a conversation that ends with the answer; :KEY:LAST:CLOSES where it
                    teaches them, of a conversation the last alone if the option LAST is set, and ends them if CLOSES
    appends:NAME:ALLOW:ROLE  the generator NAME appends to a conversation, so that the template may not rewrite it
                    unless the option ALLOW is set; the option ROLE is that of tools' answers, else it is "user"
    calls:NAME:CALL the option NAME is a function that is called so, see functions.py
    modules:NAME    functions that its options name may come from the package NAME, installed or not
"""

from __future__ import annotations

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from miles_core import hookspecs
from miles_core.backends.megatron.hf_files import check_other, check_whole
from miles_core.backends.megatron.hf_template import check_appends
from miles_core.backends.megatron.hf_turns import how_called
from miles_core.backends.megatron.layout import share
from miles_core.config.architecture import architecture_of
from miles_core.config.bounds import stated, within
from miles_core.config.check_paths import astray, check_source, found_in
from miles_core.config.check_rows import check_needs, present
from miles_core.config.check_sampling import trains
from miles_core.config.load import who
from miles_core.config.tables import TABLES, RunConfig
from miles_core.errors import ConfigError, ManifestError
from miles_core.plugins.functions import check_function
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
    "lacks": lambda values, wanted: any(path.exists() and not (path / wanted).is_file() for path in map(Path, values)),
    "text": lambda values, wanted: any(isinstance(value, str) for value in values) == wanted,
    "twice": lambda values, wanted: len(values) > len({re.match(str(wanted), str(value))[1] for value in values}),
    "malformed": lambda values, wanted: all(map(_compiles, values)) != wanted,
}
"""Name -> whether it holds of a key's values: none for one that is not set, several for a list."""
COMPARES: dict[str, Callable[[object, object], bool]] = {
    "above": operator.gt, "below": operator.lt, "from": operator.ge, "to": operator.le, "apart": operator.ne,
    "rest": lambda value, other: bool(other and value % other),
    "unnamed": lambda value, other: value not in re.split("[, ]+", str(other)),
    "begins": lambda value, other: re.sub(r"^(\\A|\^)?(\\s[*+?])?", "", str(value)).startswith(str(other)),
    "is": lambda value, other: os.path.realpath(str(value)) == os.path.realpath(str(other)),
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
                keys = [key for key in rule["when"] if "." in key and not key.startswith(
                    ("architecture.", "environ", "share.", "template."))]
                inside = {str(Path(str(folder), key.split("/")[1])) for key in keys if "/" in key
                          for folder in _values(one, key.split("/")[0], selected, config)}
                values = _values(one, next(iter(rule["when"])), selected, config)
                variables = [name for key in rule["when"] if key.startswith("environment.")
                             for name in sorted(fnmatch.filter(os.environ, key.partition(".")[2]))]
                raise ConfigError(rule["what"], got=", ".join(map(str, values)) or None,
                                  who=", ".join(filter(None, [who(config, *(key for key in keys if "/" not in key)),
                                                              *variables, *sorted(inside), "" if own else
                                                              f"plugin {one.manifest.name}"])),
                                  fix=rule["fix"])
    _functions(selected, config)
    _folders(selected, config)


def _folders(selected: Sequence[Selected], config: RunConfig) -> None:
    """What `files` and `weights` say of options that name a folder."""
    for one in selected:
        for kind, name, *tensor in (word.split(":") for word in one.manifest.provides if word.count(":")):
            given = config.options.get(one.manifest.name, {}).get(name)
            if kind == "files" and given is not None:
                check_whole(Path(given))
            elif kind == "weights" and given is not None and not config.debug.debug_rollout_only:
                check_source(given, f"{who(config, f'{one.manifest.name}.{name}')}, {given}")
                check_other(config, Path(given), *tensor)


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
            found = any(COMPARES[name](value, bound) for value in values for bound in bounds
                        if isinstance(value, str) == isinstance(bound, str))
        else:
            try:
                found = TESTS[name](values, wanted)
            except ValueError as error:  # of an interval
                raise _unreadable(one, key, str(error)) from None
        if not found:
            return False
    return True


def _values(one: Selected, key: str, selected: Sequence[Selected], config: RunConfig) -> list:
    key, *inside = key.split("/")
    if inside:
        return [found for folder in _values(one, key, selected, config)
                for found in found_in(Path(str(folder)) / inside[0], inside[1:])]
    table, dot, name = key.partition(".")
    if not dot:
        if key not in hookspecs.specs():
            raise _unreadable(one, key, "there is no such hook")
        if hookspecs.specs()[key].kind == "named":
            return [chosen for hook, chosen, _ in choices(config) if hook == key]
        return [other.manifest.name for other in selected for offer in other.manifest.offers if offer.hook == key]
    try:
        if table == "environment":
            value: object = [os.environ[key] for key in sorted(fnmatch.filter(os.environ, name))]
        elif table in ("architecture", "share", "template"):
            value = getattr(architecture_of(config), name) if table == "architecture" else share(
                config, name) if table == "share" else how_called(config).get(name)
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
    chosen = {"labels": rollout.rm_type, "rows": rollout.rm_type, "answers": [rollout.generate]}
    for one in selected:
        for word, *names in (word.split(":") for word in one.manifest.provides):
            if names and names[0] in chosen.get(word, ()):
                options = [f"{one.manifest.name}.{name}" for name in names[1:]]
                keys = [key for option in options for key in _values(one, option, selected, config)]
                check_needs(config, names[0], *keys[:1], learns=keys[1:] if word == "answers" else None)
            elif word == "appends" and names[0] == rollout.generate and present(config):
                allow, *role = (f"{one.manifest.name}.{name}" for name in names[1:])
                check_appends(config, allowed=_values(one, allow, selected, config) == [True],
                              allow=f"--{allow.replace('_', '-')}",
                              role=_values(one, role[0], selected, config)[0] if role else "user")


def _functions(selected: Sequence[Selected], config: RunConfig) -> None:
    """Options of plugins that name a function are of a function that is there."""
    for one in selected:
        words = [word.split(":", 2) for word in one.manifest.provides]
        packages = [name for kind, *names in words if kind == "modules" for name in names]
        calls = {names[0]: names[1] for kind, *names in words if kind == "calls"}
        for name, given in config.options.get(one.manifest.name, {}).items():
            for value in given if isinstance(given, list) else [given]:
                if isinstance(value, str):
                    check_function(name, value, calls.get(name), packages)


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
