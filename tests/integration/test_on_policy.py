"""The engine and the trainer agree to the last bit, in float32 on a CPU."""

import dataclasses

import pytest
from miles_megatron.testing.parity import Case
from miles_testing.forked import apart, miles
from miles_testing.tiny import run_file as write_run

from miles_core.record.events import read
from tests.integration.subsets import write_model


def gaps(folder):
    metrics = [event["metrics"] for event in read(folder / "events.jsonl") if event["event"] == "metrics"]
    return [one["train/train_rollout_logprob_abs_diff_max"] for one in metrics]


@pytest.mark.parametrize("flags", [
    [], *(pytest.param(flags, marks=pytest.mark.full) for flags in (
        ["--rollout-temperature", "0.7"], ["--engine-max-batch", "5", "--max-tokens-per-gpu", "64"],
        ["--threads", "2"])),
], ids=["plain", "temperature", "small batches", "two threads"])
def test_train_rollout_logprob_abs_diff_is_exactly_zero(run_file, tmp_path, flags):
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--rollout-max-response-len", "40", *flags],
                    tmp_path)
    assert outcome.code == 0, outcome.err
    assert gaps(tmp_path / "run") == [0.0, 0.0, 0.0]


def test_a_mixture_of_experts_agrees_to_rounding(run_file, tmp_path):
    outcome = miles(["run", run_file("qwen3_moe"), "--no-live", "--run-dir", "run", "--rollout-max-response-len", "40"],
                    tmp_path)
    assert outcome.code == 0, outcome.err
    assert max(gaps(tmp_path / "run")) <= 1e-5


@pytest.mark.full
def test_true_on_policy_mode_is_exact_at_every_step_whatever_decodes_beside(run_file, tmp_path):
    """All sixteen requests at once or three at a time: no difference to the trainer, and none to each other."""
    samples = {}
    for most in ("16", "3"):
        folder = tmp_path / most
        outcome = miles(["run", run_file(), "--no-live", "--run-dir", most, "--rollout-max-response-len", "40",
                         "--engine-max-batch", most, "--rollout-top-p", "0.9", "--true-on-policy-mode"],
                        tmp_path)  # fmt: skip
        assert outcome.code == 0, outcome.err
        assert "engine local: qwen3 fast path" in outcome.out
        assert gaps(folder) == [0.0, 0.0, 0.0]
        samples[most] = [path.read_text() for path in sorted((folder / "samples").glob("*.jsonl"))]
    assert len(samples["16"]) == 3
    assert samples["16"] == samples["3"]


DEEP = {"hidden_size": 800, "intermediate_size": 1056}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS = {
    "qwen3, deep": (Case("qwen3", "deep", DEEP), []),
    "llama": (Case("llama", "llama"), ["specs-llama"]),
    "mistral": (Case("mistral", "mistral", {"sliding_window": 100}), ["specs-llama"]),
    "qwen2": (Case("qwen2", "qwen2"), ["specs-qwen2"]),
    "qwen3_moe": (Case("qwen3_moe", "experts", EXPERTS), []),
    "qwen3_moe, six of 24": (Case("qwen3_moe", "many", {
        **EXPERTS, "num_experts": 24, "num_experts_per_tok": 6, "norm_topk_prob": False}), []),
}
LAYOUTS = {"data": [], "pipeline": ["--pipeline-model-parallel-size", "2"]}
STRICT = ["--no-live", "--true-on-policy-mode", "--rollout-max-context-len", "640", "--max-tokens-per-gpu", "1500",
          "--rollout-ignore-eos"]


def strict_gaps(folder, case, plugins, *flags):
    """Largest differences of two rollouts in the mode."""
    case = dataclasses.replace(case, config={"max_position_embeddings": 1024, **case.config})
    apart(write_model, case, folder / "model")
    path = write_run(folder / "run.toml", plugins, {"rollout": {"num_rollout": 2}, "optimizer": {"lr": 1e-3}}, {},
                     checkpoint=folder / "model")
    outcome = miles(["run", path, *STRICT, *flags], folder)
    assert outcome.code == 0, outcome.err
    assert f"engine local: {case.family} fast path" in outcome.out
    return gaps(folder / "run")


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_true_on_policy_mode_is_exact_for_every_family_at_any_length_and_depth(tmp_path, model):
    case, plugins = MODELS[model]
    assert strict_gaps(tmp_path, case, plugins, "--rollout-max-response-len", "320") == [0.0, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_true_on_policy_mode_is_exact_where_ranks_share_no_sum(tmp_path, layout):
    case, plugins = MODELS["qwen3_moe"]
    flags = ["--rollout-max-response-len", "140", "--actor-num-gpus-per-node", "2", *LAYOUTS[layout]]
    assert strict_gaps(tmp_path, case, plugins, *flags) == [0.0, 0.0]


NUDGE = """
from miles_core import hookimpl


class Nudge:
    '''Adds to one of the engine's log-probs what no tolerance would see.'''

    @hookimpl("generate_response")
    def nudge(self, sample, response):
        if sample.prompt.uid == 5 and sample.index == 1:
            sample.columns["rollout_log_probs"][0] += 2e-6
        return sample
"""


def test_true_on_policy_mode_ends_a_run_whose_sides_differ(run_file, tmp_path):
    (tmp_path / "nudge.py").write_text(NUDGE)
    arguments = ["run", run_file(), "--no-live", "--run-dir", "run", "--plugin", "./nudge.py"]
    assert miles(arguments, tmp_path).code == 0  # a difference is reported, and no more
    for steps in ("1", "2"):  # in the forward of the only step, and in a pass before the first
        outcome = miles([*arguments, "--run-dir", f"strict-{steps}", "--true-on-policy-mode",
                         "--num-steps-per-rollout", steps], tmp_path)
        assert outcome.code == 1
        assert "prompt 5 (row 5), sample 1" in outcome.err and "first at response token 0" in outcome.err
