"""The contract of --true-on-policy-mode: where engine and trainer share one arithmetic, bit for bit.

On a CPU, in float32, for the architectures that the local engine has a decoder of its own for, the trainer computes in
that decoder's order of operations (engine_order.py). What lies outside is refused before anything starts; `check_equal`
looks at every rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from miles_core.config.load import config_json, who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError
from miles_megatron.layout import RANKS, layout_of

if TYPE_CHECKING:
    from miles_core.types import Sample

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Architectures with a decoder of the local engine's own (miles_local.weights.FAMILIES)."""

Problem = tuple[str, object, str, str]
"""What, got, who, fix."""


def check_on_policy(config: RunConfig, _note: Callable[[str], None]) -> RunConfig:
    """Refuse what --true-on-policy-mode cannot hold.

    Raises:
        ConfigError: the first thing outside of the contract.
    """
    if not config.algorithm.true_on_policy_mode:
        return config
    for what, got, origin, fix in (*_settings(config), *_model(config, config_json(config)[1] or {})):
        raise ConfigError(f"true_on_policy_mode {what}", code="true-on-policy-unavailable", got=got, who=origin,
                          fix=fix)
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


def _settings(config: RunConfig) -> Iterator[Problem]:
    rollout, perf, algorithm = config.rollout, config.perf, config.algorithm
    drop = "leave it out, or leave true_on_policy_mode out"
    if rollout.engine not in (None, "local"):
        yield "needs the local engine", rollout.engine, who(config, "rollout.engine"), drop
    if perf.bf16:
        yield "trains in float32", "bf16 = true", who(config, "perf.bf16"), "add --no-bf16"
    if rollout.engine_dtype not in (None, "float32"):
        yield "decodes in float32", rollout.engine_dtype, who(config, "rollout.engine_dtype"), drop
    if rollout.max_lag:
        yield ("trains on what the same weights sampled", f"max_lag = {rollout.max_lag}",
               who(config, "rollout.max_lag"), "set max_lag = 0")
    layout = layout_of(config)
    if max(layout.tensor, layout.context, layout.expert, layout.expert_tensor) > 1:
        yield ("holds where no sum is shared among ranks", layout.sizes, who(config, *RANKS),
               "leave tensor, context and expert parallelism at 1; data and pipeline parallelism are free")
    for key in ("use_rollout_logprobs", "skip_actor_forward_only"):
        if getattr(algorithm, key):
            yield ("compares the engine's log-probs with the trainer's, which are then not computed", f"{key} = true",
                   who(config, f"algorithm.{key}"), drop)


def _model(config: RunConfig, checkpoint: Mapping[str, object]) -> Iterator[Problem]:
    source = f"--hf-checkpoint {config.checkpoint.hf_checkpoint}"
    kind = config.model.model_name or checkpoint.get("model_type")
    if kind not in (None, *FAMILIES):
        yield f"holds for {', '.join(FAMILIES)}", f"model_type {kind}", source, "leave true_on_policy_mode out"
