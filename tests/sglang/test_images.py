"""Images in a real SGLang server: it expands their placeholders and processes their files itself."""

from __future__ import annotations

import sys

import pytest
from miles_testing import toy_run

from conftest import LAUNCHER, ROOT

sys.path.insert(0, str(ROOT / "plugins/miles-vision/tests"))  # pictures.py


@pytest.mark.parametrize(("kind", "trainer"), [
    ("qwen2_5_vl", "fsdp"), pytest.param("qwen3_vl", "fsdp", marks=pytest.mark.slow),
    pytest.param("qwen2_5_vl", "megatron", marks=pytest.mark.slow),
])
def test_a_server_sees_the_images_that_the_trainer_sees(kind, trainer, tmp_path):
    """Before and after a sync of all weights, the tower's among them; two images in every fourth prompt."""
    from pictures import make_model

    folder = make_model(tmp_path / kind, kind, patch=14)
    run = toy_run(["fsdp", "vision"] if trainer == "fsdp" else ["vision"], steps=2, checkpoint=folder, timeout=300,
                  flags=["--multimodal-keys", '{"image": "pictures"}', "--rollout-max-response-len", "8",
                         "--engine", "sglang", "--server-command", *LAUNCHER, "--sglang-max-total-tokens", "4096"],
                  options={"optimizer.lr": 1e-2, "perf.trainer": trainer, "rollout.rollout_max_context_len": 200})
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    print(kind, trainer, gaps)
    assert len(gaps) == 2 and max(gaps) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_a_server_sees_the_images_that_a_tool_returns(kind, tmp_path):
    """Each turn's request has all images so far."""
    from pictures import make_model
    from turns import looking, taught, written

    folder = taught(make_model(tmp_path / kind, kind, patch=14), unit=28)
    run = looking(folder, tmp_path, 2, unit=28, timeout=300, flags=[
        "--engine", "sglang", "--server-command", *LAUNCHER, "--sglang-max-total-tokens", "4096"])
    gaps = [one["train/train_rollout_logprob_abs_diff_max"] for one in run.metrics]
    samples, seen = written(run, folder)
    print(kind, gaps, f"{len(seen)} of {len(samples)} samples")
    assert len(gaps) == 2 and max(gaps) <= 1e-4 and len(seen) >= 2
