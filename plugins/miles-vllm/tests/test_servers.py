"""How servers are started. test_engine.py has the rest: what becomes of them."""

from pathlib import Path

from miles_vllm.plugin import VllmOptions
from miles_vllm.servers import command, environment

from miles_core.config.tables import Checkpoint, Rollout, RunConfig
from miles_core.types import NodeSlot


def test_a_server_is_started_on_the_address_that_the_placement_gives():
    config = RunConfig(checkpoint=Checkpoint(hf_checkpoint="model"),
                       rollout=Rollout(engine="vllm", rollout_temperature=0.7))
    words = command(config, VllmOptions(python="p", args=["enforce-eager"]), NodeSlot(1), 7)
    pairs = dict(zip(words, words[1:]))
    assert pairs["--host"] == "127.0.0.1" and pairs["--port"] == "7" and pairs["--model"] == "model"
    assert pairs["--logprobs-mode"] == "processed_logprobs" and words[0] == "p" and words[-1] == "--enforce-eager"
    variables = environment(NodeSlot(gpus=(2, 3)))
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3" and variables["VLLM_HOST_IP"] == "127.0.0.1"
    assert (Path(variables["PYTHONPATH"].split(":")[0]) / "miles_vllm_worker.py").is_file()
