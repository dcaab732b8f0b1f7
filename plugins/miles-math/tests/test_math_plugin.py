"""The scorers as the core calls them."""

import asyncio
import subprocess
import sys

import pytest
from miles_math.plugin import Math, MathOptions

from miles_core.config.tables import Rollout, RunConfig
from miles_core.errors import ConfigError, RewardError
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Group, Prompt, Sample


@pytest.fixture
def scorers():
    made = []

    def make(**options):
        made.append(Math(MathOptions(**options), RunConfig()))
        return made[-1]

    yield make
    for plugin in made:
        plugin.finish()


def sample(text, label="46"):
    return Sample(Prompt(uid=7, row=5, text="12+34=", token_ids=(1,), label=label), 0, text=text)


def test_math_and_boxed_math(scorers):
    plugin = scorers()
    assert plugin.math(sample(r"\boxed{46}")) == plugin.boxed_math(sample(r"\boxed{46}")) == 1.0
    assert plugin.math(sample(r"\boxed{45}")) == plugin.boxed_math(sample(r"\boxed{45}")) == 0.0
    assert plugin.math(sample("46")) == plugin.boxed_math(sample("46")) == 0.0


def test_without_a_box_the_last_expression_counts_where_one_says_so(scorers):
    plugin = scorers(boxed_only=False)
    assert plugin.math(sample("46")) == plugin.math(sample(r"\boxed{46}")) == 1.0
    assert plugin.boxed_math(sample("46")) == 0.0


def test_format(scorers):
    assert scorers().format(sample(r"so \boxed{1}<|im_end|>")) == 1.0
    assert scorers().format(sample("so 46")) == 0.0
    pattern = scorers(format_pattern=r"<think>.*</think>\s*\\boxed\{\d+\}")
    assert pattern.format(sample("<think>1\n2</think>\n\\boxed{3}<|im_end|>")) == 1.0
    assert pattern.format(sample("\\boxed{3}")) == 0.0


@pytest.mark.parametrize("label", [None, "", "  "])
def test_a_missing_label_names_the_row_and_the_flag(scorers, label):
    with pytest.raises(RewardError, match=r"row 5.*--label-key"):
        scorers().math(sample(r"\boxed{46}", label))


def test_what_cannot_be_graded_scores_nothing_and_says_so(scorers):
    hostile = sample(r"\boxed{9^{9^{9^9}}}")
    assert scorers(grading_timeout=1.0).math(hostile) == 0.0
    assert hostile.metadata["math_ungraded"] == "SIGPROF"


@pytest.mark.parametrize(
    ("name", "value"), [("format_pattern", "("), ("grading_timeout", 0.0), ("grading_processes", 0)]
)
def test_options_are_checked(name, value):
    with pytest.raises(ConfigError, match=name):
        Math(MathOptions(**{name: value}), RunConfig())


def test_scorers_work_in_a_worker_thread(scorers):
    plugin = scorers()
    assert asyncio.run(asyncio.to_thread(plugin.math, sample(r"\boxed{40+6}"))) == 1.0


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import miles_math.plugin;"
        "assert not {'torch', 'sympy', 'math_verify'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_group_of_hostile_answers_has_scores_within_its_time():
    """The core gives a whole group rm_timeout, and ends the run when that is over."""
    run = RunConfig(rollout=Rollout(n_samples_per_prompt=2, rm_timeout=1.0))
    plugin = Math(MathOptions(grading_timeout=60.0, grading_processes=1), run)
    group = Group(sample("").prompt, [sample(r"\boxed{10^{100000000}}") for _ in range(2)])
    scoring = Scoring({"math": plugin.math}, {"math": 1.0}, weighted_sum, 120.0)  # for a busy machine
    rewards = [one.reward for one in asyncio.run(scoring(group)).samples]
    plugin.finish()
    assert rewards == [0.0] * 2 and all(one.metadata["math_ungraded"] for one in group.samples)
