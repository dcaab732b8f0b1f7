"""Functions as launch scripts of Miles name them, one for each path."""

import torch


def reward(args, sample):
    """Short answers are good."""
    return 1.0 / (1 + sample.response_length)


def select(args, rollout_id, buffer, num_samples):
    """The oldest first."""
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


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
