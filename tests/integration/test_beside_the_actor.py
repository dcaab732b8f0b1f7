"""Models beside the actor, by the official plugins that have them: a critic that trains, teachers that score.

What they say is transformers' own; every layout trains like one rank; a resume is exact; rewards rise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PPO = ["--advantage-estimator", "ppo", "--lambd", "0.9", "--kl-coef", "0.1"]
TOP_K = ["--opd-log-prob-top-k", "5"]
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
LAYOUTS = {"tensor": [TENSOR, "2", "--sequence-parallel"], "pipeline": [PIPELINE, "2"]}
SMALL = ["--rollout-max-response-len", "41", "--num-steps-per-rollout", "2", "--lr", "1e-3", "--max-tokens-per-gpu",
         "96", "--trainer-host", "process"]


@pytest.fixture(scope="session")
def teachers(tiny, tmp_path_factory) -> dict[str, Path]:
    """"swapped" has the student's architecture, "beside" is wider: both random, with the student's tokenizer."""
    import shutil

    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder, found = tmp_path_factory.mktemp("teachers"), {}
    for name, changes in (("swapped", {}), ("beside", {"hidden_size": 48, "num_hidden_layers": 4})):
        constants = Qwen3Config.from_pretrained(tiny / "qwen3").to_dict() | changes | {"layer_types": None}
        torch.manual_seed(7)
        model = Qwen3ForCausalLM(Qwen3Config(**constants))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        found[name] = folder / name
        model.save_pretrained(found[name])
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny / "qwen3" / file, found[name])
    return found
