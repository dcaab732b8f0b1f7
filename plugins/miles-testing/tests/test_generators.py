"""The kit of generators: good ones pass, and each check has a generator that it catches."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from miles_testing import canned_samples, generator_contract
from miles_testing.clock import run_virtual

from miles_core.errors import MilesError
from miles_core.stages.rollout import single_turn
from miles_core.types import CancelHandle, Status


@pytest.fixture(autouse=True)
def instant(monkeypatch):
    """No check waits: time is virtual."""
    monkeypatch.setattr(asyncio, "run", lambda main: run_virtual(lambda: main))


async def two_turns(prompt, generation):
    """Samples whose second half comes from a second call."""
    first = await single_turn(prompt, generation)
    return first if first[0].status is Status.ABORTED else [
        replace(sample, metadata={"turns": 1}) for sample in first]


@pytest.mark.parametrize("generate", [single_turn, two_turns])
def test_a_generator_passes(generate):
    generator_contract(generate)


def changing(change):
    """A generator that changes every sample."""

    async def generate(prompt, generation):
        found = await single_turn(prompt, generation)
        for sample in found:
            change(sample)
        return found

    return generate


def answering(answer):
    """A generator that returns something else: (samples) -> what."""

    async def generate(prompt, generation):
        return answer(await single_turn(prompt, generation))

    return generate


def setting(column, change):
    """A generator that changes a column of every sample."""
    return changing(lambda sample: sample.columns.update({column: change(sample.columns[column])}))


async def globally(prompt, generation):
    found = await single_turn(prompt, generation)
    first = generation.engine.requests[-1].id if generation.engine.order else ""
    return [replace(sample, text=first) for sample in found]


async def stubborn(prompt, generation):
    try:
        return await single_turn(prompt, generation)
    except Exception:  # noqa: BLE001 - what a careless author writes
        return [sample for sample in canned_samples() if sample.prompt == prompt]


async def deaf(prompt, generation):
    """Asks the engine without telling anybody, so that it cannot be called back."""
    return await single_turn(prompt, replace(generation, recall=CancelHandle()))


async def endless(prompt, generation):
    """Asks again for ever."""
    while True:
        await single_turn(prompt, generation)
        await asyncio.sleep(0.1)


async def untidy(prompt, generation):
    found = await single_turn(prompt, generation)
    generation.recall.begins("another")
    return found


BROKEN = {
    "a list of samples comes back.*not None": answering(lambda found: None),
    r"a list of samples comes back.*not \(Sample": answering(tuple),
    r"a list of samples comes back.*not \[\]": answering(lambda found: []),
    r"a list of samples comes back.*not \['[^']*', ": answering(lambda found: [sample.text for sample in found]),
    "a group takes more than 30 s": endless,
    "is of another prompt": changing(lambda sample: setattr(sample, "prompt", replace(sample.prompt, uid=99))),
    "contains NaN or infinity": setting("rollout_log_probs", lambda rows: rows * np.float32("nan")),
    "does not begin with its prompt": setting("tokens", lambda tokens: tokens + 1),
    "response_length is not what it has": setting("tokens", lambda tokens: np.append(tokens, tokens[-1:])),
    "not called back": changing(lambda sample: setattr(sample, "status", Status.ABORTED)),
    "masks other than 0 and 1": setting("loss_mask", lambda mask: mask + np.uint8(1)),
    "it changes its prompt": changing(lambda sample: sample.prompt.metadata.update(seen=True)),
    "two samples of a group have one index": changing(lambda sample: setattr(sample, "index", 0)),
    "samples depend on when the engine answers": globally,
    "neither finished nor called the engine": deaf,
    "called back, no sample of it is aborted": changing(lambda sample: setattr(sample, "status", Status.COMPLETED)),
    "requests are left under way: {'another'}": untidy,
    "the engine failed, and samples came back": stubborn,
}  # fmt: skip


@pytest.mark.parametrize("words", BROKEN)
def test_a_generator_that_breaks_a_property_is_caught(words):
    with pytest.raises((AssertionError, MilesError), match=words):
        generator_contract(BROKEN[words])
