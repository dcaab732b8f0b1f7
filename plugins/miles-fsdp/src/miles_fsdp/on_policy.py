"""The contract of --true-on-policy-mode: the trainer computes what SGLang's servers compute, bit for bit.

Both run transformers' module by the same kernels (server_kernels.py). What lies outside is refused before anything
starts; `check_equal` looks at every rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError

if TYPE_CHECKING:
    from miles_core.types import Sample

HOLDS: dict[str, Sequence[object]] = {
    "rollout.engine": ["sglang"], "rollout.engine_dtype": ["bfloat16"], "rollout.max_lag": [0], "perf.bf16": [True],
    "perf.rollout_num_gpus_per_engine": [1], "algorithm.use_rollout_logprobs": [False],
    "algorithm.skip_actor_forward_only": [False], "fsdp.attn_implementation": ["packed"],
    "fsdp.torch_compile": [False],
    "model_type": ["llama", "qwen2", "qwen3"], "use_sliding_window": [False]}
"""Values, where any is set, with which both sides compute the same. The last two are of config.json."""


def check_on_policy(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: the first thing for which the mode, which is on, does not hold.
    """
    tables = asdict(config) | config.options | {"": config_json(config)[1] or {}}
    for key, allowed in HOLDS.items():
        table, _, name = key.rpartition(".")
        if (value := tables.get(table, {}).get(name)) not in (None, *allowed):
            raise ConfigError(f"true_on_policy_mode with the trainer fsdp does not hold with this {key}", got=value,
                              who=who(config, key if table else "checkpoint.hf_checkpoint"),
                              fix=f"it holds with {' or '.join(map(str, allowed))}; or leave the mode out",
                              code="fsdp-true-on-policy-unavailable")


def check_equal(samples: Sequence[Sample]) -> None:
    """Compare the columns `log_probs` (the trainer's) and `rollout_log_probs` (the engine's) where tokens are trained.

    Raises:
        TrainError: at the first sample of which two log-probs differ at all, or one is NaN.
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
                who=sample.name, code="fsdp-true-on-policy-log-probs-differ",
                fix="look in the server's log for the plugin miles_on_policy, and for what changes one side alone: a "
                    "plugin around the forward pass, an adapter; or leave true_on_policy_mode out")
