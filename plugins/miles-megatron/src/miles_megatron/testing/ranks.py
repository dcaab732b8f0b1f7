"""Several trainer ranks in processes that are started once and asked many things: parity across layouts."""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from miles_core.config.tables import RunConfig
from miles_core.errors import DiedError, MilesError, WaitError
from miles_core.hosts import Handle, process_group
from miles_core.plugins.plan import Plan
from miles_core.plugins.select import Selected
from miles_core.types import Batch, Group, Prompt, Rank, Sample, Status

T = TypeVar("T")
TIMEOUT = 300.0
"""Seconds that one question may take."""


class Ranks:
    """`size` processes, each of which makes a new trainer of its rank for every question.

    with Ranks(2) as ranks:
        losses, weights = ranks.train(plan, batches)
    """

    def __init__(self, size: int):
        self.size = size

    def __enter__(self) -> Ranks:
        self._runner = asyncio.Runner()
        self._group: Handle | None = None
        self.ask("ready")  # whoever starts processes pays for their imports, not the first question
        return self

    def __exit__(self, *_exc: object) -> None:
        self._end()
        self._runner.close()

    def train(self, plan: Plan, batches: Sequence[Batch], *, save: Path | None = None,
              turns: bool = False) -> dict[str, Any]:
        """Metrics of every optimizer step, and the weights by HF name, after training on the batches in turn; and of
        each rank the bytes of the optimizer's state, beside the weights, and a digest of its part of them.

        Args:
            plan: its [checkpoint] says where the weights come from; its layout has `size` ranks.
            save: where to write a checkpoint after the last batch.
            turns: whether everything is off the device between two calls, and all but the weights while these stream.
        """
        results = self.ask("train", list(plan.selected), plan.config, list(batches), save, turns)
        count = len(batches) * cast("int", plan.config.rollout.num_steps_per_rollout)
        # A key of its own for each metric of each step: the last pipeline stage knows some, and dicts are merged.
        steps = [{key[1]: value for key, value in results.items() if key[0] == i} for i in range(count)]
        ranks = [results["rank", index] for index in range(self.size)]
        return {"steps": steps, "weights": results["weights"], "batch": results["batch"], "ranks": ranks}

    def gradients(self, plan: Plan, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
        """Loss of one step on the batch, and its whole gradient by HF name.

        The plan says --no-use-distributed-optimizer, which leaves every rank the sum of all.
        """
        results = self.ask("gradients", list(plan.selected), plan.config, batch)
        return results["train/loss"], results["gradients"]

    def ask(self, method: str, *args: object) -> Any:
        """Any method of Trial, on all ranks. After an error the next question starts new ones; but a rank that is alone
        goes on after a refusal, since nobody waits for it in a collective."""
        if self._group is None:
            self._group = process_group("trial", self.size, Trial)
            self._group.timeout = TIMEOUT

        async def call() -> Any:
            return await getattr(self._group, method)(*args)

        try:
            return self._runner.run(call())
        except BaseException as error:
            if self.size > 1 or not isinstance(error, MilesError) or isinstance(error, DiedError | WaitError):
                self._end()
            raise

    def _end(self) -> None:
        if self._group is not None:
            self._runner.run(self._group.close())
            self._group = None


@contextmanager
def by_size(*sizes: int) -> Iterator[Callable[[int], Ranks]]:
    """size -> Ranks, each started once: those of `sizes` now, as imports are nobody's time, others when asked for."""
    started: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size not in started:
            started[size] = Ranks(size).__enter__()
        return started[size]

    for size in sizes:
        of(size)
    try:
        yield of
    finally:
        with ThreadPoolExecutor() as pool:  # after dozens of trainers each takes its 5 s
            list(pool.map(Ranks.__exit__, started.values()))


class Trial:
    """Lives in each process."""

    def __init__(self, rank: Rank):
        import torch

        torch.set_num_threads(1)
        self.rank, self._made = rank, 0

    def ready(self) -> dict[Any, Any]:
        """Imports what every trainer needs."""
        import transformers.models.auto  # noqa: F401

        import miles_megatron.step  # noqa: F401

        return {}

    def _with_trainer(self, selected: Sequence[Selected], config: RunConfig, use: Callable[[Any], T]) -> T:
        """What `use` makes of the rank's trainer, loaded.

        Its process groups, of which every layout has dozens, end here: if anything refers to the trainer then, their
        threads go on.
        """
        from miles_core.build import trainer_part
        from miles_megatron import cpu

        self._made += 1
        meet = self.rank.rendezvous and f"{self.rank.rendezvous}-{self._made}"
        trainer = trainer_part(selected, config, replace(self.rank, rendezvous=meet))
        try:
            trainer.load()
            return use(trainer)
        finally:
            del trainer
            cpu.leave()

    def train(self, selected: Sequence[Selected], config: RunConfig, batches: Sequence[Batch],
              save: Path | None, turns: bool) -> dict[Any, Any]:
        """See `Ranks.train`."""
        def use(whole: Any) -> tuple[list[dict[str, float]], Batch | None, dict[str, np.ndarray] | None, Any]:
            trainer = OffloadedBetweenCalls(whole) if turns else whole
            steps, trained = [], None
            for batch in copy.deepcopy(batches):
                trainer.take_batch(batch)
                scores = trainer.score() | trainer.advantage()
                count = cast("int", config.rollout.num_steps_per_rollout)
                steps += [scores | trainer.step(index) for index in range(count)]
                trained = trainer.end_batch()
            weights = self._weights(trainer)
            if save is not None:
                trainer.save(save, len(batches), {})
                trainer.saved()
            return steps, trained, weights, _of_this_rank(trainer)

        steps, batch, weights, here = self._with_trainer(selected, config, use)
        results: dict[Any, Any] = {(i, key): value for i, step in enumerate(steps) for key, value in step.items()}
        results["rank", self.rank.index] = here
        return results if weights is None else results | {"weights": weights, "batch": batch}

    def gradients(self, selected: Sequence[Selected], config: RunConfig, batch: Batch) -> dict[str, Any]:
        """See `Ranks.gradients`."""
        from miles_megatron.hashes import tensor_hashes

        def use(trainer: Any) -> dict[str, Any]:
            loaded = tensor_hashes(trainer.models.stream())
            trainer.take_batch(copy.deepcopy(batch))
            metrics: dict[str, Any] = trainer.score() | trainer.advantage() | trainer.step(0)
            actor = trainer.models.actor
            actor.put([getattr(tensor, "main_grad", 0 * tensor) for tensor in actor.tensors()])
            streamed = self._weights(trainer)
            return metrics if streamed is None else metrics | {"gradients": streamed, "hashes": loaded}

        return self._with_trainer(selected, config, use)

    def _weights(self, trainer: Any) -> dict[str, np.ndarray] | None:
        """The actor's in float32, which holds every bfloat16, by HF name; on the first rank."""
        weights = {name: tensor.float().to("cpu", copy=True).numpy() for name, tensor in trainer.models.stream()}
        return weights if self.rank.index == 0 else None


def _of_this_rank(trainer: Any) -> dict[str, Any]:
    """Nothing of a trainer that is not Megatron's."""
    actor: Any = getattr(trainer.models, "actor", None)
    if not hasattr(actor, "memory"):
        return {}
    weights = hashlib.sha256()
    for tensor in actor.tensors():
        weights.update(tensor.detach().float().cpu().numpy().tobytes())
    return {"state": actor.memory.held("optimizer"), "weights": weights.hexdigest()}


class OffloadedBetweenCalls:
    """A trainer that holds its device during a call only."""

    TAGS = ("weights", "gradients", "optimizer")

    def __init__(self, trainer: Any):
        self._trainer = trainer
        trainer.offload(self.TAGS)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            self._trainer.onload(self.TAGS)
            result = getattr(self._trainer, method)(*args)
            self._trainer.offload(self.TAGS)
            self._trainer.offload(self.TAGS)  # what is off stays off
            return result

        return call

    @property
    def models(self) -> Any:
        self._trainer.onload(["weights"])  # all that a stream of them needs
        return self._trainer.models


def distance(tensors: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray],
             names: Iterable[str] | None = None) -> float:
    """|tensors - expected| / |expected|, Euclidean over the named ones together, by default over all of `expected`."""
    chosen = list(expected if names is None else names)
    off = sum(np.square(tensors[name] - expected[name], dtype=np.float64).sum() for name in chosen)
    return float(np.sqrt(off / sum(np.square(expected[name], dtype=np.float64).sum() for name in chosen)))


