"""A toy run trains with plugins, and an error of one comes out of it."""

from __future__ import annotations

import pytest
from miles_testing import resume_contract, toy_run

from tests.pages import ROOT, blocks


def test_a_toy_run_trains_with_plugins_within_five_seconds(tmp_path):
    (tmp_path / "loud.py").write_text("from miles_core import hookimpl\n\nclass Loud:\n    @hookimpl\n"
                                      "    def filter_group(self, group):\n        return 1 / 0\n")
    toy_run(steps=1)  # the session's imports
    run = toy_run(["grpo"], options={"rollout.max_lag": 1})
    assert len(run.metrics) == 2 and run.metrics[-1]["rollout/reward/toy"] >= 0
    assert run.seconds < 5  # 1 s on two quiet cores
    with pytest.raises(AssertionError, match="plugin loud .*hook filter_group: ZeroDivisionError"):
        toy_run([tmp_path / "loud.py"], steps=1)


@pytest.mark.full
def test_the_curriculum_of_the_docs_resumes_exactly_and_one_without_state_does_not(tmp_path):
    curriculum = tmp_path / "pass_rates.py"
    [source] = [block.text for block in blocks(ROOT / "docs/write-a-prompt-source.md") if block.what == curriculum.name]
    curriculum.write_text(source)
    resume_contract([curriculum], options={"rollout.prompt_source": "pass-rates"})
    curriculum.write_text(source.replace("dict(state[\"rates\"])", "{}"))
    with pytest.raises(AssertionError, match="metrics differ: rollout 1: .* instead of"):
        resume_contract([curriculum], options={"rollout.prompt_source": "pass-rates"})
