"""The kit of trainers: Megatron's and a small one pass, and each check has a trainer that it catches."""

from __future__ import annotations

from pathlib import Path

import pytest
from miles_testing import trainer_contract, trainers

SMALL = Path(__file__).with_name("small.py")

BROKEN = {
    "begins late": r"a fresh start resumes at Resume\(rollout_id=1",
    "begins with a state": r"a fresh start resumes at Resume\(rollout_id=0, state=\{\}",
    "streams nothing": "the stream of weights is empty",
    "streams a tensor twice": "the stream of weights has embed twice",
    "trains while it scores": r"weights change before the optimizer step: \['layer'\]",
    "trains while it compares": r"weights change before the optimizer step: \['layer'\]",
    "log_probs of the whole sample": "log_probs of train prompt 0",
    "log_probs that are none": "log_probs of train prompt 0",
    "advantages of the whole sample": "advantages of train prompt 0",
    "advantages that are none": "advantages of train prompt 0",
    "log_probs above 0": "log-probs of train prompt 0 .* are above 0",
    "an empty metric": "metrics are finite floats, not {'advantage': None}",
    "an infinite metric": "metrics are finite floats, not {'loss': inf}",
    "returns other tokens": "the batch comes back as it was given",
    "does not step": "after an optimizer step no weight is another",
    "exports no config": "an export is a Hugging Face directory",
    "goes on late": "it goes on at 2 with",
    "loses the state": "it goes on at 1 with {}",
    "loads other weights": r"a resumed trainer has other weights than were saved: \['norm'\]",
    "loses a tensor": r"a resumed trainer has other weights than were saved: \['norm'\]",
    "forgets its momentum": "a resumed trainer trains otherwise than the one that went on",
    "steps on what is not finite": "a step on an advantage that is not a number goes through",
    "steps and then refuses": "a step that was refused has changed weights",
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_trainer_that_breaks_a_property_is_caught(fault, tmp_path):
    """In this process, as the small trainer holds no process group."""
    with pytest.raises(AssertionError, match=BROKEN[fault]):
        trainers._all(tmp_path, "small", [str(SMALL)], {"small.fault": fault}, None)


def test_trainers_pass():
    trainer_contract("small", plugins=[str(SMALL)])
    trainer_contract("megatron")
