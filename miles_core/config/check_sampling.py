"""What is sampled for training and for evaluation, and who scores it."""

from __future__ import annotations

from collections.abc import Callable

from miles_core.config.bounds import within
from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

COLDEST = 0.01
"""The lowest temperature that training samples at: logits are divided by it, on both sides."""


def trains(config: RunConfig) -> bool:
    """Whether answers are sampled and learnt from: not for a demonstration's, nor where one side is left out."""
    return (config.algorithm.loss_type != "sft_loss" and not config.debug.debug_rollout_only
            and not config.debug.debug_train_only and config.rollout.num_rollout != 0)


def check_sampling(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """The configuration as it is.

    Raises:
        ConfigError: samples that have nothing to teach, or parameters that no sampler takes.
    """
    _evaluation(config, note)
    rollout = config.rollout
    if not trains(config):
        return config
    if rollout.rollout_temperature < COLDEST:
        greedy = rollout.rollout_temperature == 0
        raise ConfigError(
            "training samples have to differ, and log-probs are those of logits / temperature" + (
                ": at 0 every answer is the likeliest one" if greedy else f": below {COLDEST} they are 0 or -inf"),
            got=rollout.rollout_temperature, who=who(config, "rollout.rollout_temperature"),
            fix="1.0 is usual; for greedy evaluation write --eval-temperature 0")
    if rollout.rollout_top_k == 1:
        raise ConfigError("training samples have to differ, and rollout_top_k 1 leaves the likeliest token alone",
                          got=1, who=who(config, "rollout.rollout_top_k"),
                          fix="leave it out; for greedy evaluation write --eval-top-k 1")
    return config


def _evaluation(config: RunConfig, note: Callable[[str], None]) -> None:
    eval_ = config.eval
    own = {"temperature": eval_.eval_temperature, "top_p": eval_.eval_top_p}
    for values, origin in ((own, "eval.eval_{}"), *((dataset, "eval.datasets") for dataset in eval_.datasets)):
        for key, interval in (("temperature", "[0, 10]"), ("top_p", "(0, 1]")):
            if not within(values.get(key), interval):
                raise ConfigError(f"{key} should lie in {interval}", got=f"{key} {values[key]}",
                                  who=who(config, origin.format(key)), fix="leave it out for [rollout]'s")
    if eval_.n_samples_per_eval_prompt > 1 and eval_.eval_temperature == 0:
        note("eval_temperature 0 is greedy: all answers to an evaluation prompt will be the same")
