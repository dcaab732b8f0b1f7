"""The contract of --true-on-policy-mode: where engine and trainer share one arithmetic, bit for bit.

On a CPU, in float32, for the architectures that the local engine has a decoder of its own for, the trainer computes in
that decoder's order of operations (engine_order.py). What lies outside is refused before anything starts, and
every rollout is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from miles_local.on_policy import check_settings

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig
from miles_megatron.layout import KEYS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures with a decoder of the local engine's own (miles_local.weights.FAMILIES)."""

HOLDS: dict[str, Sequence[object]] = {
    "rollout.engine": ["local"], "rollout.engine_dtype": ["float32"], "rollout.max_lag": [0], "perf.bf16": [False],
    "algorithm.use_rollout_logprobs": [False], "algorithm.skip_actor_forward_only": [False], "model_type": FAMILIES,
    **{f"megatron.{KEYS[name]}": [1] for name in ("tensor", "context", "expert", "expert_tensor")}}
"""Values, where any is set, with which both sides compute the same: no sum is shared among ranks, for one."""


SUSPECT = "a plugin around the forward pass, other thread counts, another build of torch"


def check_on_policy(config: RunConfig, _note: Callable[[str], None]) -> RunConfig:
    """
    Raises:
        ConfigError: the first thing for which the mode does not hold.
    """
    if not config.algorithm.true_on_policy_mode:
        return config
    kind = config.model.model_name or (config_json(config)[1] or {}).get("model_type")
    check_settings(config, config.surfaces | {"": {"model_type": kind}}, HOLDS)
    return config


def engine_order(config: RunConfig) -> AbstractContextManager:
    """The engine's order of operations in every forward inside, if the run asks for it."""
    if not config.algorithm.true_on_policy_mode:
        return nullcontext()
    from miles_megatron.engine_order import EngineOrder

    return EngineOrder()
