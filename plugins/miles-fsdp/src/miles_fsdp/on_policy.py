"""The contract of --true-on-policy-mode: the trainer computes what SGLang's servers compute, bit for bit.

Both run transformers' module by the same kernels (server_kernels.py). What lies outside is refused before anything
starts, and every rollout is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from miles_local.on_policy import check_settings

from miles_core.config.load import config_json
from miles_core.config.tables import RunConfig

KINDS = ("llama", "qwen2", "qwen3")
"""Architectures whose ropes and gated layers servers compute in one kernel each, as the trainer does."""

HOLDS: dict[str, Sequence[object]] = {
    "rollout.engine": ["sglang"], "rollout.engine_dtype": ["bfloat16"], "rollout.max_lag": [0], "perf.bf16": [True],
    "perf.rollout_num_gpus_per_engine": [1], "algorithm.use_rollout_logprobs": [False],
    "algorithm.skip_actor_forward_only": [False], "fsdp.attn_implementation": ["packed"],
    "fsdp.torch_compile": [False], "fsdp.tensor_parallel_size": [1],
    "model_type": KINDS, "use_sliding_window": [False]}
"""Values, where any is set, with which both sides compute the same. The last two are of config.json."""


SUSPECT = ("a plugin around the forward pass, an adapter, or a server whose log does not speak of the plugin "
           "miles_on_policy")


def check_on_policy(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: the first thing for which the mode, which is on, does not hold.
    """
    check_settings(config, config.options | {"": config_json(config)[1] or {}}, HOLDS)
