"""GLM-5 and DeepSeek-V3.2: an indexer chooses keys, stays as it is, and is saved and exported with the rest."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from miles_megatron import sparse_latent
from miles_megatron.decoder import DecoderFamily
from miles_megatron.testing.parity import TINY, cases, model_parity, random_model
from miles_megatron.testing.ranks import batches
from miles_specs_moe.families import deepseek_v32, glm_moe_dsa
from safetensors.torch import load_file

from miles_core.errors import ConfigError
from miles_core.plugins.plan import prepare

CASES = {case.name: case for case in cases(Path(__file__).with_name("parity.toml"))}
CASE = CASES["GLM-5"]
VOCAB = 264
WORDS = {"vocab_size": VOCAB, "num_hidden_layers": 2, "pad_token_id": 256, "bos_token_id": None, "eos_token_id": 258}
RUN = ("--prompt-data", "data/none.jsonl", "--num-rollout", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
       "--rollout-max-response-len", 41, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 96, "--trainer-host",
       "process", "--disable-rewards-normalization", "--lr", 1e-3)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("glm5")
    random_model(replace(CASE, config={**CASE.config, **WORDS, "index_topk": 4})).save_pretrained(found)
    return found


def plan(folder, *flags):
    return prepare(None, ["--hf-checkpoint", str(folder), *map(str, (*RUN, *flags))])


@pytest.mark.full
def test_an_indexer_stays_and_a_resume_goes_on(folder, one, two, tmp_path):
    """With the distributed optimizer, tensor parallelism and recomputation; then on one rank."""
    flags = ("--bf16", "--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel",
             "--recompute-granularity", "full")
    whole = two.train(plan(folder, *flags), batches(1, vocab=VOCAB), save=tmp_path)["weights"]
    again = one.train(plan(folder, "--bf16", "--load", tmp_path), [])["weights"]
    assert whole.keys() == again.keys() and all(np.array_equal(whole[name], again[name]) for name in whole)
    before = {name: tensor.bfloat16().float().numpy()
              for name, tensor in load_file(folder / "model.safetensors").items()}
    same = {name for name in before if np.array_equal(before[name], whole[name])}
    assert {name for name in before if ".indexer." in name} <= same
    assert not {name for name in before if "self_attn" in name and "indexer" not in name and "norm" not in name} & same


@pytest.mark.full
@pytest.mark.parametrize("name", ["GLM-5", "DeepSeek-V3.2"])
def test_attention_to_all_keys_is_noticed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse_latent.SparseAttention, "_mask", lambda self, bucket, *_: bucket.mask())
    with pytest.raises(AssertionError, match=f"{name}: logits differ"):
        model_parity(CASES[name], tmp_path).check()


@pytest.mark.full
def test_an_indexer_that_turns_neighbours_is_not_deepseeks(tmp_path):
    def describe(hf):
        made = deepseek_v32(hf)
        mixer = made.attention[0].mixer
        mixer = replace(mixer, indexer=replace(mixer.indexer, interleaved=True))
        return replace(made, attention=tuple(replace(one, mixer=mixer) for one in made.attention))

    with pytest.raises(AssertionError, match="DeepSeek-V3.2: logits differ"):
        model_parity(CASES["DeepSeek-V3.2"], tmp_path, DecoderFamily(describe)).check()


def test_a_choice_that_is_taken_over_is_refused():
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match="indexer_types"):
        glm_moe_dsa(AutoConfig.for_model("glm_moe_dsa", **{**TINY, **CASE.config, "index_topk_freq": 2}))


def test_a_layer_with_another_attention_is_refused():
    from transformers import AutoConfig

    kinds = ["indexed_attention", "full_attention"]
    with pytest.raises(ConfigError, match="layer_types"):
        deepseek_v32(AutoConfig.for_model("deepseek_v32", **{
            **TINY, **CASES["DeepSeek-V3.2"].config, "num_hidden_layers": 2, "layer_types": kinds}))
