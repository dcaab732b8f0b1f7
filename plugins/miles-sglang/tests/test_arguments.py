"""The command and the environment of a server: what follows from run and place, and what the run overrides."""

from __future__ import annotations

import os
import sys

import pytest
from miles_sglang.arguments import SERVED, command, environment
from miles_sglang.serving import serving

from miles_core.config.check import check
from miles_core.config.load import load
from miles_core.types import NodeSlot

NEEDED = ["--hf-checkpoint", "m", "--prompt-data", "x", "--rollout-batch-size", "8", "--num-rollout", "1",
          "--engine", "sglang"]  # fmt: skip


def config(*flags):
    return check(load(None, [*NEEDED, *map(str, flags)]).config)[0]


def words(*flags, seat=None, meeting=None):
    """The command's words after the program, as {flag: words after it}."""
    seat = seat or NodeSlot()
    found: dict[str, list[str]] = {}
    for word in command(config(*flags), seat, 31000, meeting)[3:]:
        if word.startswith("--"):
            last = found.setdefault(word, [])
        else:
            last.append(word)
    return found


def test_a_plain_command():
    assert command(config(), NodeSlot(), 31000, None)[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert words() == {
        "--model-path": ["m"], "--host": ["127.0.0.1"], "--port": ["31000"], "--tp-size": ["1"],
        "--random-seed": ["42"], "--dtype": ["bfloat16"], "--skip-server-warmup": [], "--enable-metrics": [],
        "--custom-weight-loader": ["miles_weights.load"], "--load-format": ["dummy"],
    }


def test_the_words_that_start_a_server_can_be_others():
    made = command(config("--server-command", "python", "x.py"), NodeSlot(), 1, None)
    assert made[:3] == ["python", "x.py", "--model-path"]


def test_each_node_of_an_engine_knows_its_place():
    said = words("--rollout-num-gpus-per-engine", 16, seat=NodeSlot(engine=3, node=1, nodes=2, host="10.0.0.2"),
                 meeting="10.0.0.1:9000")
    assert said["--tp-size"] == ["16"] and said["--random-seed"] == ["45"] and said["--host"] == ["10.0.0.2"]
    assert (said["--nnodes"], said["--node-rank"], said["--dist-init-addr"]) == (["2"], ["1"], ["10.0.0.1:9000"])


@pytest.mark.parametrize(("flags", "announced"), [
    ((), False), (("--rollout-min-new-tokens", 3), True),
    (("--rollout-min-new-tokens", 3, "--debug-rollout-only"), False),
], ids=str)
def test_log_probs_that_are_not_the_trainers_are_announced(flags, announced):
    """The servers take ends out of the distribution of the first tokens; the trainer does not."""
    notes = []
    serving(config(*flags), notes.append)
    assert any("--rollout-min-new-tokens" in note for note in notes) == announced


def test_a_deterministic_run_has_deterministic_servers():
    assert words("--deterministic-mode")["--enable-deterministic-inference"] == []
    assert "--enable-deterministic-inference" not in words()


def test_a_pipeline_takes_its_share_of_the_gpus():
    assert words("--rollout-num-gpus-per-engine", 4, "--sglang-pp-size", 2)["--tp-size"] == ["2"]


@pytest.mark.parametrize(("flags", "expected"), [
    (["--no-bf16"], {"--dtype": ["float32"]}), (["--engine-dtype", "float32"], {"--dtype": ["float32"]}),
    (["--sglang-dtype", "float16"], {"--dtype": ["float16"]}),
    (["--colocate"], {"--enable-memory-saver": [], "--cuda-graph-backend-prefill": ["disabled"]}),
    (["--colocate", "--no-offload-rollout"], {"--enable-memory-saver": None}),
    (["--colocate", "--sglang-cuda-graph-backend-prefill", "full"], {"--cuda-graph-backend-prefill": ["full"]}),
    (["--colocate", "--sglang-disable-cuda-graph"], {"--cuda-graph-backend-prefill": None, "--disable-cuda-graph": []}),
    (["--offload-rollout"], {"--enable-memory-saver": None, "--cuda-graph-backend-prefill": None}),
    (["--debug-rollout-only"], {"--load-format": None, "--custom-weight-loader": None}),
    (["--sglang-load-format", "auto"], {"--load-format": ["auto"]}),
    (["--sglang-speculative-algorithm", "EAGLE", "--sglang-speculative-num-steps", "3"],
     {"--speculative-algorithm": ["EAGLE"], "--speculative-num-steps": ["3"], "--enable-draft-weights-cpu-backup": [],
      "--speculative-draft-load-format": ["auto"]}),
    (["--no-sglang-enable-metrics"], {"--enable-metrics": None}),
    ([], {"--trust-remote-code": None, "--enable-return-routed-experts": None, "--context-length": None}),
    (["--sglang-trust-remote-code"], {"--trust-remote-code": []}),
    (["--sglang-enable-return-routed-experts"], {"--enable-return-routed-experts": []}),
    (["--sglang-cuda-graph-bs-decode", "1", "2"], {"--cuda-graph-bs-decode": ["1", "2"]}),
])
def test_what_a_run_says_is_in_the_command(flags, expected):
    said = words(*flags)
    assert {flag: said.get(flag) for flag in expected} == expected


def test_the_environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "mine")
    assert environment(config(), NodeSlot()) == {"NCCL_CUMEM_ENABLE": "0", "PYTHONPATH": f"{SERVED}{os.pathsep}mine"}
    monkeypatch.delenv("PYTHONPATH")
    found = environment(config("--colocate", "--sglang-context-length", 4096), NodeSlot(gpus=(6, 7)))
    assert found == {"NCCL_CUMEM_ENABLE": "0", "PYTHONPATH": str(SERVED), "CUDA_VISIBLE_DEVICES": "6,7",
                     "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
                     "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
