"""Whole runs whose engine is real SGLang servers."""

from __future__ import annotations

import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from scenes import mark, marked

from miles_core.record.events import read
from miles_core.testing.forked import miles

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.mark.parametrize("flags", [
    [],
    pytest.param(["--placement", "ray"], marks=pytest.mark.skipif(not find_spec("ray"), reason="no Ray")),
    ["--max-lag", "1", "--rollout-num-gpus", "2"],
], ids=["local", "ray", "two servers, one step off"])
def test_a_run_trains_on_what_real_servers_draw(config, run_file, tmp_path, flags):
    """Rewards rise, log-probs of engine and trainer agree wherever both have the same weights, each rollout is followed
    by a sync, and the run leaves no process behind."""
    tag, launcher = str(tmp_path), config.sglang.server_command
    path = f"{os.environ['PATH']}:{Path(launcher[0]).parent}"  # smg may be there alone
    outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--server-command",
                     *launcher, "--sglang-max-total-tokens", "4096", *flags],
                    tmp_path, timeout=500, before=partial(mark, MILES_TEST_RUN=tag, PATH=path))  # fmt: skip
    assert outcome.code == 0, outcome.err
    until = time.monotonic() + 10
    while (left := marked("MILES_TEST_RUN", tag)) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left

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
    assert len(servers) == 1 + ("2" in flags)
    assert all("POST /generate HTTP/1.1\" 200" in log.read_text() for log in servers)
