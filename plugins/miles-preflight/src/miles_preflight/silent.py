"""Settings that would spoil a run without a word. tests/test_silent.py shows the damage of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from miles_core.config.load import who
from miles_core.config.tables import RunConfig
from miles_core.errors import ConfigError

COLDEST = 0.01
"""The lowest temperature that training samples at: logits are divided by it, on both sides."""
READ = ("checkpoint.hf_checkpoint", "checkpoint.ref_load", "checkpoint.load")
WRITTEN = ("checkpoint.save", "checkpoint.save_hf", "checkpoint.run_dir", "perf.update_weight_disk_dir")


def check_silent(config: RunConfig) -> None:
    """
    Raises:
        ConfigError: a run that would go on and be wrong, or that would write over what it reads.
    """
    _schedule(config)
    _loss(config)
    _ratio(config)
    _samples(config)
    check_apart(config, read_by(config))


def _refuse(config: RunConfig, what: str, fix: str, *keys: str) -> None:
    """
    Raises:
        ConfigError: with the values of the keys, and who set them.
    """
    values = ", ".join(f"{key.partition('.')[2]} {_value(config, key)!r}" for key in keys)
    raise ConfigError(what, got=values, who=who(config, *keys), fix=fix, code="silent-damage")


def _value(config: RunConfig, key: str) -> Any:
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


def _schedule(config: RunConfig) -> None:
    """The learning rate is reached, and above 0 in most of the run. What a decay refuses the trainer says."""
    optimizer, run = config.optimizer, "rollout.num_rollout"
    alone: Any = config.options.get("ppo", {}).get("num_critic_only_steps", 0)  # without a step of the policy
    steps = ((config.rollout.num_rollout or 0) - alone) * (config.rollout.num_steps_per_rollout or 1)
    if steps < 1 or config.debug.debug_rollout_only:
        return
    if optimizer.lr_decay_style == "constant" and optimizer.lr_warmup_iters >= steps:
        _refuse(config, f"the policy's {steps} steps end before the warm-up does",
                "lower --lr-warmup-iters, which counts optimizer steps", "optimizer.lr_warmup_iters", run)
    last = steps if optimizer.lr_decay_style == "constant" else optimizer.lr_decay_iters or steps
    if 2 * last < steps and not optimizer.min_lr:
        _refuse(config, f"the learning rate is 0 from step {last} of {steps} on, once it has decayed",
                "leave --lr-decay-iters out, which counts optimizer steps, or add --min-lr", "optimizer.lr_decay_iters",
                run)


def _loss(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.calculate_per_token_loss and algorithm.reduction not in (None, "token"):
        _refuse(config, "the loss would have the one reduction and not the other", "drop one of them",
                "algorithm.calculate_per_token_loss", "algorithm.reduction")
    if algorithm.kl_coef and algorithm.kl_loss_coef:
        _refuse(config, "one KL divergence would count twice, in the reward and in the loss", "set one of them to 0",
                "algorithm.kl_coef", "algorithm.kl_loss_coef")


def _ratio(config: RunConfig) -> None:
    """The ratio of the policy loss, and the band that it is clipped to."""
    algorithm, rollout = config.algorithm, config.rollout
    low, high = algorithm.eps_clip, algorithm.eps_clip_high
    if algorithm.skip_actor_forward_only:
        skip = "algorithm.skip_actor_forward_only"
        if (rollout.num_steps_per_rollout or 1) > 1 and algorithm.loss_type != "sft_loss":
            _refuse(config, "without a pass for the old policy the ratio is 1 in every step, although the weights have "
                    "moved since the first", "drop --skip-actor-forward-only, or take one optimizer step per rollout",
                    skip, "rollout.num_steps_per_rollout")
        if algorithm.kl_coef:
            _refuse(config, "the KL divergence in the reward needs the old log-probs, which are not computed",
                    "write --use-kl-loss and --kl-loss-coef", skip, "algorithm.kl_coef")
    if algorithm.eps_clip_c is not None and algorithm.eps_clip_c <= 1:  # the loss would say so after a rollout
        _refuse(config, "the dual-clip constant should be above 1", "--eps-clip-c 3, or leave it out",
                "algorithm.eps_clip_c")
    if algorithm.policy_loss != "clip" or config.debug.debug_rollout_only:
        return
    keys = ("algorithm.eps_clip", "algorithm.eps_clip_high")
    if low > 1 or high > 10:
        _refuse(config, "a ratio of probabilities hardly reaches the ends of this band, so nothing would be clipped",
                "0.2 and 0.28 are usual", *keys)
    if 0.5 <= low <= 1 < high < 1.6:
        _refuse(config, "these look like bounds of the ratio, and here they are widths to both sides of 1",
                "for 0.8 to 1.28 write --eps-clip 0.2 --eps-clip-high 0.28", *keys)
    if low == high == 0:
        _refuse(config, "a clip band of no width stops the policy wherever it begins to change",
                "0.2 and 0.28 are usual", *keys)


def _samples(config: RunConfig) -> None:
    """Samples of one prompt differ, and do not end before they begin."""
    rollout = config.rollout
    if any(not text.strip(" \t") for text in rollout.rollout_stop):
        _refuse(config, "every answer ends with its first word, or before it", "name the strings, or leave "
                "--rollout-stop out", "rollout.rollout_stop")
    if not config.trains:
        return
    cut = {"rollout.rollout_temperature": rollout.rollout_temperature < COLDEST,
           "rollout.rollout_top_k": rollout.rollout_top_k == 1,
           "rollout.rollout_top_p": rollout.rollout_top_p < COLDEST}
    if keys := [key for key, greedy in cut.items() if greedy]:
        _refuse(config, "the samples of a prompt would all be the likeliest answer, and their advantages 0",
                "1.0 is usual for temperature and top-p; for greedy evaluation write --eval-temperature 0", *keys)


def read_by(config: RunConfig) -> dict[str, str]:
    """Key -> folder that the run reads weights or its state from."""
    return {key: folder for key in READ if (folder := _value(config, key)) is not None}


def check_apart(config: RunConfig, read: Mapping[str, str]) -> None:
    """
    Args:
        read: key -> folder that must stay as it is.

    Raises:
        ConfigError: the run would write over one of them, or two of its outputs over each other.
    """
    written = [(key, folder) for key in WRITTEN if (folder := _value(config, key)) is not None]
    for key, folder, other, theirs in _pairs(written, read):
        if os.path.realpath(folder) == os.path.realpath(theirs):
            raise ConfigError(f"{key} would be written over {other}", got=folder, who=who(config, key, other),
                              fix=f"name another folder with --{key.partition('.')[2].replace('_', '-')}",
                              code="save-overwrites-source")
    debug, checkpoint = config.debug, config.checkpoint
    if debug.save_debug_rollout_data is not None and debug.save_debug_rollout_data == debug.load_debug_rollout_data:
        _refuse(config, "rollouts would be written over those that are replayed", "name another folder",
                "debug.save_debug_rollout_data", "debug.load_debug_rollout_data")
    if checkpoint.no_save_optim and checkpoint.load is not None and checkpoint.load == checkpoint.save:
        _refuse(config, "the run could not go on from what it saves: the optimizer would not be in it",
                "drop --no-save-optim, or leave --load out", "checkpoint.no_save_optim", "checkpoint.load")


def _pairs(written: list[tuple[str, str]], read: Mapping[str, str]) -> Iterator[tuple[str, str, str, str]]:
    for place, (key, folder) in enumerate(written):
        others = {**read, **dict(written[place + 1:])}
        if key == "checkpoint.save":
            others.pop("checkpoint.load", None)  # a run goes on where it saves
        if key == "checkpoint.run_dir":
            others = {name: others[name] for name in READ if name in others}  # other outputs may lie in it
        yield from ((key, folder, other, theirs) for other, theirs in others.items())
