"""What must hold among the options of [algorithm], and what follows from them."""

from __future__ import annotations

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError


def check_algorithm(config: RunConfig) -> None:
    """Refuse options of the objective that contradict each other or have no effect.

    Raises:
        ConfigError: says what, got, who and the fix.
    """
    _surrogate(config)
    _divergence(config)
    _old_log_probs(config)
    _reduction(config)


def needs_reference(config: RunConfig) -> bool:
    """Whether the reference model scores the rollouts: for the KL term of the loss, or the KL in the reward."""
    return config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0


def _surrogate(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.eps_clip_c is not None and algorithm.eps_clip_c <= 1:
        raise ConfigError("eps_clip_c should be above 1", got=algorithm.eps_clip_c,
                          who=who(config, "algorithm.eps_clip_c"), fix="3.0 is usual")
    for key in ("gamma", "lambd"):
        if not 0 <= getattr(algorithm, key) <= 1:
            raise ConfigError(f"{key} should lie in [0, 1]", got=getattr(algorithm, key),
                              who=who(config, f"algorithm.{key}"), fix="1.0 discounts nothing")


def _divergence(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.kl_loss_coef and not algorithm.use_kl_loss:
        raise ConfigError("kl_loss_coef has no effect without --use-kl-loss", got=algorithm.kl_loss_coef,
                          who=who(config, "algorithm.kl_loss_coef"),
                          fix="add --use-kl-loss, which loads the reference model")
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        raise ConfigError("use_unbiased_kl has no effect without --use-kl-loss",
                          who=who(config, "algorithm.use_unbiased_kl"), fix="add --use-kl-loss and --kl-loss-coef")
    if algorithm.kl_loss_coef and algorithm.kl_coef:
        raise ConfigError("kl_coef and kl_loss_coef would count one divergence in the reward and in the loss",
                          got=f"{algorithm.kl_coef} and {algorithm.kl_loss_coef}",
                          who=who(config, "algorithm.kl_coef", "algorithm.kl_loss_coef"), fix="set one of them to 0")


def _old_log_probs(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.skip_actor_forward_only and config.rollout.num_steps_per_rollout != 1:
        raise ConfigError("skip_actor_forward_only makes the ratio 1, which holds for one optimizer step per rollout",
                          got=f"num_steps_per_rollout = {config.rollout.num_steps_per_rollout}",
                          who=who(config, "algorithm.skip_actor_forward_only"),
                          fix="drop it, or set num_steps_per_rollout = 1")
    if algorithm.skip_actor_forward_only and (algorithm.use_rollout_logprobs or config.rollout.max_lag):
        raise ConfigError("skip_actor_forward_only excludes use_rollout_logprobs and max_lag above 0",
                          who=who(config, "algorithm.skip_actor_forward_only"), fix="drop one of them")
    if algorithm.skip_actor_forward_only and algorithm.kl_coef:
        raise ConfigError("kl_coef needs the old log-probs, which skip_actor_forward_only leaves out",
                          who=who(config, "algorithm.kl_coef", "algorithm.skip_actor_forward_only"),
                          fix="drop one, or write --use-kl-loss and --kl-loss-coef")
    for key in ("hidden_dropout", "attention_dropout"):
        if config.megatron.get(key):
            raise ConfigError(f"{key} above 0 would make the old policy's log-probs those of another model than the "
                              "one that is trained",
                              got=config.megatron[key], who=who(config, f"megatron.{key}"), fix="leave it at 0")


def _reduction(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.calculate_per_token_loss and algorithm.reduction not in (None, "token"):
        raise ConfigError(f"calculate_per_token_loss and reduction = {algorithm.reduction!r} disagree",
                          who=who(config, "algorithm.calculate_per_token_loss", "algorithm.reduction"), fix="drop one")
    if algorithm.reduction_constant is not None and algorithm.reduction != "constant":
        raise ConfigError("reduction_constant has no effect without --reduction constant",
                          got=algorithm.reduction_constant, who=who(config, "algorithm.reduction_constant"),
                          fix="add --reduction constant")
