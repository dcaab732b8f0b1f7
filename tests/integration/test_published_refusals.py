"""What is wrong with a checkpoint of any family is refused before a model is made, with the key or the tensor named."""

import json
import shutil

import pytest
import torch
from miles_megatron import hf_config
from miles_megatron.convert import architecture
from safetensors.torch import save_file

from miles_core.errors import CheckpointError, ConfigError, DataError
from miles_core.plugins.plan import prepare
from tests.integration.published import EXAMPLES, published, write

FAMILIES = list({one.model_type: one for one in published()}.values())
FOREIGN = {"clip_qkv": 8.0, "alibi": True, "logit_scale": 0.5, "use_parallel_residual": True}
"""No family here has one of them."""
OWN = {
    "deepseek_v3": {"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2},
    "minimax_m2": {"use_routing_bias": False, "shared_intermediate_size": 64, "layernorm_mlp_beta": 3.5},
    "hy_v3": {"route_norm": False, "moe_router_use_sigmoid": False, "qk_norm": False, "first_k_dense_replace": 2},
    "qwen3_5_moe": {"attn_output_gate": False, "norm_topk_prob": False},
    "qwen3_next": {"use_sliding_window": True}, "llama": {"sliding_window": 16, "final_logit_softcapping": 30.0},
    "mimo": {"use_mrope": True}, "gpt_oss": {"swiglu_alpha": 1.0}, "gemma3": {"attn_logit_softcapping": 50.0},
    "nemotron_h": {"residual_in_fp32": True, "mamba_proj_bias": True},
    "bailing_hybrid": {"expert_swiglu_limit_list": [0, 4.0], "share_expert_swiglu_limit_list": [5.0, 0],
                       "q_lora_rank": 32, "use_mla_nope": True},
    "qwen2": {"residual_multiplier": 0.22, "attn_logit_softcapping": 50.0},
}  # fmt: skip
"""Keys of one family with a value that it does not model, though transformers may not look."""
OUTPUT = ("o_proj.weight", "attention.dense.weight", "attn.wo_b.weight")
"""The attention's output, as one family or another calls it."""
CHANGES = [pytest.param(one, key, value, id=f"{one.model_type}-{key}") for one in FAMILIES
           for key, value in (FOREIGN | OWN.get(one.model_type, {})).items()]


def gated(parameters):
    """The first in the gate, the others in the full tier."""
    return [parameter if i == 0 else pytest.param(*parameter.values, id=parameter.id, marks=pytest.mark.full)
            for i, parameter in enumerate(parameters)]


@pytest.mark.parametrize(("one", "key", "value"), gated(CHANGES))
def test_a_key_that_would_go_unread_is_named(one, key, value, tmp_path):
    keys = one.hf_config
    keys.get("text_config", keys)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError) as caught:
        architecture(tmp_path, ())
    assert caught.value.code in ("architecture-variant-unsupported", "config-key-unread")
    assert key in caught.value.what and caught.value.got == value


@pytest.mark.parametrize("one", gated([pytest.param(one, id=one.model_type) for one in FAMILIES]))
def test_no_key_as_published_is_refused(one, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(one.hf_config))
    assert hf_config.read(tmp_path).model_type == one.model_type
    architecture(tmp_path, ())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(entry) -> a whole checkpoint of it in one file, its tensors."""
    made = {}

    def make(one):
        if one.model_type not in made:
            folder = tmp_path_factory.mktemp(one.model_type) / "hf"
            made[one.model_type] = folder, write(one, folder, plain=True)
        return made[one.model_type]

    return make


@pytest.mark.parametrize("one", gated([pytest.param(one, id=one.model_type) for one in FAMILIES]))
def test_tensors_that_do_not_fit_are_named_and_nothing_is_written(one, whole, convert, tmp_path):
    """One is missing, one is of no model, one has another shape: all three in one message."""
    folder, tensors = whole(one)
    shutil.copytree(folder, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors*"))
    norm = next(name for name in tensors if name.endswith((".model.norm.weight", "language_model.norm.weight",
                                                              "norm_f.weight")) or name == "model.norm.weight")
    inside = norm[:norm.rindex("norm")]
    output = next(name for name in tensors if name.startswith(inside) and name.endswith(OUTPUT))
    changed = {**tensors, f"{inside}layers.0.adapter.weight": torch.ones(2), output: tensors[output][:, :-1].clone()}
    del changed[norm]
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, tmp_path / "hf" / "model.safetensors",
              {"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        convert("hf-to-dist", tmp_path / "hf", tmp_path / "dist")
    assert caught.value.code == "tensors-do-not-fit-config"
    got = str(caught.value.got)
    assert all(name in got for name in ("model.norm.weight".removeprefix(one.inside), "adapter.weight",
                                        output.split(".")[-2]))
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("one", gated([pytest.param(one, id=one.model_type) for one in FAMILIES]))
def test_the_tokenizer_of_another_family_is_refused_by_the_plan(one, tmp_path):
    for name, content in {"config": one.config, "generation_config": one.generation_config}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, tmp_path)
    with pytest.raises(DataError) as caught:
        prepare(None, ["--hf-checkpoint", str(tmp_path), "--ref-load", "plain", "--plan-without-weights",
                       "--prompt-data", "data/none.jsonl", "--num-rollout", "1", "--rollout-batch-size", "8",
                       "--n-samples-per-prompt", "8"])  # fmt: skip
    assert caught.value.code == "tokenizer-of-other-model"


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4"])
def test_quantised_weights_are_refused_with_what_to_do(method, tmp_path):
    """The plain checkpoint is wanted, and what makes one of weights that can be made plain is named."""
    one = FAMILIES[0]
    write(one, tmp_path / "hf", plain=True)
    groups = {"group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}}
    keys = {**one.hf_config, "quantization_config": {"quant_method": method, "format": "pack-quantized",
                                                     "config_groups": groups}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ConfigError) as caught:
        prepare(None, ["--hf-checkpoint", str(tmp_path / "hf"), "--prompt-data", "data/none.jsonl", "--num-rollout",
                       "1", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8"])  # fmt: skip
    assert (caught.value.code, caught.value.got) == ("start-weights-quantised", method)
    assert "--ref-load" in caught.value.fix and "fp8-to-hf" in caught.value.fix