def batches(count: int, *, groups: int = 4, samples: int = 4, vocab: int = 256, seed: int = 0) -> list[Batch]:
    """Rollouts of unequal lengths with random tokens, rewards, log-probs and a mask with holes."""
    draw = np.random.default_rng(seed)
    return [Batch(i, [_group(draw, i * groups + g, samples, vocab) for g in range(groups)]) for i in range(count)]


def _group(draw: np.random.Generator, uid: int, samples: int, vocab: int) -> Group:
    prompt = Prompt(uid, uid, "", tuple(int(t) for t in draw.integers(0, vocab, draw.integers(3, 12))))

    def sample(index: int) -> Sample:
        length = int(draw.integers(1, 41))
        answer = draw.integers(0, vocab, length)
        mask = draw.random(length) < 0.9
        mask[0] = True
        columns: dict[str, np.ndarray] = {
            "tokens": np.array([*prompt.token_ids, *answer], np.int32), "loss_mask": mask.astype(np.uint8),
            "rollout_log_probs": -draw.random(length).astype(np.float32) * 6, "versions": np.ones(length, np.int32),
        }
        return Sample(prompt, index, columns, length, status=Status.COMPLETED, reward=float(draw.integers(0, 3)))

    return Group(prompt, [sample(index) for index in range(samples)])
