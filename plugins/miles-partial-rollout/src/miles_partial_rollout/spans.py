"""Spans: what was drawn of an answer between two call-backs. The core joins their columns (miles_core.columns.joined).

A sample says in its metadata

    start_rollout_id   the rollout whose weights it began with: the version of its first token, less 1; kept for good
    cuts               response lengths at which it was called back; span k is the tokens from cut k-1 to cut k

and the version of each token is in the column `versions`, so that nothing about a span has to be guessed later.
"""

from __future__ import annotations

import numpy as np

from miles_core.types import Group, Sample, Status


def called_back(group: Group, *, mask: bool) -> Group:
    """What of a group goes on later: all of its samples, finished ones included, or none.

    None where no token was drawn, where a sample failed, and, with `mask`, where all have finished, since every token
    would be masked: sampling the prompt again then loses nothing that could be trained on.

    Args:
        mask: set the loss mask of all tokens so far to 0, also of samples that have finished: their tokens are of the
            same weights. Rewards and advantages of the group still count them.
    """
    samples = group.samples
    fit = all((sample.status.finished or sample.status is Status.ABORTED) and "drop" not in sample.metadata
              for sample in samples)
    drawn = any(sample.response_length for sample in samples)
    to_go = any(sample.status is Status.ABORTED for sample in samples)
    if not (fit and drawn and (to_go or not mask)):
        return Group(group.prompt, [])
    for sample in samples:
        _cut(sample)
        if mask:
            sample.columns["loss_mask"] = np.zeros_like(sample.columns["loss_mask"])
    return group


def tell(sample: Sample) -> None:
    """Stamp a sample that is trained on, and leave its figures: means under rollout/ of every batch.

    `resumed` is 1 for a sample that went on after it was called back; `spans` and `tokens_per_span` are of those.
    """
    _stamp(sample)
    cuts, length = sample.metadata.get("cuts", []), sample.response_length
    figures = {"resumed": float(bool(cuts))}
    if cuts:
        spans = len(cuts) + (length > cuts[-1])
        figures |= {"spans": float(spans), "tokens_per_span": length / spans}
    sample.metadata["figures"] = {**sample.metadata.get("figures", {}), **figures}


def _stamp(sample: Sample) -> None:
    if sample.response_length:
        sample.metadata.setdefault("start_rollout_id", int(sample.columns["versions"][0]) - 1)


def _cut(sample: Sample) -> None:
    """Stamp, and note where the span that was just called back ends."""
    _stamp(sample)
    cuts = sample.metadata.get("cuts", [])
    if sample.status is Status.ABORTED and sample.response_length > (cuts[-1] if cuts else 0):
        sample.metadata["cuts"] = [*cuts, sample.response_length]
