"""Two sides that compute the same are the same, whatever the family, the layout and the precision."""

import pytest
from miles_divergence.rounding import EACH

RANKS = ["--actor-num-gpus-per-node", "2", "--trainer-host", "process"]

EAGER = ("gemma2", "gpt_oss")
"""The trainer fsdp computes their attention with masks alone."""

ABSENT = ("llama4", "llama4_text", "kimi_k2", "kimi_k25", "mimo")
"""transformers has no such module, or none that the trainer fsdp can build."""

FULL = ("Qwen3-MoE", "Qwen2-MoE, some layers dense", "Llama with biases", "Phi-4", "Gemma 3, text", "DeepSeek-V3",
        "gpt-oss", "Qwen3-Next")

pytestmark = pytest.mark.xdist_group("divergence")


def agree(comparison):
    rows = [row for row in comparison.rows if row.state != "elsewhere"]
    each, whole = max(rows, key=lambda row: row.excess), max(rows, key=lambda row: row.whole)
    print(f"\nworst: {EACH * each.excess:.2f} {each.name} {each.what}; {whole.whole:.2f} {whole.name} {whole.what}")
    assert comparison.same, (comparison.first, comparison.metrics)
    assert comparison.modules == [] and comparison.weights == [] and comparison.alone[1] == []
    assert len(rows) > 100, "the two have hardly a name in common"


def both(sides, names):
    for name in names:
        flags = ["--attn-implementation", "eager"] if sides.cases[name].family in EAGER else []
        yield name, lambda name=name, flags=flags: agree(
            sides.compare(name, ["--trainer", "fsdp", *flags], ["--trainer", "megatron"]))


def test_a_model_is_the_same_in_both_trainers(sides):
    agree(sides.compare("Qwen3", ["--trainer", "megatron"], ["--trainer", "fsdp"]))


@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_a_family_is_the_same_in_both_trainers(sides, name):
    for _, check in both(sides, [name]):
        check()


@pytest.mark.slow
def test_every_family_is_the_same_in_both_trainers(sides, subtests):
    for name, check in both(sides, [name for name, case in sides.cases.items() if case.family not in ABSENT]):
        with subtests.test(name):
            check()


@pytest.mark.full
def test_bfloat16_is_rounding(sides):
    agree(sides.compare("Qwen3", ["--trainer", "megatron"], ["--trainer", "megatron", "--bf16"]))


@pytest.mark.full  # two processes on the other side
@pytest.mark.parametrize(("name", "flags"), [
    ("Qwen3", ["--tensor-model-parallel-size", "2"]),
    ("Qwen3", ["--pipeline-model-parallel-size", "2"]),
    ("Qwen3", ["--context-parallel-size", "2"]),
    ("Qwen3", ["--trainer", "fsdp"]),
    ("Qwen3", ["--trainer", "fsdp", "--fsdp.context-parallel-size", "2"]),
    ("Qwen3-MoE", ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2",
                   "--expert-tensor-parallel-size", "1"]),
    ("Phi-4", ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
])
def test_a_layout_is_the_same_as_one_rank(sides, name, flags):
    agree(sides.compare(name, [], [*RANKS, *flags]))


@pytest.mark.full
@pytest.mark.parametrize(("defect", "module"), [
    ("second-rank-projection-stale", "model.layers.1.self_attn.o_proj"),
    ("second-rank-norm-stale", "model.layers.2.input_layernorm"),
    ("second-rank-values-stale", "model.layers.3.self_attn.v_proj"),
])
def test_a_rank_with_another_part_is_found(sides, defect, module):
    flags = ["--tensor-model-parallel-size", "2", "--plugin", str(sides.defects), "--defects.plant", defect]
    assert sides.compare("Qwen3", [], [*RANKS, *flags]).modules == [module]
