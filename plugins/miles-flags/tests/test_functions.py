"""Functions that a launch script names by path: what of the run they stand for."""

import base64

import pytest
from miles_flags.functions import parts_of

from miles_core.config.load import load
from miles_core.config.tables import RunConfig


def derived(*words: str) -> tuple[RunConfig, list[str]]:
    """What becomes of flags, and the notes of it."""
    notes: list[str] = []
    return parts_of(load(None, words).config, notes.append), notes


@pytest.mark.parametrize("owner", ["miles", "slime"])
@pytest.mark.parametrize(("option", "function", "key", "value"), [
    ("--rollout-function-path", "rollout.sft_rollout.generate_rollout", "generate", "sft"),
    ("--rollout-function-path", "rollout.sglang_rollout.generate_rollout", "generate", "single-turn"),
    ("--rollout-function-path", "rollout.fully_async_rollout.generate_rollout_fully_async", "max_lag", 2),
    ("--data-source-path", "rollout.data_source.RolloutDataSourceWithBuffer", "prompt_source", "rows"),
])
def test_functions_of_miles_own_are_the_parts_that_do_their_work(owner, option, function, key, value):
    config, notes = derived(option, f"{owner}.{function}")
    assert getattr(config.rollout, key) == value
    assert not any(config.options["compat"].values()) and any(option in note for note in notes)


def test_a_function_of_a_users_own_has_the_schedule():
    config, _ = derived("--rollout-function-path", "mine.rollout", "--rm-type", "math")
    rollout = config.rollout
    assert (rollout.generate, rollout.prompt_source, rollout.rm_type) == ("custom", "custom", ["generated"])
    assert config.options["compat"]["scorer"] == "math", "which the function may ask"


@pytest.mark.parametrize(("flag", "generator"), [
    ("--custom-agent-function-path", "agentic_tool_call"), ("--generate-tool-specs-path", "multi_turn"),
    ("--rollout-sample-hook-path", "single_turn")])
def test_what_a_generate_function_looks_at_brings_one(flag, generator):
    config, _ = derived(flag, "a.b")
    assert config.rollout.generate == "custom"
    assert config.options["compat"]["custom_generate_function_path"].split(".")[-2] == generator


@pytest.mark.parametrize("flag", ["--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"])
def test_rewards_that_a_function_makes_are_not_compared_again(flag):
    """Either stands in Miles for the comparison within groups: equal rewards would become advantages of 0."""
    config, notes = derived(flag, "a.b")
    assert config.algorithm.rewards_normalization is False and any(flag in note for note in notes)
    assert derived(flag, "a.b", "--rewards-normalization")[0].algorithm.rewards_normalization


def test_a_teacher_of_miles_is_one_of_plugin_opd():
    functions = "miles.rollout.on_policy_distillation"
    words = ("--use-opd", "--opd-type", "sglang", "--custom-rm-path", f"{functions}.reward_func",
             "--custom-reward-post-process-path", f"{functions}.post_process_rewards", "--rm-url", "http://a:1/generate")
    config, _ = derived(*words)
    assert config.rollout.rm_type == ["on_policy_distillation"]
    assert config.options["opd"]["opd_teacher_urls"] == ["http://a:1/generate"]
    assert config.options["remote-rm"]["rm_url"] is None and not any(config.options["compat"].values())
    config, _ = derived(*words, "--opd-log-prob-top-k", "4")
    assert config.options["opd"]["opd_teacher_urls"] == ["http://a:1/generate"]


def test_without_labels_the_teacher_is_all_there_is_to_learn_from():
    config, notes = derived("--use-opd", "--opd-teacher-load", "teacher", "--rm-type", "math")
    assert config.rollout.rm_type == ["teacher_only"] and any("labels" in note for note in notes)
    config, _ = derived("--use-opd", "--opd-teacher-load", "teacher", "--rm-type", "math", "--label-key", "label")
    assert config.rollout.rm_type == ["math"]


def test_settings_that_are_options_of_the_run_set_them(tmp_path):
    text = "eps_clip: 0.3\nmine: 7\n"
    (tmp_path / "mine.yaml").write_text(text)
    for given in (str(tmp_path / "mine.yaml"), f"base64:{base64.b64encode(text.encode()).decode()}"):
        config, notes = derived("--custom-config-path", given)
        assert config.algorithm.eps_clip == 0.3 and len([note for note in notes if "eps_clip" in note]) == 1
