"""Options of Megatron through the real command: what should change nothing changes no bit, what should act acts."""

import json

import pytest

from miles_core.testing.forked import miles

# The architecture and the layout as a Megatron-LM launch script spells them out; all of it agrees with the checkpoint.
SCRIPT = """
--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 8 --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
--qk-layernorm --use-rotary-position-embeddings --rotary-base {theta} --vocab-size 264 --tensor-model-parallel-size 1
--pipeline-model-parallel-size 1 --context-parallel-size 1 --attention-dropout 0.0 --hidden-dropout 0.0
--accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --use-distributed-optimizer --optimizer adam
"""

RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

ALIKE = {"a launch script": SCRIPT.split(),
         "overlap": ["--overlap-grad-reduce", "--overlap-param-gather"],
         "no distributed optimizer": ["--no-use-distributed-optimizer"], "buckets": ["--ddp-bucket-size", "1000"],
         "recompute": RECOMPUTE.split()}
ACTING = {"betas": ["--adam-beta1", "0.5"],
          "coupled weight decay": ["--weight-decay", "0.1", "--no-decoupled-weight-decay"],
          "clipping": ["--clip-grad", "0.001", "--adam-eps", "0.1"]}  # fmt: skip


@pytest.fixture
def trained(run_file, tiny, tmp_path):
    """(*flags) -> the final weights' bytes of a run of several micro-batches a step."""
    constants = json.loads((tiny / "qwen3/config.json").read_text())
    theta = str(int(constants["rope_parameters"]["rope_theta"]))

    def run(*flags):
        argv = [flag.format(theta=theta) for flag in flags]
        outcome = miles(["run", run_file(), "--no-live", "--run-dir", "run", "--max-tokens-per-gpu", "64",
                         "--num-rollout", "2", "--save", "ck", "--save-hf", "hf", *argv], tmp_path)
        assert outcome.code == 0, outcome.err
        return (tmp_path / "hf/model.safetensors").read_bytes()

    return run


def test_what_should_change_nothing_changes_no_bit_and_what_should_act_acts(trained):
    plain = trained()
    assert {name: trained(*flags) == plain for name, flags in ALIKE.items()} == dict.fromkeys(ALIKE, True)
    assert {name: trained(*flags) == plain for name, flags in ACTING.items()} == dict.fromkeys(ACTING, False)
