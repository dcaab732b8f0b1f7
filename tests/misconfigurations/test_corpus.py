"""The plan refuses what people have reported, and accepts what runs."""

from __future__ import annotations

import pytest

from tests.misconfigurations.measure import ACCEPTED, LATER, REFUSED, cases, collection, good, outcome

SHARE = 0.95


def misses(some: list[dict]) -> tuple[float, list[str]]:
    """The share of cases that are refused, and those that are not."""
    found = {case["id"]: outcome(case) for case in some}
    left = [f"{name}: {one.verdict} {one.sentence}".strip() for name, one in found.items() if one.verdict != REFUSED]
    return 1 - len(left) / len(found), left


def test_reported_mistakes_are_refused():
    share, left = misses(cases(held_out=False))
    print(f"{share:.1%} refused; not:", *left, sep="\n  ")
    assert share >= SHARE, left


@pytest.mark.slow
def test_reported_mistakes_that_nobody_looked_at_are_refused():
    share, left = misses(cases(held_out=True))
    print(f"{share:.1%} refused")
    assert share >= SHARE, f"{len(left)} are not"


HANDLED = {
    "dense-layers-of-two-gpus": "SGLang 0.5.16 takes the tensor-parallel size too",
    "token-limit-below-prompt-and-response": "a longer sample gets a micro-batch of its own, which a note announces",
    "answers-that-cannot-end": "a run may measure with answers of one length",
    "turns-end-where-answers-do-not": "policies that are trained from base models learn where to end",
    "groups-of-four-bits-cut-by-the-engine": "no server of SGLang has been seen to serve them",
    "microbatch-tokens-below-one-sequence": "a longer sample gets a micro-batch of its own, which a note announces",
    "full-recompute-without-method": "Miles says the two others to Megatron",
    "gpus-hidden-from-the-engine": "a run may be planned where its GPUs are not",
    "learning-rate-zero": "a run may measure without training",
    "token-beyond-the-vocabulary": "published models have a token that no text of theirs contains (gemma-3-1b)",
    "end-of-text-where-turns-end-otherwise": "policies that are trained from base models learn where to end",
    "auxiliary-loss-on-a-dense-model": "scripts for mixtures train dense models too, where the term is not there",
    "template-ends-the-last-answer-differently": "in a run an answer is never the last message that is rendered",
    "one-reward-for-a-whole-group": "the first group that is scored ends the run: rewards are one for each sample",
}
"""Cases of later collections that run here as they are, or end with a sentence once they run."""


@pytest.mark.parametrize("name", LATER)
def test_reported_mistakes_of_later_collections_are_refused(name):
    share, left = misses([case for case in collection(name) if case["id"] not in HANDLED])
    assert share == 1, left


@pytest.mark.parametrize("run", good(), ids=lambda run: run["id"])
def test_good_runs_are_planned(run):
    found = outcome(run)
    assert found.verdict == ACCEPTED, found.sentence
