"""examples/README.md: each step is a run that does what its text says."""

import asyncio
import json

import pytest
from miles_testing import canned_samples, plugin_contract
from miles_testing.forked import miles

from miles_core.plugins.load import import_file
from miles_core.record.events import read
from tests.pages import ROOT, blocks, commands

SMALL = ["--no-live", "--num-rollout", "2", "--rollout-batch-size", "4"]
STEPS = [words[1:] for block in blocks(ROOT / "examples" / "README.md") for _, words in commands(block.text)]

TestNovel = plugin_contract(str(ROOT / "examples" / "steps" / "novel.py"), options={"rollout.rm_type": ["novel"]})
TestShort = plugin_contract(str(ROOT / "examples" / "steps" / "short.py"), options={"rollout.rm_type": ["short"]})


@pytest.fixture
def step(tmp_path):
    """(number, further flags) -> the run's metrics, by rollout, and its plan."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(number, *flags, name="run"):
        outcome = miles([*STEPS[number - 1], *SMALL, "--run-dir", name, *flags], tmp_path)
        assert outcome.code == 0, outcome.err
        events = read(tmp_path / name / "events.jsonl")
        return [event["metrics"] for event in events if event["event"] == "metrics"], \
            json.loads((tmp_path / name / "plan.json").read_text())

    run.folder = tmp_path
    return run


def plugins(plan):
    return [one["name"] for one in plan["plugins"] if one["origin"] != "default"]


def test_seven_steps_have_a_command():
    assert [words[0] for words in STEPS] == ["run"] * 7


def test_the_smallest_run_and_another_algorithm(step):
    metrics, plan = step(1)
    assert len(metrics) == 2 and {"grpo", "math"} == set(plugins(plan))
    assert "gspo" in plugins(step(2, name="other")[1])


@pytest.mark.full
def test_a_second_scorer_and_a_filter(step):
    metrics, _ = step(3)
    assert {"rollout/reward/math", "rollout/reward/format"} <= set(metrics[0])
    metrics, plan = step(4, name="other")
    assert "dapo-filter" in plugins(plan) and len(metrics) == 2


@pytest.mark.full
def test_a_plugin_of_ones_own(step):
    metrics, plan = step(5)
    assert "short" in plugins(plan) and 0 < metrics[0]["rollout/reward/short"] < 1


@pytest.mark.full
def test_state_comes_back_with_the_checkpoint(step):
    """Prompts come in the order of the file: the state has the rows of all rollouts, those before the resume too."""
    for rollouts, name in ((2, "run"), (3, "again")):
        metrics, _ = step(6, "--num-rollout", str(rollouts), name=name)
        saved = json.loads((step.folder / "runs" / "steps" / f"iter_{rollouts:07}" / "miles.json").read_text())
        rows = saved["state"]["plugins"]["novel"]["rollout"]["state"]["seen"]
        assert set(rows) == {f"train:{row}" for row in range(4 * rollouts)} and all(rows.values())
    assert len(metrics) == 1, "the second run went on with the third rollout"


def test_answers_that_came_before_are_worth_less():
    novel = import_file(ROOT / "examples" / "steps" / "novel.py")
    scorer, group = novel.Novel(novel.NovelOptions(old=0.25)), canned_samples()[:2]
    group[0].text, group[1].text = "4", "5"
    assert asyncio.run(scorer.reward(group)) == [1.0, 1.0]
    group[1].text = "6"
    assert asyncio.run(scorer.reward(group)) == [0.25, 1.0]
