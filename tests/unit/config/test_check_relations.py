"""Lengths, sampling, the model's constants, this machine: what does not start, each beside what does."""

import json
import socket

import pytest
from miles_sglang import hardware as served

from miles_core.config import hardware
from miles_core.errors import MilesError

QWEN = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128, "num_attention_heads": 28,
        "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 96, "vocab_size": 264, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0},
        "architectures": ["Qwen3ForCausalLM"]}
SGLANG = ("--engine", "sglang", "--colocate")
FOUR = (*SGLANG, "--actor-num-gpus-per-node", 4, "--rollout-num-gpus-per-engine", 4)
EVAL = ("--eval-interval", 1, "--eval-prompt-data", "data/eval.jsonl")

# constants of config.json, flags that are refused with a message, flags that are not
PAIRS = {
    "answer-takes-context": (QWEN, ["--rollout-max-response-len", 1024], "(got 1024 of 1024, max_position_embeddings",
                             ["--rollout-max-response-len", 1023]),
    "prompt-takes-context": (QWEN, ["--rollout-max-prompt-len", 1024], "(got 1024 of 1024, max_position_embeddings",
                             ["--rollout-max-prompt-len", 1000]),
    "sum-above-context": (QWEN, ["--rollout-max-prompt-len", 600, "--rollout-max-response-len", 500],
                          "600 + 500 of 1024", ["--rollout-max-prompt-len", 600,
                                                             "--rollout-max-response-len", 424]),
    "sum-above-the-runs-context": (QWEN, ["--rollout-max-context-len", 96, "--rollout-max-prompt-len", 64,
                                          "--rollout-max-response-len", 64], "rollout.rollout_max_context_len (--roll",
                                   ["--rollout-max-context-len", 128, "--rollout-max-prompt-len", 64,
                                    "--rollout-max-response-len", 64]),
    "sum-above-the-servers-context": (None, [*SGLANG, "--sglang-context-length", 96, "--rollout-max-prompt-len", 64,
                                             "--rollout-max-response-len", 64], "64 + 64 of 96",
                                      [*SGLANG, "--sglang-context-length", 96, "--rollout-max-prompt-len", 64]),
    "eval-answer": (QWEN, [*EVAL, "--eval-max-response-len", 2000], "(got 2000 of 1024",
                    [*EVAL, "--eval-max-response-len", 1000]),
    "eval-sum": (QWEN, [*EVAL, "--eval-max-response-len", 900, "--eval-max-prompt-len", 200], "200 + 900 of 1024",
                 [*EVAL, "--eval-max-response-len", 900, "--eval-max-prompt-len", 100]),
    "least-above-most": (None, ["--rollout-min-new-tokens", 9, "--rollout-max-response-len", 8], "(got 9 and 8)",
                         ["--rollout-min-new-tokens", 8, "--rollout-max-response-len", 8]),
    "greedy": (None, ["--rollout-temperature", 0], "rollout_temperature 0.0", ["--eval-temperature", 0]),
    "cold": (None, ["--rollout-temperature", 0.001], "rollout_temperature 0.001",
             ["--rollout-temperature", 0.3]),
    "top-k-1": (None, ["--rollout-top-k", 1], "rollout_top_k 1", ["--rollout-top-k", 20]),
    "greedy-alone": (None, ["--rollout-temperature", 0], "rollout_temperature 0.0",
                     ["--rollout-temperature", 0, "--debug-rollout-only"]),
    "quantises-itself": (QWEN, [*SGLANG, "--sglang-quantization", "fp8"], "quantise plain weights by itself",
                         [*SGLANG, "--sglang-quantization", "fp8", "--debug-rollout-only"]),
    "broadcast-to-itself": (None, [*SGLANG, "--weight-sync", "broadcast"], "[broadcast-with-colocate]",
                            ["--engine", "sglang", "--weight-sync", "broadcast"]),
}  # fmt: skip


def machine(monkeypatch, gpus):
    """A machine with so many GPUs, for whoever counts them."""
    for module in (hardware, served):
        monkeypatch.setattr(module, "gpus", lambda: gpus)


@pytest.fixture
def on(plan, tmp_path, monkeypatch):
    """(constants, *flags) -> the plan on a checkpoint with these, on a machine without GPUs."""
    machine(monkeypatch, 0)

    def make(constants, *flags):
        given = []
        if constants is not None:
            (tmp_path / "model").mkdir(exist_ok=True)
            (tmp_path / "model" / "config.json").write_text(json.dumps(constants))
            given = ["--hf-checkpoint", tmp_path / "model"]
        return plan(*given, *flags, **{"num_layers = 2\n": ""})

    return make


@pytest.mark.parametrize("name", PAIRS)
def test_a_contradiction_is_refused_and_its_neighbour_is_not(on, name):
    constants, bad, message, good = PAIRS[name]
    with pytest.raises(MilesError) as caught:
        on(constants, *bad)
    assert message in str(caught.value) and "Fix: " in str(caught.value), str(caught.value)
    assert caught.value.exit_code == 2
    on(constants, *good)


GPUS = [  # there, address of a cluster, flags, refused
    (4, None, ("--actor-num-gpus-per-node", 4, "--rollout-num-gpus", 2), "takes 6 GPUs and this machine has 4"),
    (4, None, ("--actor-num-gpus-per-node", 8, "--colocate"), "(got trainer 8, engines 8, taking turns)"),
    (4, None, ("--actor-num-gpus-per-node", 8, "--colocate", "--placement", "ray"), "--ray-address HOST:PORT"),
    (1, None, ("--rollout-num-gpus", 1), "share them with --colocate"),
    (4, "a:1", ("--actor-num-gpus-per-node", 8, "--colocate"), None), (1, None, ("--colocate",), None),
    (0, None, ("--actor-num-gpus-per-node", 8, "--colocate"), None),
    (4, None, ("--actor-num-gpus-per-node", 2, "--rollout-num-gpus", 2), None),
    (1, None, ("--rollout-external", "--rollout-external-engine-addrs", "10.0.0.7:1"), None),
    (4, None, ("--actor-num-gpus-per-node", 8, "--rollout-num-gpus", 4, "--debug-rollout-only"), None),
]


@pytest.mark.parametrize(("there", "address", "flags", "message"), GPUS)
def test_a_run_takes_the_gpus_that_there_are(plan, monkeypatch, there, address, flags, message):
    machine(monkeypatch, there)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for given in ([], ["--ray-address", address])[bool(address):]:
        if message is None:
            plan("--engine", "sglang", *flags, *given)
            continue
        with pytest.raises(MilesError) as caught:
            plan("--engine", "sglang", *flags, *given)
        assert message in str(caught.value)
    if message and "RAY" not in flags:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        if "--placement" in flags:
            plan("--engine", "sglang", *flags)


def test_somebody_listens_at_an_address_of_this_machine(plan):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = f"127.0.0.1:{server.getsockname()[1]}"
        plan("--rollout-external", "--rollout-external-engine-addrs", there)
    with pytest.raises(MilesError, match="nothing listens at this address"):
        plan("--rollout-external", "--rollout-external-engine-addrs", there)
    with pytest.raises(MilesError, match="sglang.router_ip .*nothing listens"):
        plan("--engine", "sglang", "--router-ip", "localhost", "--sglang-router-port", there.rpartition(":")[2])
    plan("--rollout-external", "--rollout-external-engine-addrs", "10.0.0.7:30000")
