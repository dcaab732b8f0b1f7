"""Test kits: what authors of plugins run to know that a part does what the core counts on.

    from miles_testing import plugin_contract

    TestContract = plugin_contract("my-plugin")

Everything is imported when it is asked for: listing tests must not cost what running them does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for checkers of types, which do not see what __getattr__ gives
    from miles_testing.advantages import advantage_contract
    from miles_testing.batches import make_batch, make_sample
    from miles_testing.buffers import buffer_contract
    from miles_testing.contract import plugin_contract
    from miles_testing.engines import engine_contract
    from miles_testing.filters import filter_contract
    from miles_testing.generators import generator_contract
    from miles_testing.losses import loss_contract
    from miles_testing.rewards import reward_contract
    from miles_testing.runs import resume_contract, toy_run
    from miles_testing.sample_inputs import canned_samples
    from miles_testing.syncs import sync_contract
    from miles_testing.tiny import tiny_checkpoint
    from miles_testing.toy import toy_group
    from miles_testing.trainers import trainer_contract

_WHERE = {
    "advantage_contract": "advantages", "buffer_contract": "buffers", "canned_samples": "sample_inputs",
    "engine_contract": "engines", "filter_contract": "filters", "generator_contract": "generators",
    "loss_contract": "losses", "make_batch": "batches", "make_sample": "batches",
    "plugin_contract": "contract", "resume_contract": "runs", "reward_contract": "rewards", "sync_contract": "syncs",
    "tiny_checkpoint": "tiny", "toy_group": "toy", "toy_run": "runs", "trainer_contract": "trainers",
}  # fmt: skip
"""Name -> module of this package that has it."""

__all__ = [
    "advantage_contract", "buffer_contract", "canned_samples", "engine_contract", "filter_contract",
    "generator_contract", "loss_contract", "make_batch", "make_sample", "plugin_contract",
    "resume_contract", "reward_contract", "sync_contract", "tiny_checkpoint", "toy_group", "toy_run",
    "trainer_contract",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
