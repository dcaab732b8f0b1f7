"""Stand-ins for prompts, engine and trainer, so that the shipped loop, buffer and leases can be driven alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from miles_core.config.tables import Rollout, RunConfig
from miles_core.evaluation import Evaluation
from miles_core.run import Run
from miles_core.stages.buffer import Buffer, Slot, Taken
from miles_core.stages.placement import Local, Placement
from miles_core.stages.reward import Scoring
from miles_core.types import Batch, Drop, Group, Prompt, Sample, Status

if TYPE_CHECKING:
    from miles_core.hosts import Handle
    from miles_core.record.journal import Journal


class ToyPrompts:
    """Prompts 0, 1, 2, ...; what is given back comes first."""

    data = "toy"

    def __init__(self) -> None:
        self.fresh = 0
        self.again: list[int] = []
        self.handed_out: list[int] = []

    def __len__(self) -> int:
        return 1_000_000

    def next(self) -> Prompt:
        if self.again:
            uid = self.again.pop(0)
        else:
            uid, self.fresh = self.fresh, self.fresh + 1
        self.handed_out.append(uid)
        return Prompt(uid, uid, f"prompt {uid}", (1, 2, 3))

    def give_back(self, prompts: list[Prompt]) -> None:
        self.again = [prompt.uid for prompt in prompts] + self.again

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.fresh, "again": list(self.again)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fresh, self.again = state["next"], list(state["again"])


def toy_group(prompt: Prompt, version: int, samples: int = 2, reward: float | None = None) -> Group:
    """A group of two-token answers that carry the weight version they were sampled from."""

    def sample(index: int) -> Sample:
        columns: dict[str, np.ndarray] = {
            "tokens": np.array([*prompt.token_ids, 4, 5], np.int32), "loss_mask": np.ones(2, np.uint8),
            "rollout_log_probs": np.full(2, -1.0, np.float32), "versions": np.full(2, version, np.int32),
        }
        return Sample(prompt, index, columns, 2, "a", Status.COMPLETED,
                      reward=float(index) if reward is None else reward)

    return Group(prompt, [sample(index) for index in range(samples)])


class FinishOrder(Buffer):
    """The mutant that tests of the order have to catch: it takes what finished first, whatever waits longer."""

    def _cut(self) -> tuple[Taken, list[Slot]] | None:
        complete = [slot for slot in self._slots if isinstance(slot.outcome, Group)]
        if len(complete) < self.batch_size:
            return None
        first = complete[: self.batch_size]
        groups = [slot.outcome for slot in first if isinstance(slot.outcome, Group)]
        return Taken(groups), [slot for slot in self._slots if slot not in first]


class ToyTrainer:
    """Records what it was trained on; a step takes `seconds`."""

    def __init__(self, seconds: float = 1.0):
        self.seconds = seconds
        self.batches: list[Batch] = []
        self.batch: Batch | None = None

    async def take_batch(self, batch: Batch) -> None:
        self.batch = batch

    async def score(self) -> dict[str, float]:
        return {}

    async def advantage(self) -> dict[str, float]:
        return {}

    async def step(self, index: int) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        return {"train/loss": 0.0}

    async def end_batch(self) -> Batch:
        assert self.batch is not None, "take_batch comes first"
        self.batches.append(self.batch)
        return self.batch

    async def plugin_state(self) -> dict[str, Any]:
        return {}

    async def save(self, folder: Path, rollout_id: int, state: dict[str, Any]) -> None:
        """Nothing to keep."""


@dataclass
class ToyJournal:
    """Keeps what the run reported."""

    rollouts: list[tuple[Batch, dict[str, float]]] = field(default_factory=list)
    events: list[tuple[str, int | None, dict[str, Any]]] = field(default_factory=list)

    def rollout(self, batch: Batch, metrics: dict[str, float]) -> None:
        self.rollouts.append((batch, metrics))

    def event(self, kind: str, /, rollout_id: int | None = None, **fields: object) -> None:
        self.events.append((kind, rollout_id, fields))

    def message(self, level: str, text: str) -> None:
        """Of no interest here."""

    def stage(self, name: str) -> None:
        """Of no interest here."""

    def saving(self) -> None:
        """Of no interest here."""


class ToySync:
    """A sync that takes `seconds`; counts them."""

    def __init__(self, seconds: float = 0.1):
        self.seconds = seconds
        self.versions: list[int] = []

    async def sync(self, trainer: object, engine: object, version: int) -> dict[str, float]:
        await asyncio.sleep(self.seconds)
        self.versions.append(version)
        return {}


def toy_run(*, rollouts: int, batch_size: int, max_lag: int, duration: Callable[[int, int], float],
            dropped: Callable[[int], bool] = lambda uid: False, crash: Callable[[int], bool] = lambda uid: False,
            credit: int = 0, placement: Placement | None = None, buffer: type[Buffer] = Buffer, train: float = 1.0,
            most_drops: int = 1000, options: Mapping[str, Any] | None = None, **flow: Any) -> Run:
    """A Run of the shipped loop whose engine and trainer only take time.

    Args:
        duration: (prompt number, how often it was sampled) -> seconds of its sampling.
        dropped, crash: which prompts a filter drops, and whose sampling raises.
        options: of [rollout]; heartbeats are off, since they would never let a schedule get stuck.
        flow: further arguments of the buffer.
    """
    prompts, tries = ToyPrompts(), Counter[int]()
    values: dict[str, Any] = {"heartbeat_interval": 0, "max_lag": max_lag, **(options or {})}
    config = RunConfig(rollout=Rollout(**values))

    async def generate(slot: Slot) -> Group:
        assert (prompt := slot.prompt) is not None
        tries[prompt.uid] += 1
        version = run.version
        await asyncio.sleep(duration(prompt.uid, tries[prompt.uid]))
        if crash(prompt.uid):
            raise ZeroDivisionError(f"prompt {prompt.uid}")
        return toy_group(prompt, version)

    scoring = Scoring({}, {}, lambda sample, weights: 0.0, 60.0)
    run = Run(
        config=config, first=0, last=rollouts, steps=1, prompts=prompts, generate=generate,
        scoring=scoring,
        chain=lambda group: Drop("chosen") if dropped(group.prompt.uid) else group, shape=None,
        buffer=buffer(batch_size, max_lag, batches=rollouts, credit=credit, most_drops=most_drops, **flow),
        engine=None, trainer=cast("Handle", ToyTrainer(train)), weight_sync=ToySync(),
        placement=placement or Local(RunConfig()),
        evaluation=Evaluation([], None), journal=cast("Journal", ToyJournal()),
        clock=lambda: asyncio.get_running_loop().time(),
    )  # fmt: skip
    run.buffer.requeue, run.buffer.too_stale = run.requeue, run.too_stale
    return run
