"""Functions as launch scripts of Miles name them, one for each path."""

import torch


def reward(args, sample):
    """Short answers are good."""
    return 1.0 / (1 + sample.response_length)


def select(args, rollout_id, buffer, num_samples):
    """The oldest first."""
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


def keep(args, samples):
    """Groups of which somebody answered."""
    return any(sample.response_length for sample in samples)


def mark(args, data):
    """Leave out what was cut off."""
    for group in data:
        for sample in group:
            sample.remove_sample = sample.status == sample.Status.TRUNCATED


def process(args, all_samples, data_source):
    """Look at them."""
    assert data_source is None
    return len(all_samples)


def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    """Nothing to tell."""


def eval_log(rollout_id, args, data, extra_metrics):
    """Nothing to tell."""


def postprocess(args, rollout_id, rollout_data):
    """Leave the advantages as they are."""


def post_process(args, samples):
    """Rewards, raw and halved."""
    raw = [sample.reward for sample in samples]
    return raw, [reward / 2 for reward in raw]


def advantage(args, rollout_data):
    """The reward, at every token."""
    rewards, lengths = rollout_data["rewards"], rollout_data["response_lengths"]
    rollout_data["advantages"] = [torch.full((size,), float(reward)) for reward, size in zip(rewards, lengths)]


def loss(args, inputs):
    """REINFORCE."""
    return -inputs.advantages * inputs.log_probs * inputs.mask, {}


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """The mean over all tokens."""
    total = sum(float(mask.sum()) for mask in loss_masks)
    return lambda values: (values * torch.cat([torch.zeros(0), *loss_masks])).sum() / max(total, 1.0)
