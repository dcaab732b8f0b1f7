"""Helpers of Miles around context parallelism, of whole samples: no function here is given parts of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int, *more: object,
                       **named: object) -> torch.Tensor:
    """[R] of a sample, which is whole already."""
    return tensor


def slice_log_prob_with_cp(values: torch.Tensor, total_length: int, response_length: int, *more: object,
                           **named: object) -> torch.Tensor:
    """This rank's part of [R], which is the whole."""
    return values


def get_sum_of_sample_mean(total_lengths: Sequence[int], response_lengths: Sequence[int],
                           loss_masks: Sequence[torch.Tensor], calculate_per_token_loss: bool = False,
                           *more: object, **named: object) -> Callable[[torch.Tensor], torch.Tensor]:
    """The reducer that Miles has by default: the sum over samples of the mean over their trained tokens, or the sum."""
    def reduce(values: torch.Tensor) -> torch.Tensor:
        parts = values.split(list(response_lengths))
        sums = [(part * mask).sum() for part, mask in zip(parts, loss_masks, strict=True)]
        if not calculate_per_token_loss:
            sums = [total / mask.sum().clamp_min(1) for total, mask in zip(sums, loss_masks, strict=True)]
        return torch.stack(sums).sum()
    return reduce
