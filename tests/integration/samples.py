"""Tests of many cases: some of them every time, the others when there is time."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest


def sampled(cases: Iterable, gate: Collection, full: Collection = ()) -> list:
    """Cases of a test: those of the gate, those of the full tier, and the others, which are slow.

    Neighbours of a case show the same more often than not.
    """
    return [case if case in gate else pytest.param(case, marks=pytest.mark.full if case in full else pytest.mark.slow)
            for case in cases]
