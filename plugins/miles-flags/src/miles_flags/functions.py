"""Functions of launch scripts replace a part by their path alone: it is chosen, and what they stand in for is off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError
from miles_flags.table import table


def parts_of(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration with the parts that functions of plugin compat are.

    Raises:
        ConfigError: a function of Miles's own that something else is here.
    """
    paths = {name: value for name, value in config.options.get("compat", {}).items() if value is not None}
    for name, path in paths.items():
        owner, _, function = str(path).partition(".")
        if owner in ("miles", "slime") and (remedy := table()["functions"].get(function)):
            raise ConfigError("this function of Miles is not here", got=path, who=f"--{name.replace('_', '-')}",
                              fix=remedy)
    for name, (values, says) in _stand_ins(config).items():
        if name in paths and any(_value(config, key) != value for key, value in values.items()):
            note(f"--{name.replace('_', '-')}: {says}")
            config = with_values(config, name, **values)
    return config


def _stand_ins(config: RunConfig) -> dict[str, tuple[dict[str, Any], str]]:
    """Option of plugin compat -> (what it makes of the run, "table__key" = value; the sentence that announces it)."""
    stand_ins: dict[str, tuple[dict[str, Any], str]] = {
        "custom_generate_function_path": ({"rollout__generate": "custom"}, "--generate custom is implied"),
        "custom_rm_path": ({"rollout__rm_type": ["custom"], "rollout__rm_weights": [1.0]},
                           "--rm-type custom is implied, and it alone scores"),
        "custom_reward_post_process_path": ({"algorithm__rewards_normalization": False},
                                            "rewards are not normalised beside it, as in Miles"),
    }
    if config.options.get("tis", {}).get("use_tis"):
        stand_ins["custom_tis_function_path"] = (
            {"tis__use_tis": False}, "it weighs the tokens in place of --use-tis, as in Miles")
    if "algorithm.rewards_normalization" in config.origin:
        del stand_ins["custom_reward_post_process_path"]
    if config.rollout.generate not in ("single-turn", "custom"):
        del stand_ins["custom_generate_function_path"]
    if "custom" in config.rollout.rm_type:  # beside others, which the run has named itself
        del stand_ins["custom_rm_path"]
    return stand_ins


def _value(config: RunConfig, key: str) -> object:
    name, _, field = key.partition("__")
    return config.options[name].get(field) if name in config.options else getattr(getattr(config, name), field)
