"""Ranks and conversions of these tests."""

from miles_megatron.testing.fixtures import convert, one, two  # noqa: F401
