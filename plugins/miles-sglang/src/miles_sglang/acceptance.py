"""Whether speculative decoding still pays: the share of drafted tokens that the servers accept, over the run.

The draft is made for the policy that a run starts from. As the policy moves away, fewer of its guesses are right, each
step of the servers gives fewer tokens, and nothing else says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from statistics import fmean

logger = logging.getLogger(__name__)

RATE = "rollout/spec_accept_rate"
WINDOW = 5
"""Rollouts whose mean is looked at."""

FALL = 0.2
"""Share of the best mean so far whose loss is a warning; then the lower mean is what the next loss is measured from."""

REMEDY = (
    "train its layers with --enable-mtp-training (plugin mtp), which also syncs them; draft fewer tokens with a lower "
    "--sglang-speculative-num-steps; with --colocate see that --sglang-enable-draft-weights-cpu-backup keeps the "
    "draft's weights"
)


class Acceptance:
    """Sees every rollout's metrics and warns of a fall."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)
        self._best = 0.0

    def see(self, rollout_id: int, values: Mapping[str, float]) -> None:
        """Values without the rate, of an eval or of engines that do not speculate, change nothing."""
        if RATE not in values:
            return
        self._last.append(values[RATE])
        if len(self._last) < WINDOW:
            return
        mean = fmean(self._last)
        if mean < (1 - FALL) * self._best:
            logger.warning("rollout %d: the servers accept %.2f of the draft's tokens, after %.2f at best: %s",
                           rollout_id, mean, self._best, REMEDY)
            self._best = mean
        self._best = max(self._best, mean)
