"""The scorers as the core calls them: rows that do not fit, hostile answers, dicts, draws, and IFBench's process."""

import asyncio
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from miles_rewards.deepscaler import Comparison
from miles_rewards.ifbench import installed, question
from miles_rewards.plugin import Rewards, RewardsOptions
from miles_rewards.symbolic import equal
from sympy.parsing import sympy_parser

from miles_core.config.tables import Eval, Rollout, RunConfig
from miles_core.errors import ConfigError, RewardError
from miles_core.stages.metrics import figures
from miles_core.stages.reward import Scoring, weighted_sum
from miles_core.types import Group, Prompt, Sample


@pytest.fixture
def scorers():
    made = []

    def make(**options):
        made.append(Rewards(RewardsOptions(**options), RunConfig()))
        return made[-1]

    yield make
    for plugin in made:
        plugin.finish()


@pytest.fixture(scope="module")
def lone():
    """A plugin with one process for all tests: who ends it leaves none, and the next one to ask starts another."""
    plugin = Rewards(RewardsOptions(grading_timeout=1.0, grading_processes=1), RunConfig())
    yield plugin
    plugin.finish()


def sample(text, label="46", index=0, **row):
    return Sample(Prompt(7, 5, "12+34=", (1,), label, row), index, {"tokens": np.arange(3, dtype=np.int32)}, text=text)


def test_scores(scorers):
    plugin = scorers()
    assert plugin.deepscaler(sample(r"<think>?</think>\boxed{46}")) == 1.0
    assert plugin.deepscaler(sample(r"\boxed{46}")) == 0.0
    assert plugin.gemma_math(sample(r"\boxed{46}")) == 1.0
    assert plugin.dapo(sample("Answer: 46")) == {"score": 1.0, "acc": 1.0}
    assert plugin.dapo(sample("46")) == {"score": -1.0, "acc": 0.0}
    assert plugin.boxed_dapo(sample(r"\boxed{Answer: 46}")) == {"score": 1.0, "acc": 1.0}
    assert plugin.f1(sample("The red cat", "a red dog")) == 0.5
    assert plugin.f1(sample("The red cat<|im_end|>", "a red cat")) == 1.0, "what ends a turn is no part of a word"
    for end in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>"):
        assert plugin.dapo(sample(f"Answer: 42{end}", "42"))["score"] == 1.0, "nor of a number"
    assert plugin.gpqa(sample("The answer is B", "B")) == plugin.boxed_gpqa(sample(r"\boxed{B}", "B")) == 1.0


def test_a_number_is_the_place_of_the_right_choice(scorers):
    """As MMLU has it; the text "2" is a choice's."""
    plugin = scorers()
    for label, raw_label, scores in (("2", 2, [1.0, 0.0]), ("2", None, [0.0, 1.0])):
        asked = [sample(f"The answer is {letter}", label, choices=["0", "2", "4", "6"]) for letter in "CB"]
        for one in asked:
            one.prompt = replace(one.prompt, raw_label=raw_label)
        assert [plugin.gpqa(one) for one in asked] == scores
    outside = sample("The answer is 9", "9")
    outside.prompt = replace(outside.prompt, raw_label=9)
    with pytest.raises(RewardError):
        plugin.gpqa(outside)


@pytest.mark.parametrize("name", ["deepscaler", "gemma_math", "dapo", "boxed_dapo", "f1", "boxed_f1", "gpqa", "gsm8k"])
@pytest.mark.parametrize("label", [None, "", "  "])
def test_a_row_without_a_label_is_named(scorers, name, label):
    with pytest.raises(RewardError, match=r"row 5.*--label-key"):
        getattr(scorers(), name)(sample(r"</think>\boxed{46}", label))


@pytest.mark.parametrize("scorer", ["dapo", "gsm8k"])
def test_a_label_that_should_be_a_number_is_named(scorers, scorer):
    with pytest.raises(RewardError, match="row 5"):
        getattr(scorers(), scorer)(sample("Answer: x", "x+1"))


HOSTILE = {
    "nested braces": "{" * 10**6 + "}" * 10**6, "open braces": "{" * 10**6, "boxes": r"\boxed{" * 10**5 + "}" * 10**5,
    "a tower": "9**9**9**9", "a long text": "x" * 100_000, "a long number": "9" * 100_000, "blanks": " " * 10**6,
    "phrases": "answer" + " " * 10**5 + "is", "brackets": "(" * 3000 + ")" * 3000, "a factorial": "99999999!",
    "fractions": r"\frac{1}{" * 300 + "2" + "}" * 300, "dollars": "Answer: " + "$" * 10**5, "roots": r"\sqrt" * 10**5,
}  # fmt: skip


