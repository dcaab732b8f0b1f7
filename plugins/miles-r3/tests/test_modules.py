"""Blocks of transformers take the experts that they are given, whatever way an architecture has to choose them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from miles_r3.modules import ModuleRouters
from miles_r3.passes import Recorded

from miles_core.errors import TrainError

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=24, moe_intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=64,
             num_experts_per_tok=2)
KINDS = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True}, "qwen2_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8}, "olmoe": {"num_experts": 8}, "gpt_oss": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "q_lora_rank": 8,
                    "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "hy_v3": {"num_experts": 8, "mlp_layer_types": ["sparse", "sparse"]},
}  # fmt: skip
ROWS = 6


def adopted(kind):
    """(model, its routers, experts of each layer's last call by number)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | KINDS[kind])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    taken: dict[int, list[torch.Tensor]] = {}
    for number, layer in enumerate(model.model.layers):
        block = next(part for part in layer.modules() if hasattr(part, "experts"))
        block.experts.register_forward_pre_hook(
            lambda _, inputs, number=number: taken.setdefault(number, []).append(
                next(one for one in inputs[1:] if not one.is_floating_point())))
    routers = ModuleRouters(2, 2, 8)
    routers.adopt(model)
    return model, routers, taken


def routes():
    """Two of eight experts for each of two layers; row 2 of the first layer has none."""
    draw = np.random.default_rng(1)
    given = np.array([[draw.choice(8, 2, replace=False) for _ in range(2)] for _ in range(ROWS)], np.int16)
    given[2, 0] = -1
    return given


def run(model, routers, given, again=False):
    """Sum of the logits of six tokens, whose layers may be computed again by a backward pass."""
    from torch.utils.checkpoint import checkpoint

    with routers.forward(given, np.arange(ROWS, dtype=np.int32), replay=True):
        tokens = torch.arange(ROWS)[None]
        if not again:
            return model(tokens).logits.sum()
        return checkpoint(lambda: model(tokens).logits.sum(), use_reentrant=False)


@pytest.mark.parametrize("again", [False, True], ids=["once", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_takes_the_given_experts_and_its_router_has_a_gradient(kind, again):
    model, routers, taken = adopted(kind)
    run(model, routers, None)
    free = {number: calls.pop() for number, calls in taken.items()}
    given = routes()
    with routers.counting() as counts, routers.stepping():
        run(model, routers, given, again).backward()
    for number, calls in taken.items():
        assert len(calls) == 1 + again
        for chosen in calls:
            known = given[:, number].min(-1) >= 0
            assert np.array_equal(chosen.numpy()[known], given[known, number]), number
            if number == 0:
                assert torch.equal(chosen[2].sort().values, free[0][2].sort().values), "a row without routes is free"
    assert counts.totals.tolist()[:2] == [2 * ROWS, 2 * ROWS - 1], "a recompute does not count again"
    names = [name for name, one in model.named_parameters() if name.endswith((".mlp.gate.weight", ".router.weight"))]
    assert len(names) == 2
    assert all(model.get_parameter(name).grad.abs().max() > 0 for name in names)


def test_what_a_free_pass_chose_is_recorded():
    model, routers, taken = adopted("qwen3_moe")
    with routers.recording() as recorded, torch.no_grad():
        run(model, routers, None)
    assert isinstance(recorded, Recorded)
    for number, pairs in recorded.by_layer.items():
        assert torch.equal(pairs[0][1].long(), taken[number][0])


def test_a_model_whose_experts_are_not_chosen_by_topk_is_an_error():
    model, routers, _ = adopted("qwen3_moe")
    other = ModuleRouters(2, 2, 7)
    other.adopt(model)
    with pytest.raises(TrainError) as caught:
        run(model, other, None)
    assert caught.value.code == "r3-blocks-unsupported"
    with pytest.raises(TrainError) as caught:
        routers.adopt(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert caught.value.code == "r3-blocks-missing"
