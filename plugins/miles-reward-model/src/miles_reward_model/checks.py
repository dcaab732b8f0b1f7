"""What a plan refuses of a reward model, and what it says of one."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from miles_core.config import RunConfig
from miles_core.config.hardware import gpus
from miles_core.config.load import who
from miles_core.errors import ConfigError
from miles_core.stages.placement import demand
from miles_reward_model.plugin import RewardModelOptions

PLACES = {"prompt", "response", "label"}
GIB = 2**30


def check(options: RewardModelOptions, config: RunConfig) -> None:
    """
    Raises:
        ConfigError: see RewardModel.check.
    """
    key, path = "reward-model.reward_model_path", options.reward_model_path
    named = "reward_model" in [*config.rollout.rm_type, *(each.get("rm_type") for each in config.eval.every)]
    if path is None:
        raise ConfigError("no reward model is named", code="reward-model-missing", who=key,
                          fix="add --reward-model-path FOLDER, or name it in the file of --sglang-config")
    if not named:
        raise ConfigError("nobody asks the reward model", code="reward-model-unused", got=path, who=who(config, key),
                          fix="add reward_model to --rm-type, or leave the model out")
    folder, constants = Path(path), _read(Path(path, "config.json"))
    if constants is None or not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ConfigError("the reward model's folder has no config.json or no tokenizer", got=path,
                          code="reward-model-incomplete", who=who(config, key),
                          fix="name a Hugging Face directory with tokenizer.json")
    if options.reward_model_kind == "generative":
        template(options)
        return _gpus(options, config)
    classes = len(constants.get("id2label") or ()) or int(constants.get("num_labels", 1))
    if classes > 1 and (options.class_index is None or options.class_index >= classes):
        raise ConfigError(f"the classifier gives {classes} numbers, and one is the reward",
                          code="reward-class-unknown", got=options.class_index, who="reward-model.class_index",
                          fix=f"write a class_index of 0 to {classes - 1}")
    return _gpus(options, config)


def _gpus(options: RewardModelOptions, config: RunConfig) -> None:
    number, each = options.reward_num_gpus, options.reward_num_gpus_per_engine
    if number % each:
        raise ConfigError(f"{number} GPUs do not divide into servers of {each}", who="reward-model.reward_num_gpus",
                          fix="a multiple of reward_num_gpus_per_engine", code="reward-gpus-not-divisible")
    if config.perf.placement == "ray" and gpus():
        raise ConfigError("a reward model's servers are on the driver's machine, whose GPUs Ray deals out",
                          code="reward-model-with-ray", who=who(config, "perf.placement"),
                          fix="write --placement local, or host it elsewhere and use plugin remote-rm")
    if 0 < gpus() < demand(config) + number:
        raise ConfigError("there are too few GPUs for the reward model beside trainer and engines",
                          code="reward-gpus-too-few", got=f"{demand(config)} + {number}, and {gpus()} are here",
                          who=who(config, "reward-model.reward_num_gpus"),
                          fix="use fewer, or share those of trainer and engines with --colocate")


def template(options: RewardModelOptions) -> str:
    """The question that a generative reward model is asked.

    Raises:
        ConfigError: there is none, it has no place for the answer, another place, or the pattern has no group.
    """
    text = options.prompt_template
    if text is not None and "{" not in text and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    try:
        places = {name for _, name, _, _ in string.Formatter().parse(text or "") if name is not None}
    except ValueError:
        places = {"unbalanced"}
    if "response" not in places or places - PLACES:
        raise ConfigError("the question should have the place {response}, and besides only {prompt} and {label}",
                          code="reward-template-places", who="reward-model.prompt_template",
                          got=", ".join(sorted(places)) or text, fix="write other braces twice: {{ and }}")
    try:
        groups = re.compile(options.score_pattern).groups
    except re.error:
        groups = 0
    if not groups:
        raise ConfigError("score_pattern should be a regular expression with a group", code="score-pattern-invalid",
                          got=options.score_pattern, who="reward-model.score_pattern",
                          fix=r"for instance Score: (\d+)")
    return str(text)


def lines(options: RewardModelOptions, config: RunConfig) -> Iterator[tuple[str, str]]:
    """(title, line) of the plan."""
    number, each = options.reward_num_gpus, options.reward_num_gpus_per_engine
    servers = number // each
    size = sum(path.stat().st_size for path in Path(str(options.reward_model_path)).glob("*.safetensors"))
    yield "layout", (f"reward model {options.reward_model_path} ({options.reward_model_kind}): {servers} SGLang "
                     f"server{'s'[:servers != 1]} of {each} GPU{'s'[:each != 1]}, beside {demand(config)} of trainer "
                     "and engines; never synced")
    yield "memory", f"reward model: {size / each / GIB:.3g} GiB of weights on each of its GPUs"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        constants = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return constants if isinstance(constants, dict) else None
