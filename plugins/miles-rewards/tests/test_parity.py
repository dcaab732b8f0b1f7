"""Scores of radixark Miles's own functions, stored in upstream/, against those of the scorers here.

pairs.py draws the answers. EXCEPTIONS has every kind of difference, its reason and how many pairs it concerns.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from miles_rewards.ifbench import installed
from miles_rewards.plugin import Rewards, RewardsOptions

from miles_core.config.tables import RunConfig
from miles_core.errors import RewardError
from miles_core.types import Prompt, Sample

NO_LABEL = "a row without a label is an error here; there it scores 0, or is Python's ValueError"
NO_INTEGER = "a label that is no number is a RewardError that names the row; there it is Python's ValueError"
NOTHING_RIGHT = "neither label nor row says what is right: an error here, a 0 there"

EXCEPTIONS: dict[str, dict[str, int]] = {
    "deepscaler": {NO_LABEL: 77},
    "gemma_math": {NO_LABEL: 83},
    "dapo": {NO_LABEL: 51, NO_INTEGER: 36},
    "boxed_dapo": {NO_LABEL: 35, NO_INTEGER: 35},
    "f1": {NO_LABEL: 57},
    "boxed_f1": {NO_LABEL: 56},
    "gpqa": {NOTHING_RIGHT: 185},
    "boxed_gpqa": {NOTHING_RIGHT: 189},
}
"""Scorer -> reason -> number of pairs."""


def drawn() -> ModuleType:
    """pairs.py, which stands beside this file and belongs to no package."""
    spec = importlib.util.spec_from_file_location("rewards_pairs", Path(__file__).with_name("pairs.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewards_pairs"] = module
    spec.loader.exec_module(module)
    return module


PAIRS = drawn()


@pytest.fixture(scope="module")
def scorers():
    plugin = Rewards(RewardsOptions(grading_timeout=60.0), RunConfig())
    yield plugin
    plugin.finish()


def scored(plugin: Rewards, kind: str, pair: Any) -> Any:
    """What upstream/ has for a pair: a number, for dapo with the prediction; or why it was refused."""
    sample = Sample(Prompt(0, 0, "", (1,), label=pair.label, metadata=pair.row), 0, text=pair.response)
    sample.columns["tokens"] = np.array(pair.row.get("tokens", []), dtype=np.int32)
    try:
        value = getattr(plugin, kind)(sample)
    except RewardError as error:
        if pair.label is not None and not pair.label.strip() and "no label" in str(error):
            return NO_LABEL
        return NOTHING_RIGHT if "gpqa" in kind else NO_INTEGER
    assert not sample.metadata.get("figures", {}).get(f"{kind}_ungraded"), pair
    return [value["score"], sample.metadata["dapo_pred"]] if isinstance(value, dict) else value


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.skipif(not installed(), reason="needs IFBench: pip install ifbench")
                 if kind == "ifbench" else ()) for kind in PAIRS.KINDS])
def test_scores_are_those_of_radixark_miles(scorers, kind):
    pairs = PAIRS.pairs(kind)
    stored = json.loads((Path(__file__).parent / "upstream" / f"{kind}.json").read_text(encoding="utf-8"))
    assert len(pairs) >= 2000 and stored["pairs"] == PAIRS.digest(pairs), "other pairs than were stored"
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda pair: scored(scorers, kind, pair), pairs))
    refused = Counter(one for one in found if isinstance(one, str))
    assert refused == EXCEPTIONS.get(kind, {})
    assert {theirs for theirs, ours in zip(stored["scores"], found, strict=True) if isinstance(ours, str)} <= {
        0, "ValueError"}
    wrong = [(pair, theirs, ours) for pair, theirs, ours in zip(pairs, stored["scores"], found, strict=True)
             if not isinstance(ours, str) and theirs != (ours if isinstance(ours, list) else pytest.approx(ours))]
    assert wrong == []


def test_every_scorer_has_right_and_wrong_answers():
    for kind in PAIRS.KINDS:
        stored = json.loads((Path(__file__).parent / "upstream" / f"{kind}.json").read_text(encoding="utf-8"))
        scores = [one[0] if isinstance(one, list) else one for one in stored["scores"] if not isinstance(one, str)]
        best = sum(score == 1 for score in scores)
        assert 100 < best < len(scores) - 100, kind
