"""A teacher's server is asked about the student's likeliest tokens, by every rank of the trainer for its share."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from miles_core.errors import MilesError

if TYPE_CHECKING:
    from miles_core.types import Sample
    from miles_opd.plugin import OpdOptions


def teacher_at_student(samples: Sequence[Sample], options: OpdOptions) -> list[np.ndarray]:
    """The teacher's log-probs [R, k] of the student's likeliest tokens, the same on all ranks.

    Raises:
        RewardError: on all ranks, if one of them got no answer that can be used.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shares: list[list[np.ndarray] | MilesError | None] = [None] * size
    shares[rank] = _answers(samples[rank::size], options, max(1, options.opd_teacher_concurrency // size))
    if size > 1:
        dist.all_gather_object(shares, shares[rank])
    for share in shares:
        if isinstance(share, MilesError):
            raise share
    return [shares[index % size][index // size] for index in range(len(samples))]  # type: ignore[index]


def _answers(samples: Sequence[Sample], options: OpdOptions, at_once: int) -> list[np.ndarray] | MilesError:
    """Of one rank. An error is a value, for others wait for this rank's share."""
    servers = options.servers()

    def ask(sample: Sample) -> np.ndarray:
        tokens = sample.columns.get("opd_student_tokens")  # none where no row is trained on
        return np.zeros((0, 0), np.float32) if tokens is None else servers.score_tokens(sample, tokens)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, samples))
    except MilesError as error:
        return error
