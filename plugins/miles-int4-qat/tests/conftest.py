"""Ranks of these tests."""

from miles_core.testing.fixtures import one, two  # noqa: F401