@pytest.mark.parametrize("name", ["deepscaler", "dapo", "f1", "gpqa", "boxed_f1", "boxed_gpqa"])
@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_scores_no_more_than_0_in_bounded_time(lone, name, answer):
    hostile = sample(rf"</think>\boxed{{{HOSTILE[answer]}}}", "46" if name == "dapo" else "x/2")
    begin = time.process_time()
    score = getattr(lone, name)(hostile)
    assert (score["score"] if isinstance(score, dict) else score) <= 0
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("answer", ["a tower", "a long text", "a factorial"])
def test_what_nobody_can_judge_is_counted_and_the_next_answer_judged(lone, answer):
    hostile, usual = (sample(rf"</think>\boxed{{{text}}}", "x/2") for text in (HOSTILE[answer], "0.5x"))
    assert lone.deepscaler(hostile) == 0.0
    assert hostile.metadata["figures"] == {"deepscaler_ungraded": 1.0} and hostile.metadata["deepscaler_ungraded"]
    assert lone.deepscaler(usual) == 1.0
    assert usual.metadata == {"figures": {"deepscaler_ungraded": 0.0}}


def test_expressions_know_nothing_of_python():
    comparison = Comparison(timeout=5.0, processes=1)
    try:  # id is a function of Python's, and here the product of two letters
        assert comparison.right(r"\boxed{2id}", "2*d*i")
    finally:
        comparison.close()


@pytest.mark.parametrize("way", ["a text for a function", "an attribute"])
def test_an_answer_that_reaches_for_python_is_not_evaluated(way, tmp_path, monkeypatch):
    """SymPy's functions evaluate a text with all of Python's functions; octal digits and numerals are no letters."""
    code = f"open({str(tmp_path / 'made')!r}, 'w')"
    octal = "".join(rf"\textbackslash{{}}{ord(sign):03o}" for sign in code)
    evaluated, evaluate = [], sympy_parser.eval_expr
    monkeypatch.setattr(sympy_parser, "eval_expr", lambda *given: evaluated.append(given) or evaluate(*given))
    answer = {"a text for a function": f"re('{octal}')", "an attribute": "().__ⅽⅼass__"}[way]
    assert not equal(answer, r"\frac{1}{2}")
    assert not (tmp_path / "made").exists() and not evaluated
    assert equal("x/2", "0.5x") and evaluated, "what is arithmetic is"


def test_draws_are_those_of_the_seed_the_prompt_and_the_place(scorers):
    drawn = [[scorers().random(sample("", index=index)) for index in range(64)] for _ in range(2)]
    assert drawn[0] == drawn[1] and set(drawn[0]) == {0.0, 1.0}
    assert scorers().deterministic_random(sample("a")) in (0.0, 1.0)


@pytest.mark.parametrize(("given", "asked"), [
    ([{"N": 1}, {"n": None, "m": 2}], [("a", {"N": 1}), ("b", {"m": 2})]),
    ({"N": 1}, [("a", {"N": 1}), ("b", {"N": 1})]),
    ([{"N": 1}], [("a", {"N": 1}), ("b", {"N": 1})]),
    ([{"N": 1}, "x", {"N": 3}], [("a", {"N": 1}), ("b", {})]),
    (None, [("a", {}), ("b", {})]),
])  # fmt: skip
def test_arguments_of_instructions(given, asked):
    row = {"instruction_id_list": [" a", "", None, "b "], "kwargs": given}
    assert question("hi", row) == {"response": "hi", "prompt": "", "instructions": asked}


CHECKERS = '''
class Checker:
    def __init__(self, name):
        self.name = name
    def build_description(self, *, N=0, prompt=""):
        self.least, self.prompt = N, prompt
    def get_instruction_args(self):
        return {"prompt": self.prompt} if self.name in ("about", "ends") else None
    def check_following(self, text):
        while self.name == "hangs":
            pass
        if self.name == "ends":
            return text.endswith(self.prompt)
        return text.count(str(10 // self.least)) > 0 if self.name == "count:numbers" else self.prompt in text
INSTRUCTION_DICT = {name: Checker for name in ("count:numbers", "about", "ends", "hangs")}
'''


