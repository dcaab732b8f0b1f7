"""Routed experts of real servers, replayed by the trainer of a whole run; and what a server computed twice."""

from __future__ import annotations

from functools import partial

import pytest
from miles_testing.forked import miles
from scenes import mark

from miles_core.record.events import read

pytestmark = [pytest.mark.slow, pytest.mark.integration]

SCARCE = ("--sglang-max-total-tokens", "400", "--sglang-schedule-conservativeness", "0.01",
          "--rollout-max-response-len", "60")
"""Room for less than all requests at once, and a server that admits them all the same."""


@pytest.fixture(scope="module")
def close(models, tmp_path_factory):
    """The model of the session with a router whose logits lie close together, so that bfloat16 routes otherwise."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(models["old"], tmp_path_factory.mktemp("close") / "model")
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor.copy_(0.06 * torch.randn(1, tensor.shape[1], generator=draw)
                         + 0.002 * torch.randn(tensor.shape, generator=draw))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def replayed(config, close, run_file, tmp_path):
    """(*flags) -> metrics of each rollout of a run whose servers compute in bfloat16."""
    def run(*flags: str) -> list[dict]:
        outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--server-command",
                         *config.options["sglang"]["server_command"], "--hf-checkpoint", str(close),
                         "--engine-dtype", "bfloat16",
                         "--use-rollout-routing-replay", "--r3.compare-every", "1", "--num-rollout", "2",
                         "--rollout-ignore-eos", "--lr", "1e-4", *flags],
                        tmp_path, timeout=500, before=partial(mark, MILES_TEST_RUN=str(tmp_path)))  # fmt: skip
        assert outcome.code == 0, outcome.err
        return [event["metrics"] for event in read(tmp_path / "run/events.jsonl") if event["event"] == "metrics"]

    return run


@pytest.mark.parametrize("readers", [0, 2], ids=["driver", "readers"])
def test_routes_of_a_real_server_are_replayed(replayed, readers, tmp_path):
    """All of them, after a sync as well, and log-probs come closer by far; the server narrows them."""
    steps = replayed("--sglang-max-total-tokens", "4096", "--rollout-max-response-len", "20", "--readers", str(readers))
    assert len(steps) == 2
    for step in steps:
        print({key: value for key, value in step.items() if "/r3/" in key})
        assert step["train/r3/replayed"] == 1 and step["train/r3/routes_differ"] > 0.02
        assert step["rollout/r3/log_prob_diff_free"] > 3 * step["rollout/r3/log_prob_diff"]
        assert "rollout/engine_retractions" not in step
    assert "Executed general plugin: miles_routes" in (tmp_path / "run/logs/engine-0.log").read_text()


@pytest.mark.parametrize("drop", [False, True])
def test_what_a_real_server_retracted_is_seen(replayed, drop):
    """It computes a retracted request again by prefill, whose routes are not always those of decoding: they are kept,
    or left to the trainer if the run says so."""
    steps = replayed(*SCARCE, *["--r3.drop-computed-again"][:drop])
    for step in steps:
        print({key: value for key, value in step.items() if "/r3/" in key or "again" in key or "retractions" in key})
    assert any(step.get("rollout/engine_retractions", 0) >= 1 for step in steps)
    assert any(0 < step.get("rollout/experts_computed_again", 0) < 1 for step in steps)
    assert any(step["train/r3/fallback"] > 0 for step in steps) == drop
    assert all(step["train/r3/replayed"] + step["train/r3/fallback"] == pytest.approx(1) for step in steps)
