"""Ranks and conversions of these tests."""

from miles_core.testing.fixtures import convert, one, two  # noqa: F401
