"""What the plan says of the memory of a model that reads images."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from miles_fsdp.memory import parameters
from miles_fsdp.module import CausalModule, read
from miles_fsdp.plugin import FsdpOptions
from miles_fsdp.scored import Temperature
from miles_megatron import estimate
from miles_testing.tiny import run_file
from safetensors.torch import load_file

from miles_core.plugins.plan import prepare


@pytest.mark.parametrize(("kind", "precision", "size"), [
    ("qwen2_5_vl", [], 4), ("qwen3_vl", ["--bf16"], 2), ("gemma3", [], 4),
], ids=["qwen2_5_vl", "qwen3_vl-bf16", "gemma3"])
def test_the_plan_counts_what_is_gathered_whole(kind, precision, size, checkpoint, tmp_path):
    """The numbers of the trainer's own module beside its text, and their gradients, whole on each of two ranks."""
    folder = checkpoint(kind)
    module = CausalModule(read(str(folder), FsdpOptions(), torch.float32, images=True), Temperature(1.0, 64),
                          inputs=lambda model, sample: {})
    count = sum(one.numel() for one in module.beside_text())
    assert count and parameters(folder, beside_text=True) == count
    values = {"perf": {"trainer": "fsdp"}, "rollout": {"rollout_batch_size": 4}}
    path = run_file(tmp_path / "run.toml", ["vision"], values, {}, checkpoint=folder)
    flags = ["--multimodal-keys", '{"image": "pictures"}', "--actor-num-gpus-per-node", "2", *precision]
    told = prepare(path, flags).to_text()
    assert f"and its gradients: {2 * size * count / 2**30:.2g}" in told


def test_megatrons_plan_counts_the_tower_on_the_first_stage(checkpoint, tmp_path):
    """Whole on each of its tensor-parallel ranks, with gradients and optimizer; another stage has none."""
    folder = checkpoint("mistral3")
    stored = load_file(folder / "model.safetensors")
    count = sum(one.numel() for name, one in stored.items() if name.startswith(("vision_tower.", "multi_modal_")))
    path = run_file(tmp_path / "run.toml", ["vision"], {"rollout": {"rollout_batch_size": 4}}, {}, checkpoint=folder)
    plan = prepare(path, ["--multimodal-keys", '{"image": "pictures"}', "--actor-num-gpus-per-node", "4",
                          "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--bf16"])
    text, model = replace(plan.config, stated={}), estimate.dimensions_of(plan.config)
    first, last = ({name: size - estimate._stage(text, model, stage)[name]
                    for name, size in estimate._stage(plan.config, model, stage).items()} for stage in (0, 1))
    assert count and not any(last.values())
    assert {name: size / count for name, size in first.items() if size} == {
        "weights": 2, "gradients": 4, "optimizer": 12}
