"""Functions of launch scripts replace a part by their path alone: it is chosen, and what they stand in for is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_core.config.load import with_values
from miles_core.config.tables import TABLES, RunConfig
from miles_flags.settings import custom_config
from miles_flags.table import table

MODULES = "miles.rollout.generate_hub"
BESIDE = {"custom_agent_function_path": f"{MODULES}.agentic_tool_call.generate",
          "generate_tool_specs_path": f"{MODULES}.multi_turn.generate",
          "rollout_sample_hook_path": f"{MODULES}.single_turn.generate"}
"""Option of plugin compat -> the generate function that looks at it, where the run names none."""
LABELLED = frozenset({"math", "boxed_math", "deepscaler", "gemma_math", "dapo", "boxed_dapo", "f1", "boxed_f1"})
"""Scorers that compare with a label; without one Miles's own give 0."""


def parts_of(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration with the parts that functions of plugin compat are."""
    config = _unlabelled(_distilled(_of_miles(_configured(config, note), note), note), note)
    paths = _paths(config)
    for option, path in BESIDE.items():
        if option in paths and "custom_generate_function_path" not in paths and config.rollout.generate in _GENERATORS:
            config = with_values(config, option, compat__custom_generate_function_path=path)
            paths = _paths(config)
    for option, (values, says) in _stand_ins(config).items():
        if option in paths and any(_value(config, key) != value for key, value in values.items()):
            note(f"{_flag(option)}: {says}")
            config = with_values(config, option, **values)
    return config


def _paths(config: RunConfig) -> dict[str, Any]:
    return {name: value for name, value in config.options.get("compat", {}).items() if value}


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _configured(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Keys of --custom-config-path that are options of the run set them, as in Miles.

    Raises:
        DataError: the file cannot be read.
    """
    path = _paths(config).get("custom_config_path")
    if path is None:
        return config
    for key, value in custom_config(path).items():
        tables = [name for name in TABLES if hasattr(getattr(config, name), key)]
        tables += [name for name, options in config.options.items() if key in options]
        table = next(iter(tables), None)
        if table is not None and _value(config, f"{table}__{key}") != value:
            note(f"--custom-config-path: {table}.{key} is {value!r}")
            config = with_values(config, "custom_config_path", **{f"{table}__{key}": value})
    return config


def _of_miles(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Functions of Miles's own that are something else here: what they set, in their place."""
    for option, path in _paths(config).items():
        owner, _, function = str(path).replace(":", ".").partition(".")
        entry = table()["functions"].get(function)
        if owner not in ("miles", "slime") or entry is None:
            continue
        sets = {key: value for key, value in entry.get("set", {}).items() if config.origin.get(key) is None
                or key.startswith("rollout.rm_")}
        note(f"{_flag(option)}: {entry['says']}")
        values = {key.replace(".", "__"): value for key, value in sets.items()}
        config = with_values(config, option, **values, **{f"compat__{option}": None})
    return config


def _distilled(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Miles names a teacher's server as --rm-url, which is --opd-teacher-urls of plugin opd."""
    url = config.options.get("remote-rm", {}).get("rm_url")
    opd = config.options.get("opd")
    if opd is None or not url or opd.get("opd_teacher_urls") or "on_policy_distillation" not in config.rollout.rm_type:
        return config
    note("--rm-url: the teacher's server, as --opd-teacher-urls")
    return with_values(config, "rm_url", **{"opd__opd_teacher_urls": [url], "remote-rm__rm_url": None})


def _unlabelled(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Without labels Miles's scorers give 0, and what is learnt of a teacher is all there is."""
    scorers = config.rollout.rm_type
    if (not config.options.get("opd", {}).get("use_opd") or config.rollout.label_key is not None or not scorers
            or not LABELLED.issuperset(scorers)):
        return config
    note(f"--rm-type {' '.join(scorers)}: the rows have no labels (--label-key), so every reward is 0, as in Miles; "
         "what is learnt is the teacher's")
    return with_values(config, "use_opd", rollout__rm_type=["teacher_only"], rollout__rm_weights=[1.0])


_GENERATORS = ("single-turn", "custom")
_REWARDS = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")
"""Functions that say what advantages are made of, groups compared or not."""


def _stand_ins(config: RunConfig) -> dict[str, tuple[dict[str, Any], str]]:
    """Option of plugin compat -> (what it makes of the run, "table__key" = value; the sentence that announces it)."""
    generated = {"rollout__generate": "custom", "rollout__combine_rewards": "given-first"}
    stand_ins: dict[str, tuple[dict[str, Any], str]] = {
        "rollout_function_path": (_whole_rollouts(config), "the function samples, scores and filters whole rollouts"),
        "eval_function_path": (generated, "--generate custom is implied"),
        "custom_generate_function_path": (generated, "--generate custom is implied"),
        "custom_rm_path": ({"rollout__rm_type": ["custom"], "rollout__rm_weights": [1.0]},
                           "--rm-type custom is implied, and it alone scores"),
        **dict.fromkeys(_REWARDS, ({"algorithm__rewards_normalization": False},
                                   "rewards are not normalised beside it, as in Miles")),
    }
    if config.options.get("tis", {}).get("use_tis"):
        stand_ins["custom_tis_function_path"] = (
            {"tis__use_tis": False}, "it weighs the tokens in place of --use-tis, as in Miles")
    if "algorithm.rewards_normalization" in config.origin:
        stand_ins = {name: one for name, one in stand_ins.items() if name not in _REWARDS}
    if config.rollout.generate not in _GENERATORS:
        del stand_ins["custom_generate_function_path"], stand_ins["eval_function_path"]
    if "custom" in config.rollout.rm_type or "rollout_function_path" in _paths(config):  # beside others, or asked by it
        del stand_ins["custom_rm_path"]
    return stand_ins


def _whole_rollouts(config: RunConfig) -> dict[str, Any]:
    """The function's own rewards count; which scorer it asks for them is kept for it."""
    scorers = [name for name in config.rollout.rm_type if name not in ("custom", "generated")]
    scorer = {"compat__scorer": scorers[0]} if scorers else {}
    return {"rollout__prompt_source": "custom", "rollout__generate": "custom", "rollout__rm_type": ["generated"],
            "rollout__rm_weights": [1.0], **scorer}


def _value(config: RunConfig, key: str) -> object:
    name, _, field = key.partition("__")
    return getattr(getattr(config, name), field) if name in TABLES else config.options.get(name, {}).get(field)
