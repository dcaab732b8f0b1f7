"""The contract of --true-on-policy-mode: where engine and trainer share one arithmetic, bit for bit.

On a CPU, in float32, for the architectures that the local engine has a decoder of its own for, the trainer computes in
that decoder's order of operations (engine_order.py). What lies outside is refused before anything starts; `check_equal`
looks at every rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError
from miles_megatron.layout import KEYS

if TYPE_CHECKING:
    from miles_core.types import Sample

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures with a decoder of the local engine's own (miles_local.weights.FAMILIES)."""

HOLDS: dict[str, Sequence[object]] = {
    "rollout.engine": ["local"], "rollout.engine_dtype": ["float32"], "rollout.max_lag": [0], "perf.bf16": [False],
    "algorithm.use_rollout_logprobs": [False], "algorithm.skip_actor_forward_only": [False], "model_type": FAMILIES,
    **{f"megatron.{KEYS[name]}": [1] for name in ("tensor", "context", "expert", "expert_tensor")}}
"""Values, where any is set, with which both sides compute the same: no sum is shared among ranks, for one."""


def check_on_policy(config: RunConfig, _note: Callable[[str], None]) -> RunConfig:
    """
    Raises:
        ConfigError: the first thing for which the mode does not hold.
    """
    if not config.algorithm.true_on_policy_mode:
        return config
    kind = config.model.model_name or (config_json(config)[1] or {}).get("model_type")
    tables = asdict(config) | config.surfaces | {"": {"model_type": kind}}
    for key, allowed in HOLDS.items():
        table, _, name = key.rpartition(".")
        if (value := tables.get(table, {}).get(name)) not in (None, *allowed):
            raise ConfigError(f"true_on_policy_mode does not hold with this {key}", code="true-on-policy-unavailable",
                              got=value, who=who(config, key if table else "checkpoint.hf_checkpoint"),
                              fix=f"it holds with {' or '.join(map(str, allowed))}; or leave the mode out")
    return config


def engine_order(config: RunConfig) -> AbstractContextManager:
    """The engine's order of operations in every forward inside, if the run asks for it."""
    if not config.algorithm.true_on_policy_mode:
        return nullcontext()
    from miles_megatron.engine_order import EngineOrder

    return EngineOrder()


def check_equal(samples: Sequence[Sample]) -> None:
    """Compare the columns `log_probs` (the trainer's) and `rollout_log_probs` (the engine's) where tokens are trained.

    Raises:
        TrainError: at the first token whose two log-probs differ at all, or of which one is NaN.
    """
    import numpy as np  # only in a trainer: a plan imports this module

    for sample in samples:
        trainer, engine = sample.columns["log_probs"], sample.columns["rollout_log_probs"]
        unequal = np.flatnonzero((trainer != engine) & (sample.columns["loss_mask"] > 0))
        if unequal.size:
            first = int(unequal[0])
            raise TrainError(
                f"true_on_policy_mode: {unequal.size} of {sample.response_length} log-probs differ, first at response "
                f"token {first}", got=f"trainer {float(trainer[first])!r}, engine {float(engine[first])!r}",
                who=f"prompt {sample.prompt.uid}, sample {sample.index}", code="true-on-policy-log-probs-differ",
                fix="look for what changes one side alone: a plugin around the forward pass, other thread counts, "
                    "another build of torch; or leave true_on_policy_mode out",
            )  # fmt: skip
