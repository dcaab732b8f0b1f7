"""What must hold among the options, and what follows from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_opd.plugin import OpdOptions

ESTIMATOR = SCORER = "on_policy_distillation"


def checked(options: OpdOptions, config: RunConfig) -> OpdOptions:
    """The options with `opd_type` filled in.

    Raises:
        ConfigError: says what, got, who and the fix.
    """
    options = dataclasses.replace(options, opd_type=_kind(options))
    _use(options, config)
    _teacher(options, config)
    _numbers(options)
    return options


def _kind(options: OpdOptions) -> Literal["megatron", "sglang"]:
    load, urls = options.opd_teacher_load is not None, bool(options.opd_teacher_urls)
    if load and urls:
        raise ConfigError("a teacher is either in the trainer or behind a server, not both", who="[opd]",
                          got="opd_teacher_load and opd_teacher_urls", code="opd-two-teachers", fix="drop one of them")
    kind = options.opd_type or ("megatron" if load else "sglang" if urls else None)
    if kind is None:
        raise ConfigError("distillation needs a teacher", who="[opd]", got="neither opd_teacher_load nor "
                          "opd_teacher_urls", fix="--opd-teacher-load CHECKPOINT, or --opd-teacher-urls URL of an "
                          "SGLang server", code="opd-no-teacher")
    if not (load if kind == "megatron" else urls):
        wanted = "--opd-teacher-load CHECKPOINT" if kind == "megatron" else "--opd-teacher-urls URL"
        raise ConfigError(f"opd_type {kind!r} names no teacher", code="opd-type-without-teacher", who="opd.opd_type",
                          fix=f"add {wanted}")
    return kind


def _use(options: OpdOptions, config: RunConfig) -> None:
    algorithm = config.algorithm
    alone = algorithm.advantage_estimator == ESTIMATOR
    if alone and options.use_opd:
        raise ConfigError("the reverse KL would count twice, as advantage and on top of it",
                          code="opd-kl-counted-twice", who="opd.use_opd", got=f"advantage_estimator {ESTIMATOR!r}",
                          fix="drop --use-opd, or take another estimator")
    if not alone and not options.use_opd:
        raise ConfigError("plugin opd has nothing to do", who="plugins, opd.use_opd", fix="add --use-opd, or "
                          f"--advantage-estimator {ESTIMATOR}, or leave the plugin out", code="opd-nothing-to-do")
    if alone and options.opd_kl_coef == 0:
        raise ConfigError("the advantages are the reverse KL, and its weight is 0", got=0, who="opd.opd_kl_coef",
                          fix="use 1.0, for example", code="opd-kl-weight-zero")
    if options.use_opd and algorithm.loss_type == "sft_loss":
        raise ConfigError("the loss of demonstrations does not look at advantages, off which the reverse KL is taken",
                          code="opd-with-demonstrations", who="opd.use_opd, algorithm.loss_type",
                          fix="drop one of them")
    if algorithm.skip_actor_forward_only:
        raise ConfigError("distillation needs the old log-probs, which skip_actor_forward_only leaves out",
                          who="algorithm.skip_actor_forward_only", code="opd-needs-old-log-probs", fix="drop it")


def _teacher(options: OpdOptions, config: RunConfig) -> None:
    asks = SCORER in config.rollout.rm_type
    if options.opd_type == "megatron":
        if asks:
            raise ConfigError(f"scorer {SCORER!r} asks a server, and the teacher is in the trainer",
                              code="opd-scorer-without-server", who="rollout.rm_type",
                              fix="leave the scorer out, or name --opd-teacher-urls")
        if not Path(str(options.opd_teacher_load)).is_dir():
            raise ConfigError("the teacher does not exist", code="opd-teacher-missing", got=options.opd_teacher_load,
                              who="opd.opd_teacher_load",
                              fix="name a Hugging Face directory or a folder that a run saved into")
        return
    if not asks:
        raise ConfigError(f"the teacher's server would never be queried: that is what scorer {SCORER!r} does",
                          code="opd-server-without-scorer", who="rollout.rm_type",
                          fix=f"add {SCORER} to --rm-type; it counts 0 in the reward")
    if config.rollout.rollout_temperature != 1:
        raise ConfigError("a server scores at temperature 1, and the student samples at another",
                          code="opd-temperature-mismatch", got=config.rollout.rollout_temperature,
                          who="rollout.rollout_temperature",
                          fix="--rollout-temperature 1, or a teacher in the trainer (--opd-teacher-load)")


def _numbers(options: OpdOptions) -> None:
    if options.opd_top_k_baseline and not options.opd_log_prob_top_k:
        raise ConfigError("the baseline needs top-k", code="opd-baseline-needs-top-k", who="opd.opd_top_k_baseline",
                          fix="add --opd-log-prob-top-k 20, or write --normalize-advantages")
    for key, least in (("opd_kl_coef", 0), ("opd_log_prob_top_k", 0), ("opd_teacher_concurrency", 1)):
        if not getattr(options, key) >= least:
            raise ConfigError(f"{key} should be at least {least}", got=getattr(options, key), who=f"opd.{key}",
                              fix="leave it out for its default", code="option-too-small")
    if not options.opd_teacher_timeout > 0:
        raise ConfigError("opd_teacher_timeout should be above 0", code="opd-timeout-not-positive",
                          got=options.opd_teacher_timeout, who="opd.opd_teacher_timeout",
                          fix="leave it out for its default")
