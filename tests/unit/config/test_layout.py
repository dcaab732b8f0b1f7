"""Layouts: what a plan refuses is what megatron-core refuses, and each refusal names key, number and fix."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from miles_megatron import estimate
from miles_megatron.architecture import Architecture, architecture_of
from miles_megatron.layout import Layout, layout_of

from miles_core.config.tables import Checkpoint, RunConfig
from miles_core.errors import BatchError, ConfigError

DENSE = dict(model_type="qwen3", vocab_size=264, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
             num_attention_heads=8, num_key_value_heads=4, head_dim=8, eos_token_id=258)
MOE = DENSE | dict(model_type="qwen3_moe", intermediate_size=50, num_experts=4, num_experts_per_tok=2,
                   moe_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=1)
MODELS = {
    "dense": DENSE, "deep": DENSE | dict(num_hidden_layers=12), "narrow": DENSE | dict(intermediate_size=46),
    "odd": DENSE | dict(vocab_size=265), "triple": DENSE | dict(num_attention_heads=6, num_key_value_heads=3),
    "moe": MOE, "mixed": MOE | dict(mlp_only_layers=[0]), "six": MOE | dict(num_experts=6),
}  # fmt: skip
FLAGS = {
    "tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size", "cp": "--context-parallel-size",
    "vpp": "--virtual-pipeline-model-parallel-size", "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size", "first": "--num-layers-in-first-pipeline-stage",
    "group": "--microbatch-group-size-per-virtual-pipeline-stage", "mbs": "--micro-batch-size",
    "batch": "--rollout-batch-size",
}  # fmt: skip
SIZES = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "cp": "context", "ep": "expert",
         "etp": "expert_tensor"}
OVERRIDES = {"first": "num_layers_in_first_pipeline_stage", "group": "microbatch_group_size_per_vp_stage"}

# model, ranks, layout (32 samples in micro-batches of one, where nothing else is said), and the stage of a start that
# refuses it (megatron_verdicts.py): "" is none, and "here" is a layout that only a plan refuses. "nosp" says that
# there is no sequence parallelism; left unsaid, the plan completes what experts need (DERIVED).
LAYOUTS = [
    ("dense", 1, "", ""), ("dense", 2, "", ""), ("dense", 32, "", ""), ("dense", 2, "tp 2", ""),
    ("dense", 2, "tp 2 sp", ""), ("dense", 4, "tp 4 sp", ""), ("dense", 2, "pp 2", ""), ("dense", 8, "pp 4", ""),
    ("dense", 2, "pp 2 vpp 2", ""), ("dense", 8, "tp 2 sp pp 2 vpp 2", ""), ("dense", 3, "cp 3 batch 3", ""),
    ("dense", 8, "tp 2 cp 2 pp 2", ""), ("dense", 3, "pp 3 first 2", ""), ("dense", 2, "pp 2 vpp 2 group 2", ""),
    ("dense", 4, "mbs 8", ""), ("dense", 4, "tp 2 etp 1", ""), ("dense", 4, "pp 2 vpp 2 batch 4", ""),
    ("deep", 12, "pp 3 vpp 2 batch 12", ""), ("deep", 4, "pp 4 vpp 3", ""), ("deep", 12, "pp 12", ""),
    ("triple", 3, "tp 3 sp", ""), ("narrow", 2, "tp 2", ""), ("odd", 2, "pp 2", ""),
    ("moe", 1, "", ""), ("moe", 4, "ep 4", ""), ("moe", 2, "tp 2 sp", ""), ("moe", 4, "tp 4 sp", ""),
    ("moe", 4, "tp 2 sp ep 4 etp 1", ""), ("moe", 8, "tp 2 sp pp 2 ep 2 etp 1", ""), ("moe", 4, "cp 2 ep 4", ""),
    ("moe", 4, "tp 2 sp ep 2", ""), ("moe", 8, "pp 2 vpp 2 ep 2", ""), ("moe", 4, "etp 4", ""),
    ("six", 6, "ep 3 batch 30", ""), ("mixed", 4, "pp 2 ep 2", ""),
    # the world
    ("dense", 3, "tp 2", "groups"), ("dense", 6, "tp 4", "groups"), ("dense", 4, "tp 2 pp 2 cp 2", "groups"),
    ("moe", 2, "ep 4", "groups"), ("moe", 4, "tp 2 sp ep 4 etp 2", "groups"),
    ("moe", 4, "tp 2 sp pp 2 ep 2 etp 2", "groups"), ("dense", 2, "vpp 2", "groups"),
    # options that need each other
    ("dense", 2, "ep 2", "config"), ("moe", 2, "tp 2 nosp", "forward"),
    ("moe", 4, "tp 2 nosp ep 4 etp 1", "forward"), ("mixed", 2, "tp 2 nosp", "forward"),
    # what has to divide
    ("dense", 3, "tp 3 batch 3", "config"), ("dense", 16, "tp 16", "config"), ("triple", 2, "tp 2", "config"),
    ("odd", 2, "tp 2", "build"), ("narrow", 4, "tp 4", "build"), ("mixed", 4, "tp 4 sp", "build"),
    ("moe", 16, "etp 16 batch 16", "build"), ("moe", 8, "ep 8", "build"), ("six", 4, "ep 4", "build"),
    ("dense", 3, "pp 3 batch 3", "build"), ("dense", 8, "pp 8", "build"), ("dense", 2, "pp 2 vpp 4", "build"),
    ("deep", 4, "pp 4 vpp 2", "build"),
    # the batch
    ("dense", 3, "", "batch"), ("dense", 64, "", "batch"), ("dense", 4, "mbs 16", "batch"),
    ("dense", 2, "mbs 3 batch 9", "batch"), ("dense", 2, "pp 2 vpp 2 batch 1", "schedule"),
    ("dense", 4, "pp 2 vpp 2 batch 6", "schedule"), ("deep", 3, "pp 3 vpp 2", "schedule"),
    ("dense", 2, "pp 2 vpp 2 group 1", "schedule"),
    # a key-value group on several ranks
    ("dense", 8, "tp 8", ""), ("triple", 6, "tp 6 batch 6", ""),
    # megatron-core has no use for the first and wants other multiples for the second
    ("dense", 4, "etp 4", "here"), ("dense", 2, "pp 2 vpp 2 group 4", "here"),
]  # fmt: skip

# What megatron-core 0.16.1 finds out only while it trains, and the lines that do: tensor parallelism of experts without
# sequence parallelism; fewer micro-batches than stages, or not in whole groups.
AT_RUN_TIME = {"forward": {"moe_layer.py:380"}, "schedule": {"schedules.py:1003", "schedules.py:1015"}}


def words(text):
    """"tp 2 sp" -> {"tp": 2, "sp": True}; "nosp" is {"sp": False}"""
    found, left = {}, text.split()
    while left:
        word = left.pop(0)
        found[word.removeprefix("no")] = word == "sp" if word.endswith("sp") else int(left.pop(0))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """model -> a folder with its config.json."""
    folder = tmp_path_factory.mktemp("models")
    for name, constants in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(constants))
    return folder


@pytest.fixture
def laid_out(plan, checkpoints):
    """(model, ranks, layout, *flags) -> the plan."""
    def make(model, ranks, text, *flags):
        given = words(text)
        argv = ["--actor-num-gpus-per-node", ranks]
        argv += ["--n-samples-per-prompt", 1, "--disable-rewards-normalization"]
        argv += ["--rollout-batch-size", given.pop("batch", 32)]
        argv += ["--sequence-parallel" if given.pop("sp") else "--no-sequence-parallel"] if "sp" in given else []
        argv += [word for key, size in given.items() for word in (FLAGS[key], size)]
        return plan(*argv, *flags, **{"elsewhere/tiny": str(checkpoints / model), "num_layers = 2\n": ""})

    return make


@pytest.fixture(scope="module")
def verdicts(checkpoints):
    """Layout of the table -> what megatron-core says to it; one process for all."""
    cases = []
    every = [*(case[:3] for case in LAYOUTS), *(
        (model, ranks, words) for model, ranks, text, more, _ in DERIVED for words in (text, f"{text} {more}"))]
    for model, ranks, text in every:
        given = words(text)
        cases.append({
            "checkpoint": str(checkpoints / model), "world": ranks, "sequence_parallel": given.get("sp", False),
            "batch": given.get("batch", 32), "micro_batch": given.get("mbs", 1),
            "sizes": {SIZES[key]: size for key, size in given.items() if key in SIZES},
            "overrides": {OVERRIDES[key]: size for key, size in given.items() if key in OVERRIDES},
        })  # fmt: skip
    result = subprocess.run([sys.executable, Path(__file__).with_name("megatron_verdicts.py")], input=json.dumps(cases),
                            capture_output=True, text=True, timeout=300,
                            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
    assert result.returncode == 0, result.stderr
    answers = json.loads(result.stdout.splitlines()[-1])
    return dict(zip(every, answers, strict=True))


@pytest.mark.parametrize(("model", "ranks", "text", "at"), LAYOUTS, ids=lambda value: str(value) or "-")
def test_a_plan_refuses_what_megatron_core_refuses(laid_out, verdicts, model, ranks, text, at):
    theirs = verdicts[model, ranks, text]
    assert (theirs["at"] if theirs else "") == at.replace("here", ""), theirs
    if at in AT_RUN_TIME:
        assert theirs["where"] in AT_RUN_TIME[at]
    if at:
        with pytest.raises(BatchError, match="Fix: "):
            laid_out(model, ranks, text)
    else:
        config = laid_out(model, ranks, text).config
        assert layout_of(config).world == ranks
        assert config.perf.trainer_host == ("process" if ranks > 1 else "thread")


# What a person reads, one layout for each refusal: what, got, who and fix.
REFUSED = [
    ("dense", 6, "tp 2 pp 2", "the trainer's 6 ranks do not divide by tensor_model_parallel_size 2 x "
     "pipeline_model_parallel_size 2 = 4 (got 1 nodes x 6 ranks). Fix: use a multiple of 4 ranks, or smaller sizes."),
    ("moe", 4, "tp 2 sp ep 4 etp 2", "do not divide by expert_tensor_parallel_size 2 x expert_model_parallel_size 4 = "
     "8 (got 1 nodes x 4 ranks). Fix: use a multiple of 8 ranks, or smaller sizes."),
    ("dense", 2, "tp 0", "megatron.tensor_model_parallel_size (--tensor-model-parallel-size): "
     "tensor_model_parallel_size should be at least 1 (got 0). Fix: raise it, or leave it out."),
    ("dense", 3, "tp 3", "megatron.tensor_model_parallel_size (--tensor-model-parallel-size), {path}: "
     "num_attention_heads 8 does not divide by tensor_model_parallel_size 3 (got 8 / 3). "
     "Fix: make tensor_model_parallel_size one of 1, 2, 4."),
    ("triple", 2, "tp 2", "num_key_value_heads 3 does not divide by tensor_model_parallel_size 2 (got 3 / 2). "
     "Fix: make tensor_model_parallel_size one of 1, 3."),
    ("odd", 2, "tp 2", "vocab_size 265 does not divide by tensor_model_parallel_size 2 (got 265 / 2). Fix: make"),
    ("narrow", 4, "tp 4", "intermediate_size 46 does not divide by tensor_model_parallel_size 4 (got 46 / 4). Fix"),
    ("moe", 16, "etp 16", "moe_intermediate_size 24 does not divide by expert_tensor_parallel_size 16 (got 24 / 16). "
     "Fix: make expert_tensor_parallel_size one of 1, 2, 3, 4, 6, 8, 12, 24."),
    ("six", 4, "ep 4", "num_experts 6 does not divide by expert_model_parallel_size 4 (got 6 / 4). Fix: make"),
    ("dense", 3, "pp 3", "num_hidden_layers 4 does not divide by pipeline_model_parallel_size 3 (got 4 / 3). Fix"),
    ("deep", 4, "pp 4 vpp 2", "num_hidden_layers 12 does not divide by pipeline_model_parallel_size 4 x "
     "virtual_pipeline_model_parallel_size 2 (got 12 / 8). Fix: make the product of both one of 1, 2, 3, 4, "
     "6, 12."),
    ("dense", 2, "vpp 2", "virtual_pipeline_model_parallel_size 2 needs a pipeline to interleave (got "
     "pipeline_model_parallel_size = 1). Fix: raise pipeline_model_parallel_size, or leave the virtual size out."),
    ("moe", 2, "tp 2 nosp", "only if sequence_parallel is on too (got tensor_model_parallel_size = 2, 4 experts ({path}"
     ")). Fix: --sequence-parallel, or tensor_model_parallel_size = 1."),
    ("dense", 2, "ep 2", "expert_model_parallel_size 2 has no experts to split (got a dense model). "
     "Fix: leave expert_model_parallel_size out."),
    ("dense", 4, "etp 4", "expert_tensor_parallel_size 4 has no experts to split (got a dense model). "
     "Fix: leave expert_tensor_parallel_size out."),
    ("dense", 2, "pp 2 vpp 2 group 4", "microbatch_group_size_per_vp_stage should be the pipeline-parallel size "
     "(got 4). Fix: leave it out, or write 2."),
    ("dense", 3, "", "rollout.global_batch_size (batch arithmetic), perf.micro_batch_size (default), "
     "perf.actor_num_gpus_per_node (--actor-num-gpus-per-node): global_batch_size 32 does not divide by "
     "micro_batch_size 1 x 3 data-parallel ranks (got 32 / 3). "
     "Fix: use a multiple of 3: 30 or 33, or --use-dynamic-batch-size."),
    ("dense", 4, "pp 2 vpp 2 batch 6", "global_batch_size 6 does not divide by micro_batch_size 1 x 2 data-parallel "
     "ranks x 2 (an interleaved pipeline takes micro-batches by the pipeline size) (got 6 / 4). "
     "Fix: use a multiple of 4: 4 or 8, or --use-dynamic-batch-size."),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "text", "message"), REFUSED, ids=lambda value: str(value)[:24])
def test_a_refusal_names_key_number_and_fix(laid_out, checkpoints, model, ranks, text, message):
    with pytest.raises(BatchError) as caught:
        laid_out(model, ranks, text)
    assert message.format(path=checkpoints / model / "config.json") in str(caught.value)


# What a layout leaves unsaid: the words that Megatron-core refuses it without, and the stage that does.
DERIVED = [
    ("moe", 2, "tp 2", "sp", "forward"), ("mixed", 2, "tp 2", "sp", "forward"),
    ("moe", 4, "tp 2 sp ep 4", "etp 1", "groups"), ("moe", 8, "tp 4 ep 4", "sp etp 1", "groups"),
    ("moe", 4, "tp 2 sp pp 2 ep 2", "etp 1", "groups"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "ranks", "text", "more", "at"), DERIVED, ids=lambda value: str(value))
def test_what_experts_need_follows_of_a_layout_with_a_note(laid_out, verdicts, model, ranks, text, more, at):
    assert verdicts[model, ranks, text]["at"] == at, "unsaid, megatron-core refuses it"
    assert not verdicts[model, ranks, f"{text} {more}"]
    whole, plan = laid_out(model, ranks, f"{text} {more}"), laid_out(model, ranks, text)
    assert layout_of(plan.config) == layout_of(whole.config)
    completed = {"sequence_parallel": "sp" in more.split(), "expert_tensor_parallel_size": "etp" in more}
    for key, derived in completed.items():
        assert any(note.startswith(f"{key} is ") for note in plan.notes) == derived
        assert (re.search(rf"megatron\.{key} = \w+  \(derived\)", plan.to_text()) is not None) == derived


def test_what_a_layout_says_stays_as_it_is(laid_out):
    """The default that fits, the size that is named, and a dense model."""
    assert layout_of(laid_out("moe", 4, "tp 2 sp ep 2").config).expert_tensor == 2
    assert layout_of(laid_out("moe", 8, "tp 2 sp ep 2 etp 4").config).expert_tensor == 4
    assert not layout_of(laid_out("dense", 2, "tp 2").config).sequence_parallel


DYNAMIC = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 2048]


@pytest.mark.parametrize(("text", "flags", "message"), [
    ("", ["--trainer-host", "thread"], 'trainer_host = "thread" is the driver\'s process, which holds one rank (got 4 '
     'ranks). Fix: trainer_host = "process"'),
    ("batch 2", DYNAMIC, "global_batch_size 2 does not divide by 4 data-parallel ranks (got 2 / 4). "
     "Fix: use a multiple of 4: 4."),
    ("pp 2 vpp 2 batch 6", DYNAMIC, "global_batch_size 6 does not divide by 2 data-parallel ranks x 2 (an interleaved"),
    ("", ["--actor-num-nodes", 0], "actor_num_nodes should be at least 1"),
])  # fmt: skip
def test_what_concerns_hosts_and_batches(laid_out, text, flags, message):
    with pytest.raises(ConfigError) as caught:
        laid_out("dense", 4, text, *flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "flags", "note"), [
    ("tp 2", [], "tensor_model_parallel_size 2 without sequence_parallel"),
    ("cp 2", ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 100],
     "rollout_max_response_len 1024 is above max_tokens_per_gpu 100 x "
     "context_parallel_size 2: a longer sample rides alone"),
])  # fmt: skip
def test_what_is_announced(laid_out, text, flags, note):
    assert any(note in one for one in laid_out("dense", 4, text, *flags).notes)


def test_a_budget_that_context_parallelism_makes_large_enough_is_not_announced(laid_out):
    notes = laid_out("dense", 4, "cp 4", *DYNAMIC, "--rollout-max-response-len", 8192).notes
    others = ("holds no weights", "old log-probs", "data/train.jsonl is missing")
    assert not [note for note in notes if not any(text in note for text in others)]


def test_a_checkpoint_that_is_not_there_yet_is_left_to_the_start(plan):
    flags = ["--actor-num-gpus-per-node", 8, "--tensor-model-parallel-size", 8]
    assert layout_of(plan(*flags).config).tensor == 8
    with pytest.raises(BatchError, match=r"num_layers \(recipe.toml:15\): num_hidden_layers 2 does not divide"):
        plan("--actor-num-gpus-per-node", 4, "--pipeline-model-parallel-size", 4)


def test_a_layout_and_its_text(laid_out):
    layout = layout_of(laid_out("moe", 8, "tp 2 sp pp 2 vpp 2 ep 2 etp 1").config)
    assert layout == Layout(world=8, tensor=2, pipeline=2, virtual_pipeline=2, context=1, expert=2, expert_tensor=1,
                            data=2, expert_data=2, sequence_parallel=True)
    assert layout.to_text() == "tp 2 + sp, pp 2 x vpp 2, cp 1, ep 2, etp 1, dp 2: 8 ranks"
    assert (layout.micro_batch_multiple, Layout(pipeline=2).micro_batch_multiple) == (2, 1)
    assert Layout().to_text() == "tp 1, pp 1, cp 1, ep 1, dp 1: 1 rank"
    assert layout_of(laid_out("dense", 2, "pp 2 vpp 1").config).virtual_pipeline is None


@pytest.mark.parametrize(("ranks", "text", "flags", "lines"), [
    (1, "", [], ["1 trainer rank in a thread: tp 1, pp 1, cp 1, ep 1, dp 1, bfloat16",
                 "micro-batches of 1 samples: 32 per step"]),
    (1, "", DYNAMIC, ["micro-batches of at most 2048 tokens"]),
    (8, "tp 2 sp pp 2 mbs 2", ["--no-bf16"], [
        "8 trainer ranks in processes: tp 2 + sp, pp 2, cp 1, ep 1, dp 2, float32",
        "micro-batches of 2 samples: 8 per step on each of 2 data-parallel ranks, balanced by tokens"]),
    (8, "cp 2", [*DYNAMIC, "--balance-by-flops"], ["micro-batches of at most 4096 tokens (2048 x cp 2): the same "
     "number per step on each of 4 data-parallel ranks, balanced by operations"]),
    (4, "pp 2 vpp 2", [*DYNAMIC, "--no-balance-data"], ["micro-batches of at most 2048 tokens: a multiple of 2 per "
     "step on each of 2 data-parallel ranks, dealt in turn"]),
])  # fmt: skip
def test_the_plan_prints_layout_and_micro_batches(laid_out, ranks, text, flags, lines):
    printed = laid_out("dense", ranks, text, *flags).to_text().splitlines()
    for line in lines:
        assert f"  {line}" in printed


def test_operations_are_not_counted_of_an_unknown_architecture(laid_out, checkpoints):
    (checkpoints / "bare").mkdir()
    (checkpoints / "bare/config.json").write_text(json.dumps({"num_hidden_layers": 2, "vocab_size": 264}))
    with pytest.raises(ConfigError, match="no hidden_size, num_attention_heads.*in config.json.*by their tokens"):
        laid_out("bare", 2, "", "--balance-by-flops")


SHARED = DENSE | dict(model_type="glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
                      n_shared_experts=2, first_k_dense_replace=1)


@pytest.mark.parametrize("constants", [DENSE, MODELS["mixed"], SHARED], ids=["dense", "mixed", "shared experts"])
def test_active_parameters_are_those_of_the_matrices_that_a_token_meets(constants, tmp_path):
    """Against models of transformers, counted from the shapes and names of their parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(constants))
    found = architecture_of(RunConfig(checkpoint=Checkpoint(hf_checkpoint=str(tmp_path))))
    count = 0
    for name, tensor in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).named_parameters():
        share = found.experts_per_token / found.experts if ".experts." in name else 1
        count += tensor.numel() * share if tensor.dim() > 1 and "embed_tokens" not in name else 0
    assert estimate.active_parameters(found) == count and found.attention == 4 * 8 * 8
    assert not found.uncounted and "hidden_size" in Architecture().uncounted


def test_shared_experts_are_split_like_a_dense_layer(plan, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHARED | {"intermediate_size": 64, "moe_intermediate_size": 25}))
    with pytest.raises(BatchError, match=r"shared_expert_intermediate_size 50 does not divide by tensor_model_para"):
        plan("--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 4, "--sequence-parallel",
             "--expert-tensor-parallel-size", 1, **{"elsewhere/tiny": str(tmp_path), "num_layers = 2\n": ""})
