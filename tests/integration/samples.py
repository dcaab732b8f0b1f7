"""Tests of many cases: some of them every time, the others when there is time."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def sampled(cases: Iterable, often: Collection) -> list:
    """Cases of a test; those that are not among `often` are slow: their neighbours show the same."""
    return [case if case in often else pytest.param(case, marks=pytest.mark.slow) for case in cases]