@pytest.mark.skipif(installed(), reason="the real checkers are here: test_parity.py asks them")
def test_a_process_asks_the_checkers(scorers, tmp_path, monkeypatch):
    """A package of IFBench's form in place of the real one, which not every package index has."""
    (tmp_path / "ifbench").mkdir()
    (tmp_path / "ifbench" / "__init__.py").touch()
    (tmp_path / "ifbench" / "instructions_registry.py").write_text(CHECKERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plugin = scorers(grading_timeout=1.0, grading_processes=1)

    def score(text, *names, **row):
        asked = sample(text, None, instruction_id_list=list(names), **row)
        return plugin.ifbench(asked), asked.metadata["figures"]["ifbench_ungraded"]

    assert score("5", "count:numbers", kwargs=[{"N": 2}]) == (1.0, 0.0)
    assert score("6", "count:numbers", kwargs=[{"N": 2}]) == (0.0, 0.0)
    assert score("5", "count:numbers", "about", kwargs=[{"N": 2}, {}], prompt_text="hey") == (0.0, 0.0)
    assert score("5 hey", "count:numbers", "about", kwargs=[{"N": 2}, {}], prompt_text="hey") == (1.0, 0.0)
    assert score("5 hey<|im_end|>", "ends", prompt_text="hey") == (1.0, 0.0)
    assert score(" ", "about") == (0.0, 0.0)
    assert score("x", "count:numbers", kwargs=[{"N": 0}]) == (0.0, 1.0)
    assert score("x", "hangs") == (0.0, 1.0)
    assert plugin.boxed_ifbench(sample(r"\boxed{5}", None, instruction_id_list=["about"], kwargs=[])) == 1.0
    for row in ({}, {"instruction_id_list": ["nobody"]}, {"instruction_id_list": ["about"], "kwargs": [{"M": 1}]}):
        with pytest.raises(RewardError, match="row 5"):
            plugin.ifbench(sample("x", None, **row))


@pytest.mark.skipif(installed(), reason="the checkers are here")
@pytest.mark.parametrize("config", [{"rollout": {"rm_type": ["ifbench"]}},
                                    {"eval": {"datasets": [{"name": "a", "path": "a", "rm_type": "ifbench"}]}}])
def test_without_the_checkers_the_plan_says_what_installs_them_and_the_start_refuses(config):
    """The machine of a plan may be another one."""
    tables = {"rollout": Rollout, "eval": Eval}
    run = RunConfig(**{name: tables[name](**given) for name, given in config.items()})
    notes: list[str] = []
    plugin = Rewards(RewardsOptions(), run)
    assert plugin.check(run, notes.append) == run and "pip install ifbench" in notes[0]
    with pytest.raises(ConfigError, match="pip install ifbench"):
        plugin.begin()
    other = Rewards(RewardsOptions(), RunConfig())
    assert other.check(RunConfig(), notes.append) == RunConfig() and len(notes) == 1
    other.begin()


@pytest.mark.parametrize("name", ["grading_timeout", "grading_processes"])
def test_options_are_checked(name):
    with pytest.raises(ConfigError, match=name):
        Rewards(RewardsOptions(**{name: 0}), RunConfig())


def test_the_plugin_module_imports_nothing_heavy():
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import miles_rewards.plugin, miles_rewards.deepscaler;"
        "assert not {'torch', 'sympy', 'pylatexenc', 'ifbench', 'nltk'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_group_of_hostile_answers_has_scores_within_its_time():
    """The core gives a whole group rm_timeout, and ends the run when that is over."""
    run = RunConfig(rollout=Rollout(n_samples_per_prompt=3, rm_timeout=3.0))
    plugin = Rewards(RewardsOptions(grading_timeout=60.0, grading_processes=1), run)
    prompt = Prompt(7, 5, "", (1,), "x/2")
    group = Group(prompt, [Sample(prompt, index, text=r"</think>\boxed{9**9**9**9}") for index in range(3)])
    scoring = Scoring({"deepscaler": plugin.deepscaler}, {"deepscaler": 1.0}, weighted_sum, 120.0)  # for a busy machine
    rewards = [one.reward for one in asyncio.run(scoring(group)).samples]
    plugin.finish()
    assert rewards == [0.0] * 3
    assert figures(group.samples) == {"deepscaler_ungraded": 1.0, "reward/deepscaler": 0.0}
