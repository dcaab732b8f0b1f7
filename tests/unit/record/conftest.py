"""Answers to sums, as a run samples them."""

from __future__ import annotations

import numpy as np
import pytest

from miles_core.types import Prompt, Sample, Status

PIECES = [*(str(n) for n in range(20)), "+", "=", "<eos>"]
PLUS, EQUALS, EOS = (PIECES.index(piece) for piece in ("+", "=", "<eos>"))


@pytest.fixture
def make_sample():
    """(generator, prompt's uid, index in the group, skill, weight version) -> one scored answer to "a + b"."""

    def make(rng: np.random.Generator, uid: int, index: int, skill: float, version: int) -> Sample:
        a, b = uid * 7 % 10, uid * 3 % 10
        right = bool(rng.random() < skill)
        ids = [a + b if right else int(rng.integers(0, 19)), EOS]
        sample = Sample(
            Prompt(uid, uid, f"What is {a} + {b}?", (a, PLUS, b, EQUALS), label=str(a + b)), index,
            {"tokens": np.array([a, PLUS, b, EQUALS, *ids], np.int32), "loss_mask": np.ones(2, np.uint8),
             "versions": np.full(2, version, np.int32), "rollout_log_probs": -rng.random(2).astype(np.float32)},
            2, "".join(PIECES[token] for token in ids), Status.COMPLETED,
        )
        sample.rewards = {"math": float(right)}
        sample.reward = sample.rewards["math"]
        sample.columns["advantages"] = np.full(2, sample.reward - skill, np.float32)
        return sample

    return make


@pytest.fixture
def decode():
    """Token id -> text."""
    return lambda token: PIECES[token]
