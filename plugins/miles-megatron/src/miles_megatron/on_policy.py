"""The contract of --true-on-policy-mode: where engine and trainer share one arithmetic, bit for bit.

On a CPU, for dense Qwen3 in float32 on one rank, the local engine's order of operations is also the trainer's
(miles_local/decode.py, miles_megatron/attention.py). What lies outside is refused before anything starts;
`check_equal` looks at every rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from miles_core.config.load import config_json, who, with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError, TrainError
from miles_megatron.layout import RANKS, layout_of

if TYPE_CHECKING:
    from miles_core.types import Sample

LONGEST = 256
"""Tokens of the longest sequence whose attention sums its keys in the engine's order (attention.EXACT_KEYS)."""
DEEPEST = 768
"""Input features of the deepest product whose bits do not depend on its number of rows (decode.PLAIN_DEPTH)."""

Problem = tuple[str, object, str, str]
"""What, got, who, fix."""


def check_on_policy(config: RunConfig, note: Callable[[str], None]) -> RunConfig:
    """Refuse what --true-on-policy-mode cannot hold; bound the context where the run does not.

    Raises:
        ConfigError: the first thing outside of the contract.
    """
    if not config.algorithm.true_on_policy_mode:
        return config
    checkpoint = config_json(config)[1] or {}
    for what, got, origin, fix in (*_settings(config), *_model(config, checkpoint)):
        raise ConfigError(f"true_on_policy_mode {what}", code="true-on-policy-unavailable", got=got, who=origin,
                          fix=fix)
    if config.rollout.rollout_max_context_len is None and checkpoint.get("max_position_embeddings", LONGEST) > LONGEST:
        note(f"true_on_policy_mode bounds rollout_max_context_len to {LONGEST}: longer prompts are left out")
        return with_values(config, "true_on_policy_mode", rollout__rollout_max_context_len=LONGEST)
    return config


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
    if layout.world > 1 or layout.virtual_pipeline:
        yield "holds on one trainer rank", layout.sizes, who(config, *RANKS), "leave the parallel sizes at 1"
    for key in ("use_rollout_logprobs", "skip_actor_forward_only"):
        if getattr(algorithm, key):
            yield ("compares the engine's log-probs with the trainer's, which are then not computed", f"{key} = true",
                   who(config, f"algorithm.{key}"), drop)
    if (context := rollout.rollout_max_context_len) is not None and context > LONGEST:
        yield (f"covers sequences of up to {LONGEST} tokens", f"rollout_max_context_len = {context}",
               who(config, "rollout.rollout_max_context_len"), f"--rollout-max-context-len {LONGEST}")


def _model(config: RunConfig, checkpoint: Mapping[str, object]) -> Iterator[Problem]:
    source = f"--hf-checkpoint {config.checkpoint.hf_checkpoint}"
    kind = config.model.model_name or checkpoint.get("model_type")
    if kind not in (None, "qwen3"):
        yield "holds for dense Qwen3", f"model_type {kind}", source, "leave true_on_policy_mode out"
    heads, hidden = checkpoint.get("num_attention_heads", 0), checkpoint.get("hidden_size", 0)
    depths = {"hidden_size": hidden, "intermediate_size": checkpoint.get("intermediate_size", 0),
              "num_attention_heads x head_dim": heads * (checkpoint.get("head_dim") or 0)}
    for name, depth in depths.items():
        if depth > DEEPEST:
            yield (f"covers products of up to {DEEPEST} input features", f"{name} {depth}", source,
                   "leave true_on_policy_mode out: the difference is then about 1e-6, and reported")
