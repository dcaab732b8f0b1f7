"""The rotary embedding against transformers': scalings, parts of a head, both pairings."""

import pytest
import torch
from miles_megatron.rope import Rope, Rotate
from miles_megatron.specs import Rotary

SCALED = {
    "default": Rotary(1e4),
    "linear": Rotary(1e4, scaling="linear", factor=4.0),
    "llama3": Rotary(5e5, scaling="llama3", factor=8.0, low=1.0, high=4.0, original=512),
}


@pytest.mark.parametrize("scaling", SCALED)
def test_frequencies_are_hugging_faces(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = SCALED[scaling]
    given = {"rope_type": scaling, "rope_theta": rotary.theta, "factor": rotary.factor, "low_freq_factor": rotary.low,
             "high_freq_factor": rotary.high, "original_max_position_embeddings": rotary.original}
    given = given if scaling == "llama3" else {key: given[key] for key in list(given)[:2 + (scaling == "linear")]}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=given)
    expected = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(Rope(64, rotary).inverse_frequency, expected, atol=0, rtol=3e-7)


def test_a_part_of_the_pairs_of_whole_heads_turns_as_in_gemma_4():
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
                              global_head_dim=40)
    expected = Gemma4TextRotaryEmbedding(config).full_attention_inv_freq
    rope = Rope(40, Rotary(1e6, 0.25, scaling="proportional"))
    assert (rope.inverse_frequency != 0).tolist() == [True] * 5 + [False] * 15
    torch.testing.assert_close(rope.inverse_frequency, expected, atol=0, rtol=3e-7)


@pytest.mark.parametrize(("family", "fraction"), [("qwen3", 1.0), ("glm4", 0.5), ("glm4", 1.0)])
def test_rotation_is_hugging_faces_and_backward_turns_back(family, fraction):
    from transformers.models.glm4 import modeling_glm4
    from transformers.models.qwen3 import modeling_qwen3

    x = torch.randn(7, 3, 16, dtype=torch.float64, requires_grad=True)
    rope = Rope(16, Rotary(1e4, fraction, family == "glm4"))
    cos, sin = rope.tables(torch.arange(7), torch.float64)
    out = Rotate.apply(x, cos[:, None], sin[:, None], rope.interleaved)
    theirs = {"qwen3": modeling_qwen3, "glm4": modeling_glm4}[family].apply_rotary_pos_emb
    full = (torch.cat([table, table], -1) for table in (cos, sin))
    torch.testing.assert_close(out, theirs(x, x, *full)[0])
    back = torch.autograd.grad(out, x, out.detach())[0]
    torch.testing.assert_close(back, x.detach())


def test_each_frequency_turns_by_its_axis_and_positions_that_are_one_on_all_are_plain():
    rope, plain = Rope(16, Rotary(1e4, axes=(0, 0, 1, 1, 1, 2, 2, 2))), Rope(16, Rotary(1e4))
    positions = torch.tensor([[0, 5, 9], [1, 2, 3], [7, 0, 4]])
    expected = [table[:, begin:end] for axis, begin, end in ((0, 0, 2), (1, 2, 5), (2, 5, 8))
                for table in plain.tables(positions[axis], torch.float32)[:1]]
    assert torch.equal(rope.tables(positions, torch.float32)[0], torch.cat(expected, 1))
    for one, other in zip(rope.tables(positions[:1].expand(3, -1), torch.float32),
                          plain.tables(positions[0], torch.float32), strict=True):
        assert torch.equal(one, other)
