"""Whole runs whose engine is real SGLang servers."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from miles_testing.forked import miles
from scenes import left_behind, mark

from conftest import serving
from miles_core.record.events import read

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.mark.parametrize("flags", [
    [],
    pytest.param(["--placement", "ray"], marks=pytest.mark.skipif(not find_spec("ray"), reason="no Ray")),
    ["--max-lag", "1", "--rollout-num-gpus", "2"],
    ["--readers", "2"],
], ids=["local", "ray", "two servers, one step off", "readers"])
def test_a_run_trains_on_what_real_servers_draw(config, run_file, tmp_path, flags):
    """Rewards rise, log-probs of engine and trainer agree wherever both have the same weights, each rollout is followed
    by a sync, and the run leaves no process behind."""
    tag, launcher = str(tmp_path), config.options["sglang"]["server_command"]
    path = f"{os.environ['PATH']}:{Path(launcher[0]).parent}"  # smg may be there alone
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--server-command",
                     *launcher, "--sglang-max-total-tokens", "4096", *flags],
                    tmp_path, timeout=500, before=partial(mark, MILES_TEST_RUN=tag, PATH=path))  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert not left_behind("MILES_TEST_RUN", tag)

    events = list(read(tmp_path / "run/events.jsonl"))
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert len(steps) == 3 and steps[-1]["rollout/raw_reward"] > steps[0]["rollout/raw_reward"]
    lags = [step["rollout/weight_version/lag"] for step in steps]
    assert lags[0] == 0 and max(lags) == (1 if "--max-lag" in flags else 0)
    assert max(step["train/train_rollout_logprob_abs_diff_max"] for step in steps
               if step["rollout/weight_version/lag"] == 0) <= 1e-4
    syncs = [event for event in events if event["event"] == "weight_sync"]
    assert [event["version"] for event in syncs] == [1, 2, 3, 4] and all(event["tensors"] for event in syncs)
    servers = sorted((tmp_path / "run/logs").glob("engine-*.log"))
    assert len(servers) == 1 + ("--rollout-num-gpus" in flags)
    assert all("POST /generate HTTP/1.1\" 200" in log.read_text() for log in servers)


def test_a_server_of_their_own_samples_evaluations(config, run_file, tiny, tmp_path):
    """It is sent the weights of every evaluation, by the sync of training, and is ended with the run."""
    tag, launcher = str(tmp_path), config.options["sglang"]["server_command"]
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--server-command",
                     *launcher, "--sglang-max-total-tokens", "4096", "--eval-num-gpus", "1", "--eval-interval", "1",
                     "--eval-prompt-data", "sums", tiny / "eval.jsonl", "--eval-temperature", "0"],
                    tmp_path, timeout=500, before=partial(mark, MILES_TEST_RUN=tag))  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert not left_behind("MILES_TEST_RUN", tag)

    events = list(read(tmp_path / "run/events.jsonl"))
    assert [event["version"] for event in events if event["event"] == "eval_weights"] == [1, 2, 3, 4]
    assert [event["rollout_id"] for event in events if event["event"] == "eval"] == [0, 1, 2, 3]
    log = (tmp_path / "run/dedicated-eval/logs/engine-0.log").read_text()
    assert log.count("POST /generate HTTP/1.1\" 200") == 4 * 8


def test_servers_that_run_already_sample_and_evaluate(config, run_file, tiny, tmp_path):
    """They are sent every version, and the run leaves them running."""
    files = replace(config.checkpoint, hf_checkpoint=str(tiny / "qwen3"), run_dir=str(tmp_path))
    own = replace(config, checkpoint=files,
                  surfaces={"server": {"max_total_tokens": 4096, "custom_weight_loader": ["miles_weights.load"]}})
    with serving(own, "training.log") as training, serving(own, "evaluations.log") as evaluating:
        address, other = (url.removeprefix("http://") for url in (training, evaluating))
        outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--rollout-external",
                         "--rollout-external-engine-addrs", address, "--plugin", "dedicated-eval",
                         "--eval-engine-addrs", other, "--eval-interval", "1", "--eval-prompt-data", "sums",
                         tiny / "eval.jsonl", "--eval-temperature", "0"], tmp_path, timeout=300)  # fmt: skip
        assert outcome.code == 0, outcome.err
        versions = [httpx.get(f"{url}/model_info", timeout=30).json()["weight_version"]
                    for url in (training, evaluating)]
    assert versions == ["4", "4"]
    events = list(read(tmp_path / "run/events.jsonl"))
    steps = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert len(steps) == 3 and steps[-1]["rollout/raw_reward"] > steps[0]["rollout/raw_reward"]
    assert [event["rollout_id"] for event in events if event["event"] == "eval"] == [0, 1, 2, 3]
    assert (tmp_path / "logs/evaluations.log").read_text().count("POST /generate HTTP/1.1\" 200") == 4 * 8


def test_what_a_real_server_was_asked_for_goes_on_in_the_next_rollout(config, run_file, tmp_path):
    """Partial rollout: requests are aborted by name, their tokens stay, each with the version that drew it."""
    launcher = config.options["sglang"]["server_command"]
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--server-command",
                     *launcher, "--sglang-max-total-tokens", "4096", "--sglang-max-running-requests", "6",
                     "--partial-rollout", "--batch-order", "window",
                     "--over-sampling-batch-size", "8", "--rollout-max-response-len", "40", "--rollout-ignore-eos",
                     "--num-rollout", "4"], tmp_path, timeout=500)  # fmt: skip
    assert outcome.code == 0, outcome.err
    steps = [event["metrics"] for event in read(tmp_path / "run/events.jsonl") if event["event"] == "metrics"]
    assert len(steps) == 4 and sum(step.get("rollout/called_back", 0) for step in steps) > 0
    resumed = [step for step in steps if step["rollout/resumed"] > 0]
    assert resumed and all(step["rollout/staleness/max"] >= 1 for step in resumed)
    for rollout, path in enumerate(sorted((tmp_path / "run/samples").glob("rollout_*.jsonl"))):
        for sample in map(json.loads, path.read_text().splitlines()):
            versions = sample["versions"]
            assert versions == sorted(versions) and versions[-1] <= rollout + 1 and len(versions) <= 40
            assert len(versions) == len(sample["token_ids"]) == len(sample["log_probs"])
