"""A weight whose inputs are doubled gives what its double gives, however a decoder keeps and multiplies it."""

import pytest
import torch
from miles_local.device import DeviceDecoder
from miles_local.modules import ModuleDecoder
from miles_local.operands import rounding
from miles_local.placing import decoder_for
from miles_local.weights import read_tensors
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 12,
         "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64, "initializer_range": 0.3,
         "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
KINDS = {
    "qwen3": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "granite": {}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},  # experts stacked under other names
}
ENDS = ("o_proj.weight", "down_proj.weight", "w2.weight")
PROMPTS = [(3, 5, 7, 11), (2, 4)]


def stream(folder, *, inputs):
    """The checkpoint's tensors, of which some double their inputs or, without `inputs`, are doubled."""
    for name, tensor in read_tensors(folder):
        if name.endswith(ENDS):
            if inputs:
                tensor.round_inputs = lambda x: 2 * x
            else:
                tensor *= 2
        yield name, tensor


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_rounded_where_a_weight_says_so(kind, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    decoder, _ = decoder_for(tmp_path, torch.float32)
    assert isinstance(decoder, ModuleDecoder) == (kind in ("granite", "mixtral"))
    decoders = [decoder]
    if not isinstance(decoder, ModuleDecoder):
        decoders.append(DeviceDecoder(decoder.shape, 64, torch.float32, torch.device("cpu")))
    for each in decoders:
        marked = each.adopt(each.random(), each.stage(stream(tmp_path, inputs=True)))
        doubled = each.stage(stream(tmp_path, inputs=False))
        with torch.inference_mode(), rounding(doubled):
            expected = each.prefill(doubled, PROMPTS).logits
        with torch.inference_mode(), rounding(marked):
            found = each.prefill(marked, PROMPTS).logits
        with torch.inference_mode():
            assert not torch.equal(each.prefill(marked, PROMPTS).logits, expected)
        if isinstance(each, ModuleDecoder) and kind == "mixtral":  # experts marked, and so looped over
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found, expected)
