"""A plugin that goes wrong in the way that --faulty.fault names, once, in the place where the real thing happens.

It leaves two files in the folder of the command: `injected`, the monotonic clock at that moment, and `drawn.jsonl`,
each answer as the real engine gave it, before anything is done to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import time
from dataclasses import dataclass, replace

import numpy as np

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.types import Drop

FOR_EVER = 3600.0
FILE_LIMIT = 100_000
"""Bytes of a file, where a disk is full: the record of a short run fits, a checkpoint does not."""


@dataclass(frozen=True, kw_only=True)
class FaultyOptions:
    """What goes wrong, and from when on."""

    fault: str = option("none", "A name of tests/integration/faults.py.")
    since: int = option(2, "Weight version with which, or after which, it happens.")


def strike() -> bool:
    """Whether this is the moment: true once, whichever process asks first."""
    try:
        file = os.open("injected", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.write(file, str(time.monotonic()).encode())
    os.close(file)
    return True


def dies() -> None:
    """What an engine's thread may meet."""
    raise MemoryError("the engine's thread is to die")


THREAD = {"engine kill": dies, "engine hang": lambda: time.sleep(FOR_EVER)}
SLOW = {"engine slow": 0.8, "engine too slow": 6.0}
ANSWER = {
    "garbage": lambda answer, now: replace(answer, output_ids=answer.output_ids + 100_000),
    "negative token": lambda answer, now: replace(answer, output_ids=-1 - answer.output_ids),
    "NaN log-probs": lambda answer, now: replace(answer, log_probs=answer.log_probs * np.float32("nan")),
    "positive log-probs": lambda answer, now: replace(answer, log_probs=1 - answer.log_probs),
    "empty answer": lambda answer, now: replace(answer, output_ids=answer.output_ids[:0], finish_reason="stop",
                                                log_probs=answer.log_probs[:0], versions=answer.versions[:0]),
    "wrong length": lambda answer, now: replace(answer, log_probs=answer.log_probs[:-1]),
    "unknown version": lambda answer, now: replace(answer, versions=answer.versions + 7),
    "version that no trainer sent": lambda answer, now: replace(answer, versions=answer.versions * 0),
    "versions go backwards": lambda answer, now: replace(
        answer, output_ids=np.resize(answer.output_ids, 2), log_probs=np.resize(answer.log_probs, 2),
        versions=np.array([now, now - 1], np.int32)),
}  # fmt: skip


class Engine:
    """The real one, but for one answer.

    Args:
        due: version -> whether it may happen now.
    """

    def __init__(self, real, fault: str, due):
        self._real, self._fault, self._due = real, fault, due

    def __getattr__(self, name):
        return getattr(self._real, name)

    async def generate(self, request):
        """What the real one draws, noted down."""
        from miles_local.engine import Command

        if self._fault in THREAD and self._due(self._real.version):
            self._real._post(Command(THREAD[self._fault]))
        answer = await self._real.generate(request)
        with open("drawn.jsonl", "a") as file:
            file.write(json.dumps({"id": request.id, "tokens": answer.output_ids.tolist(), "log_probs":
                                   answer.log_probs.tolist(), "versions": answer.versions.tolist()}) + "\n")
        if self._fault in SLOW and self._due(self._real.version):
            await asyncio.sleep(SLOW[self._fault])
        if self._fault in ANSWER and len(answer.output_ids) and self._due(self._real.version):
            return ANSWER[self._fault](answer, self._real.version)
        return answer


def stalls(stream):
    """One tensor comes, and then nothing."""
    yield next(stream)
    time.sleep(FOR_EVER)


def loses_one(stream):
    """All tensors but the second."""
    for number, pair in enumerate(stream):
        if number != 1:
            yield pair


def spoils_one(stream):
    """The second tensor is not what it was."""
    for number, (name, tensor) in enumerate(stream):
        yield name, tensor * float("nan") if number == 1 else tensor


STREAM = {"weight-sync stall": stalls, "partial sync": loses_one, "NaN weights": spoils_one}


class Trainer:
    """The real handle; its stream of weights meets a fault."""

    def __init__(self, real, change):
        self._real, self._change = real, change

    async def weights(self):
        """The stream."""
        return self._change(await self._real.weights())


