"""A start's first batch shows whether engine and trainer are one model; a run of two models ends there."""

import json
import shutil

import pytest
from miles_testing.forked import miles
from safetensors.torch import load_file, save_file

from miles_core.record.events import read
from miles_core.stages.on_policy import FRESH

OTHER = '''
"""The local engine, with another config.json or another output layer than the trainer's."""
from miles_core import hookimpl


class Other:
    """Offers the engine "other"."""

    @hookimpl("engine", name="other")
    def other(self, config, tokenizer):
        from pathlib import Path

        import torch

        from miles_local.engine import LocalEngine

        class Engine(LocalEngine):
            async def update_weights(self, weights, version):
                await super().update_weights(((name, tensor.flip(0) if "{flipped}" == name else tensor)
                                              for name, tensor in weights), version)

        return Engine(Path("engine"), dtype=torch.float32, tokenizer=tokenizer,
                      max_context=config.rollout.rollout_max_context_len)
'''


@pytest.fixture
def sharp(tiny, tmp_path):
    """(family) -> run flags for a checkpoint whose attention and logits are as far from flat as a trained model's."""

    def make(family):
        folder = tmp_path / "model"
        shutil.copytree(tiny / family, folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in tensors.items():
            if tensor.ndim > 1:
                tensor.mul_(20 if "embed" in name else 12)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        shutil.copytree(folder, tmp_path / "engine")
        return ["--hf-checkpoint", folder, "--num-rollout", "2"]

    return make


def run(argv, folder):
    """(outcome, FRESH of each rollout)."""
    outcome = miles(["run", *argv, "--no-live", "--run-dir", "run"], folder)
    events = read(folder / "run" / "events.jsonl")
    return outcome, [event["metrics"].get(FRESH) for event in events if event["event"] == "metrics"]


@pytest.mark.parametrize(("flipped", "changes"), [
    ("", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}), ("model.embed_tokens.weight", {}),
], ids=["rope", "head"])
def test_another_model_on_one_side_ends_the_run_before_a_step(run_file, sharp, tmp_path, flipped, changes):
    flags = sharp("qwen3")
    (tmp_path / "other.py").write_text(OTHER.replace("{flipped}", flipped))
    config = json.loads((tmp_path / "engine" / "config.json").read_text())
    (tmp_path / "engine" / "config.json").write_text(json.dumps(config | changes))
    argv = [run_file(), *flags, "--plugin", tmp_path / "other.py", "--engine", "other"]
    outcome, differences = run(argv, tmp_path)
    assert outcome.code == 1 and not differences, "no step was made"
    assert "max_first_logprob_diff" in outcome.err
    shutil.rmtree(tmp_path / "run")
    outcome, differences = run([*argv, "--max-first-logprob-diff", "0"], tmp_path)
    assert outcome.code == 0 and differences[0] > 1


@pytest.mark.full
@pytest.mark.parametrize(("family", "flags", "most"), [
    ("qwen3", [], 1e-6), ("qwen3_moe", ["--bf16", "--max-lag", "2"], 0.05), ("qwen3", ["--plugin", "fp8"], 0.4),
])  # fmt: skip
def test_one_model_in_any_precision_goes_on(run_file, sharp, tmp_path, family, flags, most):
    """Routing replay is off, and what older weights drew in the second batch is not compared at all."""
    outcome, differences = run([run_file(family), *sharp(family), *flags], tmp_path)
    assert outcome.code == 0, outcome.err
    assert differences[0] <= most and (differences[1] is None) == ("--max-lag" in flags)
