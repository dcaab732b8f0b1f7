"""Functions that look at a whole rollout: rewards before the advantages, and the advantages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from miles_grpo.advantage import group_relative

from miles_compat.paths import arguments
from miles_compat.sample import groups_lent, lent, mask_of, narrowed, number_of
from miles_core.columns import CORE, Align
from miles_core.errors import HookError
from miles_core.kl import approximate_kl
from miles_core.types import Batch, Drop, Group, Sample, Status

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.config.tables import Algorithm


def post_processed(function: Callable[..., Any], args: Args, groups: list[Group]) -> None:
    """Give every sample the reward that the function answers; in place. The raw one goes to metadata["raw_reward"].

    Raises:
        HookError: the answer is not two lists of one finite number for each sample.
    """
    who = "custom_reward_post_process_path"
    samples = [sample for group in groups for sample in group.samples]
    with groups_lent(groups, who) as found:
        answer = function(args, [one for group in found for one in group])
    try:
        raw, rewards = ([float(value) for value in values] for values in answer)
    except (TypeError, ValueError):
        raise HookError("the function should return (raw_rewards, rewards)", got=repr(answer)[:100], who=who,
                        fix="two lists of a number for each sample", code="reward-function-return") from None
    if not len(raw) == len(rewards) == len(samples) or not all(map(math.isfinite, rewards)):
        raise HookError(f"the function should return a finite number for each of {len(samples)} samples, twice",
                        code="reward-function-count",
                        got=f"{len(raw)} and {len(rewards)}, of which {sum(map(math.isfinite, rewards))} finite",
                        who=who, fix="return (raw_rewards, rewards) in the order of the samples")
    for sample, before, reward in zip(samples, raw, rewards, strict=True):
        sample.metadata["raw_reward"], sample.reward = before, reward


CONVERTED = frozenset({"tokens", "response_lengths", "total_lengths", "rewards", "raw_reward", "truncated",
                       "sample_indices", "loss_masks", "rollout_log_probs", "round_number", "metadata", "rollout_ids",
                       "weight_versions"})
"""What a conversion may say of samples; changed are rewards and loss masks."""


def converted(function: Callable[..., Any], args: Args, groups: list[Group]) -> None:
    """Train on the rewards and the loss masks that the function says; in place.

    Raises:
        HookError: it leaves samples out, changes their tokens, or adds data that no column is declared for.
    """
    who = "custom_convert_samples_to_train_data_path"
    samples = [sample for group in groups for sample in group.samples]
    with groups_lent(groups, who) as found:
        data = function(args, [one for group in found for one in group])
    if not isinstance(data, dict) or unknown(data):
        raise HookError("the function should return a dict of lists, by Miles's names", code="convert-function-return",
                        who=who, got=", ".join(unknown(data)) if isinstance(data, dict) else type(data).__name__,
                        fix="what more a loss needs is a column: a one-file plugin with the hook columns")
    if any(len(values) != len(samples) for values in data.values()):
        raise HookError(f"the function should say something of each of {len(samples)} samples", who=who,
                        got=", ".join(f"{len(values)} {name}" for name, values in data.items()),
                        fix="take samples out of training with loss masks of 0", code="convert-function-count")
    for place, sample in enumerate(samples):
        if changed := [name for name, value in _sampled(sample).items()
                       if name in data and not _equal(data[name][place], value)]:
            raise HookError(f"the function changes {' and '.join(changed)} of {sample.name}", who=who,
                            code="convert-function-changes-tokens",
                            fix="what is sampled is what is trained on: change them in a generate function")
        if "loss_masks" in data:
            mask = data["loss_masks"][place]
            if mask_of(mask, sample.response_length) is None:
                raise HookError(f"the function gives {sample.name} a loss mask that does not fit its response", who=who,
                                got=f"{repr(mask)[:80]} for {sample.response_length} tokens",
                                fix="a 0 or a 1 for each response token", code="convert-function-mask-length")
            sample.columns["loss_mask"] = narrowed(sample, mask, who)
        if "raw_reward" in data:
            sample.metadata["raw_reward"] = number_of(data["raw_reward"][place], sample, who)
        if "rewards" in data:
            sample.reward = number_of(data["rewards"][place], sample, who)


def _sampled(sample: Sample) -> dict[str, Any]:
    """What a conversion may repeat and not change."""
    return {"tokens": sample.tokens, "response_lengths": sample.response_length, "total_lengths": sample.length,
            "rollout_log_probs": sample.columns["rollout_log_probs"]}


def _equal(value: Any, known: Any) -> bool:
    try:
        numbers = np.array(value.tolist() if hasattr(value, "tolist") else value, np.float64)
    except (TypeError, ValueError):
        return False
    return numbers.shape == np.shape(known) and bool(np.allclose(numbers, known, rtol=0, atol=1e-4))


def unknown(data: dict[str, Any]) -> list[str]:
    """Keys of a conversion that nothing here stands for."""
    return sorted(data.keys() - CONVERTED)


def kept(function: Callable[..., Any], args: Args, group: Group) -> Group | Drop:
    """A group, or a drop under the function's own word.

    Raises:
        HookError: it answers neither with a DynamicFilterOutput nor with a truth value.
    """
    with lent(group.samples, who="dynamic_sampling_filter_path") as samples:
        answer = function(args, samples)
    keep, reason = getattr(answer, "keep", answer), getattr(answer, "reason", None)
    keep = bool(keep) if isinstance(keep, torch.Tensor) and keep.numel() == 1 else keep
    if not isinstance(keep, bool | np.bool_):
        raise HookError("the function should return DynamicFilterOutput(keep, reason), or a bool",
                        code="dynamic-filter-return", got=repr(answer)[:100], who="dynamic_sampling_filter_path",
                        fix="return True to keep a group")
    return group if keep else Drop(str(reason or "filtered"), f"prompt {group.prompt.uid}")


def marked(function: Callable[..., Any], args: Args, groups: list[Group]) -> None:
    """Train on no token of the samples whose `remove_sample` the function sets."""
    with groups_lent(groups, "rollout_sample_filter_path") as data:
        function(args, data)


def processed(function: Callable[..., Any], args: Args, groups: list[Group], source: object) -> None:
    """Show the function every group that was finished since it was last called."""
    with groups_lent(groups, "rollout_all_samples_process_path") as data:
        function(args, data, source)


def postprocessed(function: Callable[..., Any], args: Args, batch: Batch, algorithm: Algorithm) -> None:
    """Let the function look at the rollout, advantages included, and change these.

    Raises:
        HookError: it changes the loss masks, whose sums are denominators by now, or leaves advantages that do not fit.
    """
    who = "rollout_data_postprocess_path"
    if len(arguments(function)) < 3:
        function(args)
        return
    data = rollout_data(batch, algorithm)
    before = [mask.clone() for mask in data["loss_masks"]]
    function(args, batch.rollout_id, data)
    if not all(map(torch.equal, before, data["loss_masks"])):
        raise HookError("the function changes loss_masks, whose sums are denominators by now",
                        code="advantage-function-changes-masks", who=who,
                        fix="mark samples in --rollout-sample-filter-path, tokens in --custom-tis-function-path")
    found = [torch.as_tensor(row).detach().cpu().numpy() for row in data.get("advantages", ())]
    if [row.shape for row in found] != [(sample.response_length,) for sample in batch.samples]:
        raise HookError('rollout_data["advantages"] should stay one tensor for each sample, as long as its response',
                        code="advantage-function-lengths", who=who, got=f"{len(found)} for {len(batch.samples)}",
                        fix="change values, not lengths")
    for sample, row in zip(batch.samples, found, strict=True):
        sample.columns["advantages"] = row.astype(np.float32)


def advantages(function: Callable[..., Any], args: Args, batch: Batch, algorithm: Algorithm) -> list[np.ndarray]:
    """[R] advantages of each sample, which the function leaves in rollout_data["advantages"].

    Raises:
        HookError: it leaves none, or not one tensor for each sample. Their lengths are checked by the core.
    """
    data = rollout_data(batch, algorithm)
    function(args, data)
    found = data.get("advantages")
    if found is None or len(found) != len(batch.samples):
        raise HookError('the function should set rollout_data["advantages"]', code="advantage-function-sets-nothing",
                        who="custom_advantage_function_path",
                        got="nothing" if found is None else f"{len(found)} of {len(batch.samples)}",
                        fix="a list with one tensor for each sample, as long as its response")
    return [torch.as_tensor(value).detach().cpu().numpy() for value in found]


def rollout_data(batch: Batch, algorithm: Algorithm) -> dict[str, list[Any]]:
    """The rollout as Miles's training data: a list with one entry for each sample under each key.

    `rewards` are what the group's normalisation leaves of them ([algorithm]), `kl` the divergence from the reference
    of each token or zeros, and columns that plugins declare are there by their names.
    """
    samples = batch.samples
    data: dict[str, list[Any]] = {
        "tokens": [torch.tensor(sample.tokens) for sample in samples],
        "total_lengths": [sample.length for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "loss_masks": [torch.tensor(sample.columns["loss_mask"], dtype=torch.float32) for sample in samples],
        "rewards": group_relative(batch, algorithm),
        "raw_reward": [sample.metadata.get("raw_reward", sample.reward) for sample in samples],
        "truncated": [int(sample.status is Status.TRUNCATED) for sample in samples],
        "sample_indices": list(range(len(samples))),
    }
    own = {"tokens", "loss_mask", *(column.name for column in CORE if column.align is Align.TOKEN)}
    names = dict.fromkeys(name for sample in samples for name in sample.columns if name not in own)
    for name in names:
        if all(name in sample.columns for sample in samples):
            data[name] = [torch.tensor(sample.columns[name]) for sample in samples]
    policy = data.get("log_probs", data.get("rollout_log_probs", []))  # of a batch of nothing there is neither
    reference = data.get("ref_log_probs")
    data["kl"] = [torch.zeros_like(row) for row in policy] if reference is None else [
        approximate_kl(row, other, algorithm.kl_loss_type) for row, other in zip(policy, reference, strict=True)]
    return data
