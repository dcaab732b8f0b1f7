"""Ranks of these tests."""

from miles_megatron.testing.fixtures import one, two  # noqa: F401
