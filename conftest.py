"""For the tests of all packages; what fixtures tests/ shares is in tests/conftest.py."""

import gc

import pytest

pytest_plugins = ["tests.cpu_budget", "miles_megatron.testing.fixtures"]


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """What is imported by now stays; tests that collect garbage, trainers' above all, need not go through it."""
    gc.collect()
    gc.freeze()
