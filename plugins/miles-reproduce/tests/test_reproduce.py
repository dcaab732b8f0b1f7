"""`miles reproduce` with real runs of a tiny model: a claim is made, held, and missed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from miles_reproduce.runs import curve, run
from miles_testing.forked import miles

from miles_core.errors import ConfigError
from miles_core.record.events import EventLog

ROOT = Path(__file__).parents[3]
RUN_FILE = (ROOT / "examples/steps/sums.toml").read_text()


@pytest.fixture
def recipe(tmp_path):
    folder = tmp_path / "short"
    folder.mkdir()
    text = RUN_FILE.replace("num_rollout = 5", "num_rollout = 1")
    text = text.replace("rollout_batch_size = 16", "rollout_batch_size = 2")
    (folder / "recipe.toml").write_text(text)
    (folder / "claim.toml").write_text('metric = "rollout/raw_reward"\nstep = 1\n')
    return folder


def reproduce(*words: object):
    return miles(["reproduce", *map(str, words)], ROOT, timeout=120)


@pytest.mark.full
def test_a_claim_is_made_then_held_then_missed(recipe, tmp_path):
    outcome = reproduce(recipe, "--seeds", 2, "--write-claim", "--out", tmp_path / "first")
    assert outcome.code == 0, outcome.err
    claim = tomllib.loads((recipe / "claim.toml").read_text())
    assert len(claim["measured"]["values"]) == 2 and claim["measured"]["steps"] == [1]
    assert (recipe / "curve.svg").exists() and (recipe / "recipe.lock").exists()

    again = reproduce(recipe, "--out", tmp_path / "again")
    assert again.code == 0 and "another version" not in again.out and "--first-seed 2" in again.out
    assert f"{claim['measured']['values'][0]:.4f}" in again.out

    other = reproduce(recipe, "--first-seed", 7, "--out", tmp_path / "other")
    plan = json.loads((tmp_path / "other" / "seed-7" / "run" / "plan.json").read_text())["options"]
    assert plan["optimizer.seed"] == plan["rollout.rollout_seed"] == 7 and "--first-seed" not in other.out

    run_file = recipe / "recipe.toml"
    run_file.write_text(run_file.read_text().replace('["math"]', '["format"]'))  # every answer has it
    missed = reproduce(recipe, "--out", tmp_path / "missed")
    inside = claim["measured"]["low"] <= 1 <= claim["measured"]["high"]
    assert missed.code == (0 if inside else 1) and "another version" in missed.out
    assert "rm_type" in missed.out and (tmp_path / "missed" / "curve.svg").exists()

    author = 'metric = "rollout/raw_reward"\nstep = 1\n\n[[prepare]]\nmakes = "nothing"\ncommand = "{}"\n'
    for command, code in (("python no-such-file.py", "recipe-command-failed"),
                          ("python -V", "recipe-preparation-empty")):
        (recipe / "claim.toml").write_text(author.format(command))
        failed = reproduce(recipe, "--seeds", 2, "--write-claim", "--out", tmp_path / "failed")
        assert failed.code == 1 and code in failed.err and command in failed.err


def test_nothing_runs_without_a_claim_to_compare_with(recipe):
    for words, code in (((recipe,), "claim-not-measured"), (("no-such-recipe",), "recipe-unknown")):
        outcome = reproduce(*words)
        assert outcome.code == 2 and code in outcome.err
    assert reproduce(recipe, "--write-claim").code == 2
    assert reproduce(recipe, "--write-claim", "--seeds", 2, "--first-seed", 1).code == 2


def test_a_folder_of_an_earlier_run_is_named(tmp_path):
    with pytest.raises(ConfigError) as error:
        run(tmp_path / "recipe.toml", 0, tmp_path)
    assert error.value.code == "recipe-folder-taken" and str(tmp_path) in str(error.value)


def test_what_was_not_finite_is_no_value_of_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    log = EventLog(tmp_path / "run" / "events.jsonl")
    for at, loss in enumerate((0.5, float("nan"), 0.25)):
        log.append("metrics", at, metrics={"train/loss": loss})
    log.close()
    assert curve(tmp_path, "train/loss") == [(1, 0.5), (3, 0.25)]


@pytest.mark.parametrize(("begins", "refused"), [((4,), True), ((None, 4), False)], ids=["resumed", "restarted"])
def test_a_run_that_went_on_from_another_seeds_checkpoint_is_no_outcome(tmp_path, begins, refused):
    """It would only evaluate what that one has trained; --max-restarts goes on from the run's own."""
    (tmp_path / "run").mkdir()
    log = EventLog(tmp_path / "run" / "events.jsonl")
    for first in begins:
        log.run_start("a1b2", {}, resumed_from=first, rollouts=4)
    log.append("metrics", 4, metrics={"train/loss": 0.5})
    log.close()
    if not refused:
        assert curve(tmp_path, "train/loss") == [(5, 0.5)]
        return
    with pytest.raises(ConfigError) as error:
        curve(tmp_path, "train/loss")
    assert error.value.code == "recipe-resumes" and "4" in error.value.got
