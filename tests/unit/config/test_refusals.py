"""What plugins state about runs that cannot be meant: rules of the manifest, estimators that compare, scorers."""

import json

import pytest

from miles_core.errors import ConfigError, ManifestError
from miles_core.plugins import manifest

PLUGIN = '''
from dataclasses import dataclass
from miles_core import hookimpl, option

@dataclass(frozen=True, kw_only=True)
class Options:
    """Options."""

    width: int | None = option(None, "A width.")
    words: list[str] = option([], "Words.")
    my_path: str | None = option(None, "A function.")

class One:
    """A plugin."""

    provides = {provides!r}
    refuses = {refuses!r}

    def __init__(self, options: Options): ...

    @hookimpl(name="one-reward")
    def reward(self, sample): ...
'''


@pytest.fixture
def ruled(plan, tmp_path):
    """(when, *flags) -> the plan with a plugin that refuses this; provides=... in its place."""
    def make(when, *flags, provides=(), rule=None):
        rules = (rule or {"when": when, "what": "it cannot be meant", "fix": "mend it"},) if when or rule else ()
        (tmp_path / "one.py").write_text(PLUGIN.format(refuses=rules, provides=provides))
        return plan("--plugin", tmp_path / "one.py", *flags)

    return make


@pytest.mark.parametrize(("when", "bad", "good"), [
    ({"one.width": 5}, ["--one.width", 5], ["--one.width", 4]),
    ({"one.width": {"set": True}}, ["--one.width", 4], []), ({"one.width": {"set": False}}, [], ["--one.width", 4]),
    ({"one.width": {"set": True}, "rollout.max_lag": {"not": 0}}, ["--one.width", 4, "--max-lag", 1], ["--max-lag", 1]),
    ({"one.words": "a"}, ["--one.words", "b", "a"], ["--one.words", "b"]),
    ({"one.words": {"not": "a"}}, ["--one.words", "b"], ["--one.words", "b", "a"]),
    ({"rollout.prompt_data": {"like": r".*\.txt"}}, ["--prompt-data", "data/a.txt"], []),
    ({"one.words": {"unlike": "a.*"}}, ["--one.words", "b"], ["--one.words", "b", "ab"]),
    ({"reward": "one-reward"}, ["--rm-type", "one-reward"], []),
    ({"unfinished": {"set": True}}, ["--plugin", "partial-rollout"], []),
    ({"server.tp_size": 1, "engine": "sglang"}, ["--engine", "sglang", "--sglang-tp-size", 1], ["--engine", "sglang"]),
    ({"megatron.recompute_granularity": "full"}, ["--recompute-granularity", "full"], []),
    ({"tis.use_tis": True}, ["--use-tis"], []),
    ({"architecture.layers": 2}, ["--num-layers", 2], ["--num-layers", 4]),
])
def test_a_rule_holds_or_not(ruled, when, bad, good):
    with pytest.raises(ConfigError, match="plugin one: it cannot be meant.*Fix: mend it"):
        ruled(when, *bad)
    ruled(when, *good)


@pytest.mark.parametrize("rule", [
    {"when": {"one.height": 1}}, {"when": {"no_such_hook": 1}}, {"when": {"one.width": {"higher": 1}}}, {"when": {}},
    {"when": {"rollout.no_such": 1}}, {"when": {"one.width": 1}, "more": 1}, {"when": {"architecture.size": 1}},
])
def test_a_rule_that_cannot_be_read_names_the_plugin(ruled, rule):
    with pytest.raises(ManifestError, match="what plugin 'one' refuses cannot be read"):
        ruled(None, rule={"what": "x", "fix": "y", **rule})


def test_rules_are_the_same_in_the_manifest_and_in_the_code(tmp_path):
    import tomllib

    rules = ({"when": {"one.width": {"set": True, "unlike": r"\d+"}, "reward": "a"}, "what": "x", "fix": "y"},)
    (tmp_path / "one.py").write_text(PLUGIN.format(refuses=rules, provides=()))
    read = manifest.of_source(tmp_path / "one.py")
    assert read.refuses == rules
    assert manifest.of_toml(tomllib.loads(manifest.to_toml(read)), "").refuses == rules


def test_a_function_that_an_option_names_is_there(ruled, tmp_path):
    (tmp_path / "mine.py").write_text("def score(args, sample): ...\n")
    for value, message in ((f"{tmp_path}/none.py:score", "cannot be imported .got no such file"),
                           (f"{tmp_path}/mine.py:scroe", "no 'scroe'")):
        with pytest.raises(ConfigError, match=message):
            ruled(None, "--one.my-path", value)
    ruled(None, "--one.my-path", f"{tmp_path}/mine.py:score")


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"])
def test_one_answer_has_nothing_to_be_compared_with(plan, estimator):
    with pytest.raises(ConfigError, match=f"{estimator} compares the answers to one prompt"):
        plan("--advantage-estimator", estimator, "--n-samples-per-prompt", 1)
    plan("--advantage-estimator", estimator, "--n-samples-per-prompt", 2)


@pytest.mark.parametrize("flags", [
    ("--advantage-estimator", "reinforce_plus_plus"), ("--disable-rewards-normalization",),
    ("--num-rollout", 0, "--save", "x"),
    ("--debug-rollout-only",), ("--use-opd", "--opd-teacher-load", "x"),
])
def test_where_nothing_is_compared_one_answer_is_enough(plan, flags):
    changes = {'"grpo"': ""} if flags[0] == "--advantage-estimator" else {}
    plan(*flags, "--n-samples-per-prompt", 1, **changes)


def test_answers_are_scored_and_labels_are_read(plan, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    data, nobody = ("--prompt-data", path), {'rm_type = ["math"]': ""}
    with pytest.raises(ConfigError, match="nobody scores the answers"):
        plan(*data, **nobody)
    with pytest.raises(ConfigError, match="'math' compares with labels, and none are read"):
        plan(*data)
    plan(*data, "--label-key", "label")
    plan(*data, "--rm-type", "format")
    plan(**nobody)  # the prompts are elsewhere: a plan, not yet a run


@pytest.mark.parametrize(("flags", "message"), [
    (("--rm-url", "reward.py"), "no address of a reward service"), (("--rm-url", "http://a/b"), "nobody would ask"),
    (("--rm-type", "remote_rm"), "where the reward service is"), (("--rm-type", "custom"), "needs a function"),
    (("--custom-rm-path", "a.b"), "nothing calls the function of custom_rm_path"),
    (("--loss-type", "custom_loss"), "--loss-type custom_loss needs a function"),
    (("--plugin", "ppo"), "a critic that nobody asks"),
    (("--plugin", "dapo-filter", "--n-samples-per-prompt", 1, "--disable-rewards-normalization"), "dapo"),
    (("--use-rollout-routing-replay", "--engine", "sglang", "--no-sglang-enable-return-routed-experts"),
     "the engine would not tell it"),
])
def test_official_plugins_state_what_they_refuse(plan, flags, message):
    with pytest.raises(ConfigError, match=message):
        plan(*flags)