class Prompts:
    """The real source, until it ends."""

    def __init__(self, real, error: BaseException):
        self._real, self._error = real, error

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __len__(self):
        return len(self._real)

    def next(self):
        """The next prompt, of the first 18."""
        prompt = self._real.next()
        if prompt.uid >= 18 and strike():
            raise self._error
        return prompt


class Faulty:
    """Parts named "faulty", which work but for the fault, and hooks that do nothing until it is their turn."""

    name = "faulty"

    def __init__(self, options: FaultyOptions, config: RunConfig):
        self.options, self.config, self.dropping, self.rollout_id = options, config, False, 0

    def due(self, version: int) -> bool:
        """Whether it happens now, with weights of this version."""
        return version >= self.options.since and strike()

    def is_(self, *faults: str) -> bool:
        """Whether it is one of these."""
        return self.options.fault in faults

    @hookimpl("prompt_source", name="faulty")
    def prompts(self, config, tokenizer, read):
        """Prompts of --prompt-data, fewer than it has."""
        from miles_core.stages.defaults import Core

        ends = {"prompt source ends": StopIteration(),
                "prompt source raises": ConnectionError("the data server is gone")}  # fmt: skip
        return Prompts(Core(config).prompt_source(config, tokenizer, read), ends[self.options.fault])

    @hookimpl("engine", name="faulty")
    def engine(self, config, tokenizer, hooks):
        """The local engine."""
        from miles_local.plugin import Local, LocalOptions

        return Engine(Local(LocalOptions()).engine(config, tokenizer, hooks), self.options.fault, self.due)

    @hookimpl("generate", name="faulty")
    async def generate(self, prompt, generation):
        """One turn, and then a tool that never answers."""
        from miles_core.stages.rollout import single_turn

        samples = await single_turn(prompt, generation)
        if self.is_("generator hang") and self.due(generation.engine.version):
            await asyncio.sleep(FOR_EVER)
        return samples

    @hookimpl("reward", name="faulty")
    def reward(self, sample):
        """The share of even token ids."""
        if self.is_("reward hang", "reward raises", "reward NaN") and self.due(int(sample.columns["versions"].max())):
            if self.is_("reward hang"):
                time.sleep(FOR_EVER)
            return float("nan") if self.is_("reward NaN") else 1 / 0
        return float((sample.tokens[-sample.response_length:] % 2 == 0).mean())

    @hookimpl
    def filter_group(self, group):
        """Keeps all, or from some moment on none."""
        late = self.is_("filter drops everything") and group.oldest_version >= self.options.since
        self.dropping = self.dropping or (late and strike())
        return Drop("dull", "every answer is dull") if self.dropping else group

    @hookimpl("weight_sync", name="faulty")
    def weight_sync(self, config):
        """In process, or through shared memory in which a bit flips."""
        from miles_local.shared_memory import SharedMemory

        from miles_core.stages.sync import InProcess

        faulty = self

        class Sync(InProcess):
            async def sync(self, trainer, engine, version):
                struck = faulty.is_(*STREAM) and faulty.due(version)
                return await super().sync(Trainer(trainer, STREAM[faulty.options.fault]) if struck else trainer, engine,
                                          version)

        class Flipping(SharedMemory):
            async def sync(self, trainer, engine, version):
                self.flips = faulty.due(version)
                return await super().sync(trainer, engine, version)

            def _mapped(self, path, size):
                memory = super()._mapped(path, size)
                if self.flips:
                    memory[7] ^= 16
                return memory

        return Flipping(config) if self.is_("flipped bit") else Sync(config.rollout.pause_generation_mode)

    @hookimpl
    def train_step(self, proceed, access):
        """Lets it go on, or does what befalls a rank."""
        self.rollout_id = access.batch.rollout_id
        if self.is_("rank kill", "rank hang", "disk full") and self.due(self.rollout_id + 1):
            if self.is_("rank kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.is_("rank hang"):
                time.sleep(FOR_EVER)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
        return proceed()

    @hookimpl("policy_loss", name="faulty")
    def policy_loss(self, inputs):
        """A policy gradient, once of no number."""
        struck = self.is_("loss NaN") and self.due(self.rollout_id + 1)
        return -inputs.log_probs * (float("nan") if struck else inputs.advantages), {}
