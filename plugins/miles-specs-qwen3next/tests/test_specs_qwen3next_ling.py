"""Ling 3.0: whole runs, layouts, checkpoints and conversions of a random model, and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from miles_megatron.testing.checkpoints import tensors
from miles_megatron.testing.demo import demo_run
from miles_megatron.testing.parity import TINY, Case, cases, model_parity, random_model
from miles_megatron.testing.ranks import batches, distance
from miles_specs_qwen3next import mixer

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

pytestmark = pytest.mark.xdist_group("specs-qwen3next")

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "arithmetic"
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--no-bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96,
       "--trainer-host", "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip
GRADIENTS = ("--no-use-distributed-optimizer", "--clip-grad", 0, "--lr", 0)
TWO = ("--actor-num-gpus-per-node", 2)
FIRST = next(case for case in cases(Path(__file__).with_name("parity.toml")) if case.family == "bailing_hybrid")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A delta net and a latent attention, and the vocabulary of the examples."""
    made = tmp_path_factory.mktemp("ling")
    random_model(Case("bailing_hybrid", "tiny", {**FIRST.config, **WORDS})).save_pretrained(made)
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, made)
    return made


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


@pytest.mark.full
def test_a_run_needs_nothing_but_the_checkpoint(folder, tmp_path):
    """Two rollouts: the engine decodes what is trained, and every part of both mixers trains."""
    steps, _ = demo_run(ROOT, folder, tmp_path, "--use-rollout-routing-replay", "--entropy-coef", "0.01")
    assert len(steps) == 2
    assert all(one["train/train_rollout_logprob_abs_diff_max"] <= 2e-5 for one in steps)
    before, after = tensors(folder), tensors(tmp_path / "run" / "hf")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert not {name for name in same if ".attention." in name}


LAYOUTS = {
    "tp2-ep2": ("--tensor-model-parallel-size", 2, "--sequence-parallel", "--expert-tensor-parallel-size", 1,
                "--expert-model-parallel-size", 2),
    "cp2-recompute": ("--context-parallel-size", 2, "--recompute-granularity", "full"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2-ep2", pytest.param("cp2-recompute", marks=pytest.mark.slow)])
def test_a_layout_changes_nothing(folder, one, two, layout):
    """The whole gradient, and apart from it those of the mixers and of the gate of each head, which are small."""
    [batch] = batches(1, vocab=VOCAB)
    _, expected = one.gradients(plan(folder, *GRADIENTS), batch)
    _, got = two.gradients(plan(folder, *GRADIENTS, *TWO, *LAYOUTS[layout]), batch)
    mixers = [name for name in expected if ".attention." in name and not name.endswith(("A_log", "dt_bias"))]
    for names, limit in ((expected, 4e-6), (mixers, 1e-5), (["model.layers.1.attention.g_proj.weight"], 1e-5)):
        assert distance(got, expected, names) < limit


@pytest.mark.full
def test_a_resume_under_another_layout_goes_on_from_the_same_bits(folder, one, two, tmp_path):
    whole = two.train(plan(folder, *TWO, "--tensor-model-parallel-size", 2, "--sequence-parallel"),
                      batches(1, vocab=VOCAB), save=tmp_path)["weights"]
    again = one.train(plan(folder, "--load", tmp_path), [])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)


def test_conversion_keeps_every_bit(folder, convert, tmp_path):
    convert("hf-to-dist", folder, tmp_path / "dist")
    convert("dist-to-hf", tmp_path / "dist", tmp_path / "back", "--hf-checkpoint", folder)
    before, after = tensors(folder), tensors(tmp_path / "back")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


WRONG = {
    "channels of a head that fade alike": ("_decays", lambda right: lambda self, rate, step: right(
        self, rate, step.unflatten(-1, (self.heads, -1)).mean(-1, keepdim=True).expand(
            -1, -1, -1, self.key_size).flatten(2))),
    "no floor": ("_decays", lambda right: lambda self, rate, step: mixer.GatedDeltaNet._decays(
        self, rate[:, None], step.unflatten(-1, (self.heads, -1)))),
    "the gate of Qwen3-Next": ("activation", lambda right: staticmethod(torch.nn.functional.silu)),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_part_is_noticed(wrong, tmp_path, monkeypatch):
    name, spoil = WRONG[wrong]
    monkeypatch.setattr(mixer.ChannelDeltaNet, name, spoil(getattr(mixer.ChannelDeltaNet, name)))
    with pytest.raises(AssertionError, match="Ling 3.0: logits differ"):
        model_parity(FIRST, tmp_path).check()


@pytest.mark.parametrize("change", [
    {"attention_bias": True}, {"hidden_act": "gelu"}, {"q_lora_rank": 32}, {"num_key_value_heads": 2},
    {"expert_swiglu_limit_list": [0, 4.0]}, {"share_expert_swiglu_limit_list": [0, 5.0]},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_variants_that_are_not_modelled_are_refused(change):
    from miles_specs_qwen3next.ling import bailing_hybrid
    from transformers import AutoConfig

    with pytest.raises(ConfigError) as refused:
        bailing_hybrid(AutoConfig.for_model("bailing_hybrid", **{**TINY, **FIRST.config, **WORDS, **change}))
    [(key, value)] = change.items()
    assert refused.value.code == "architecture-variant-unsupported"
    assert key in str(refused.value) and refused.value.got == value


def test_limits_that_limit_no_layer_are_none():
    from miles_specs_qwen3next.ling import bailing_hybrid
    from transformers import AutoConfig

    none = {"expert_swiglu_limit_list": [0, 0.0], "share_expert_swiglu_limit_list": None}
    assert bailing_hybrid(AutoConfig.for_model("bailing_hybrid", **{**TINY, **FIRST.config, **WORDS, **none}))
