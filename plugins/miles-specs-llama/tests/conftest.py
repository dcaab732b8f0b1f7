"""Conversions of these tests."""

from miles_megatron.testing.fixtures import convert  # noqa: F401
