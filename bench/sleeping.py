"""A plugin for bench/async_throughput.py: an engine and a trainer that take their time in threads of their own, asleep.

Two shared cores cannot show how a schedule overlaps two sides that compute; sides that sleep show nothing else. All the
rest of a run is the shipped one: prompts, single-turn generation, rewards, filters, buffer, leases, syncs, records.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from miles_core import hookimpl, option


@dataclass(frozen=True, kw_only=True)
class Options:
    """How long things take."""

    lanes: int = option(16, "Answers that the engine decodes at once; the others wait.", flags=("--lanes",))
    token_seconds: float = option(0.004, "Seconds of a token in its lane; 0 for no engine.", flags=("--token-seconds",))
    train_seconds: float = option(0.5, "Seconds of an optimizer step; 0 for no trainer.", flags=("--train-seconds",))
    sync_seconds: float = option(0.01, "Seconds of a weight sync.", flags=("--sync-seconds",))


class Sleeping:
    """Offers the engine and the trainer."""

    def __init__(self, options: Options):
        self.options = options

    @hookimpl("engine", name="sleeping")
    def engine(self, config, tokenizer, placement):
        """It sleeps for every token."""
        return Engine(self.options)

    @hookimpl("trainer", name="sleeping")
    def trainer(self, config, hooks, columns, rank):
        """It sleeps for every step."""
        return Trainer(self.options)

    @hookimpl("reward", name="length")
    def length(self, sample):
        """Something to score."""
        return float(sample.response_length)


def tokens(key: int, most: int) -> int:
    """The length of an answer, a function of its draws' key: Pareto's, alpha 1.2, from 6 tokens on, cut at `most`."""
    return min(most, int(6 * (key / 2**64) ** (-1 / 1.2)))


class Engine:
    """Decodes so many answers at once as it has lanes; each lane is a thread."""

    path = "sleepers"

    def __init__(self, options: Options):
        self._options, self.version = options, 0
        self._lanes = ThreadPoolExecutor(options.lanes)

    async def start(self) -> None:
        """Nothing to get ready."""

    async def generate(self, request):
        from miles_core.stages.rollout import Response

        count = tokens(request.key, request.sampling.max_new_tokens)
        await asyncio.get_running_loop().run_in_executor(self._lanes, time.sleep, count * self._options.token_seconds)
        finish = "length" if count == request.sampling.max_new_tokens else "stop"
        return Response(np.zeros(count, np.int32), np.zeros(count, np.float32), np.full(count, self.version, np.int32),
                        finish)

    async def abort(self, ids=None) -> None:
        """A sleeper cannot be woken."""

    async def pause(self, mode="retract") -> None:
        """Its lanes go on."""

    async def resume(self) -> None:
        """Its lanes went on."""

    async def update_weights(self, weights, version) -> None:
        await asyncio.sleep(self._options.sync_seconds)
        self.version = version

    async def release(self, tags) -> None:
        """Holds no memory of a device."""

    async def occupy(self, tags) -> None:
        """Takes none."""

    async def stop(self) -> None:
        self._lanes.shutdown(wait=False, cancel_futures=True)


class Trainer:
    """Sleeps in its host's thread."""

    def __init__(self, options: Options):
        self._options, self._batch = options, None

    def load(self):
        from miles_core.stages.step import Resume

        return Resume(0, None, "nothing")

    def take_batch(self, batch) -> None:
        self._batch = batch

    def score(self) -> dict[str, float]:
        return {}

    def advantage(self) -> dict[str, float]:
        return {}

    def step(self, index) -> dict[str, float]:
        time.sleep(self._options.train_seconds)
        return {}

    def end_batch(self):
        return self._batch

    def weights(self):
        return iter(())
