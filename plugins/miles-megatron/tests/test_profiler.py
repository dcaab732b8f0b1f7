"""The profiler traces what it is asked to with PyTorch's own, and leaves whole files or none."""

import gzip
import json

import pytest
import torch
from miles_megatron.profiler import Profiler

from miles_core.config.load import with_values
from miles_core.config.tables import RunConfig
from miles_core.errors import RunDirectoryError


@pytest.fixture
def make(tmp_path):
    """(**debug options) -> a profiler that writes below tmp_path."""

    def profiler(rank=0, **debug):
        values = {f"debug__{key}": value for key, value in debug.items()}
        return Profiler(with_values(RunConfig(), "test", checkpoint__run_dir=str(tmp_path), **values), rank)

    return profiler


def traced(folder):
    """File name -> the names of its events."""
    return {path.name: {event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
            for path in sorted((folder / "profile").iterdir())}


def work(profiler, rollout_id):
    with profiler.phase("log_probs", rollout_id):
        torch.ones(4, 4) @ torch.ones(4, 4)
    with profiler.phase("advantage", rollout_id):
        torch.ones(3).mean()
    with profiler.phase("step 0", rollout_id):
        with profiler.range("forward/backward"):
            torch.ones(2, requires_grad=True).exp().sum().backward()
        with profiler.range("optimizer"):
            torch.ones(2).add_(1)


def test_every_phase_of_the_rollouts_asked_for_has_a_trace_with_its_ranges_and_operators(make, tmp_path):
    profiler = make(rank=1, use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2)
    for rollout_id in range(3):
        work(profiler, rollout_id)
    found = traced(tmp_path)
    assert set(found) == {f"rank-1-rollout-1-{name}.json.gz" for name in ("log_probs", "advantage", "step-0")}
    assert {"log_probs", "aten::mm"} <= found["rank-1-rollout-1-log_probs.json.gz"]
    assert {"step 0", "forward/backward", "optimizer", "aten::exp"} <= found["rank-1-rollout-1-step-0.json.gz"]


@pytest.mark.parametrize("target, names", [("train_actor", {"step-0"}), ("train_log_probs", {"log_probs"})])
def test_a_target_narrows_it_to_its_phases(make, tmp_path, target, names):
    profiler = make(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1, profile_target=[target])
    work(profiler, 0)
    assert set(traced(tmp_path)) == {f"rank-0-rollout-0-{name}.json.gz" for name in names}


def test_a_phase_within_a_phase_is_a_range_of_its_trace(make, tmp_path):
    profiler = make(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1)
    with profiler.phase("step 0", 0), profiler.phase("log_probs", 0):
        torch.ones(2).exp()
    (name, events), = traced(tmp_path).items()
    assert name == "rank-0-rollout-0-step-0.json.gz" and {"step 0", "log_probs", "aten::exp"} <= events


def test_off_it_is_one_shared_null_context_and_touches_nothing(make, tmp_path):
    profiler = make(profile_step_start=0, profile_step_end=9)
    assert profiler.phase("log_probs", 0) is profiler.phase("step 0", 1) is profiler.range("optimizer")
    work(profiler, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_phase_that_fails_leaves_no_file_and_the_next_one_is_traced(make, tmp_path):
    profiler = make(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=2)
    with pytest.raises(RuntimeError, match="size of tensor"), profiler.phase("step 0", 0):
        torch.ones(2).add_(torch.ones(3))
    assert list(tmp_path.iterdir()) == []
    with profiler.phase("step 0", 1):
        torch.ones(2).exp()
    assert set(traced(tmp_path)) == {"rank-0-rollout-1-step-0.json.gz"}


def test_a_disk_that_refuses_is_explained_and_leaves_no_half_file(make, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    profiler = make(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=1)
    monkeypatch.setattr("miles_megatron.profiler.shutil.copyfileobj", full)
    with pytest.raises(RunDirectoryError, match="disk is full"), profiler.phase("step 0", 0):
        torch.ones(2).exp()
    assert list((tmp_path / "profile").iterdir()) == []
