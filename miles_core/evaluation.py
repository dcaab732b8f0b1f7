"""Evaluation: stages 1 to 3 with a purpose of their own. Fixed version, own random stream, no buffer.

The draws of a sample depend on (seed, "eval/NAME", prompt, sample) alone: two evaluations of the same weights give the
same tokens, and training gives the same bits whether or not anybody evaluates.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miles_core.errors import RolloutError
from miles_core.plugins.bind import EVALUATING
from miles_core.stages.advantage import rollout_rewards
from miles_core.stages.filter import unfinished
from miles_core.stages.metrics import figures
from miles_core.stages.prompts import RowPrompts
from miles_core.stages.reward import Scoring
from miles_core.types import Group, Sample


@dataclass(frozen=True, slots=True)
class Dataset:
    """One eval dataset: prompts, (prompt, engine=the run's) -> group by sampling parameters of its own, and scorers."""

    name: str
    prompts: RowPrompts
    generate: Callable[..., Awaitable[Group]]
    scoring: Scoring


@dataclass(slots=True)
class Evaluation:
    """All eval datasets of a run, sampled by its own engine.

    Args:
        interval: rollouts between evaluations; None for none at all.
        skip_first: no evaluation before training.
        under_way: the evaluation that has begun last, until somebody has waited for it.
    """

    datasets: Sequence[Dataset]
    interval: int | None
    skip_first: bool = False
    under_way: asyncio.Task | None = None

    def due(self, done: int, last: int) -> bool:
        """Whether to evaluate after `done` rollouts of `last`: before the first, by interval, and after the last;
        a resumed run looks again at the weights that it starts from."""
        if not self.datasets or self.interval is None or done == 0 and self.skip_first:
            return False
        return done == last or done % self.interval == 0

    async def begin(self, run: Any, rollout_id: int) -> None:
        """Evaluate the weights that the engine has, which `rollout_id` samples from; no-op when none is due.

        Where sampling runs ahead, it goes on beside it and training, and the next sync waits for its end.
        """
        if not self.due(rollout_id, run.last):
            return
        run.journal.stage("eval")
        self.under_way = run.start(self.record(run, rollout_id))
        if rollout_id in (run.first, run.last) or not run.config.rollout.max_lag:
            await self.ended()

    async def ended(self) -> None:
        """Wait for the evaluation that is under way, if there is one: it keeps its weights to its end."""
        if self.under_way is not None:
            await self.under_way
            self.under_way = None

    async def record(self, run: Any, rollout_id: int) -> None:
        """Evaluate every dataset, and tell the journal."""
        EVALUATING.set(True)  # in this task and those that it starts
        async with run.placement.lease("rollout"):
            for name, metrics, samples in await self():
                run.journal.evaluation(name, rollout_id, metrics, samples)
        run.journal.stage("rollout")

    async def __call__(self) -> list[tuple[str, dict[str, float], list[Sample]]]:
        """(dataset, metrics, samples) for each dataset, of the groups that were finished.

        Raises:
            RolloutError: none of a dataset's was.
        """
        results = []
        for dataset in self.datasets:
            groups = await asyncio.gather(*(self._group(dataset, uid) for uid in range(len(dataset.prompts))))
            finished = [group for group in groups if not unfinished(group)]
            if not finished:
                drops = [sample.metadata.get("drop", {}) for group in groups for sample in unfinished(group)]
                raise RolloutError(f"no group of the eval dataset {dataset.name} finished", code="eval-without-groups",
                                   got=next((drop["detail"] for drop in drops if drop.get("detail")), None),
                                   fix="look at its samples and at the generator's log")
            metrics = metrics_of(dataset.name, finished)
            metrics[f"eval/{dataset.name}-failed_ratio"] = 1 - len(finished) / len(groups)
            results.append((dataset.name, metrics, [sample for group in finished for sample in group.samples]))
        return results

    async def _group(self, dataset: Dataset, uid: int) -> Group:
        """Scored, unless it was not finished: a failure is no answer that scores 0."""
        group = await dataset.generate(dataset.prompts[uid])
        return group if unfinished(group) else await dataset.scoring(group)


def metrics_of(name: str, groups: Sequence[Group]) -> dict[str, float]:
    """Miles's names: eval/NAME is rollouts' mean reward; pass@k by the unbiased estimator (arXiv:2107.03374, eq. 1)."""
    samples = [sample for group in groups for sample in group.samples]
    lengths, rewards = np.array([one.response_length for one in samples]), [*map(rollout_rewards, groups)]
    metrics = {
        f"eval/{name}": np.mean([reward for group in rewards for reward in group.values()]),
        f"eval/{name}-truncated_ratio": np.mean([sample.status == "truncated" for sample in samples]),
        f"eval/{name}/response_len/mean": lengths.mean(),
        f"eval/{name}/response_len/max": lengths.max()}
    metrics |= figures(samples, f"eval/{name}/")
    count, k = min(map(len, rewards)), 1
    while count > 1 and k <= count:
        metrics[f"eval/{name}-pass@{k}"] = np.mean([pass_at_k(group, k) for group in groups])
        k *= 2
    return {key: float(value) for key, value in metrics.items()}


def pass_at_k(group: Group, k: int) -> float:
    """Chance that at least one of k rollouts drawn from the group has the full reward of 1."""
    rewards = rollout_rewards(group).values()
    return 1.0 - math.comb(sum(reward < 1 for reward in rewards), k) / math.comb(len(rewards), k)
