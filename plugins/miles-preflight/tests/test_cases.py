"""The plan refuses what people have reported, and accepts what runs."""

from __future__ import annotations

import pytest
from measure import ACCEPTED, REFUSED, cases, good, outcome

EACH = [pytest.param(case, id=case["id"], marks=[pytest.mark.full] * (number % 4 > 0))
        for number, case in enumerate(cases())]
"""Every fourth is a case of the gate."""


@pytest.mark.parametrize("case", EACH)
def test_reported_mistakes_are_refused(case):
    said = outcome(case)
    assert said.verdict == REFUSED and "Fix: " in said.sentence, said


@pytest.mark.parametrize("run", good(), ids=lambda run: run["id"])
def test_good_runs_are_planned(run):
    said = outcome(run)
    assert said.verdict == ACCEPTED, said.sentence
