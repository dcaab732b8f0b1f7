"""Stacked experts where there is no SGLang; tests/sglang/test_stacks.py has its own layers."""

import json

import pytest
import torch
from miles_sglang.server_extension import miles_stacks, miles_weights

EXPERTS, NAME = 6, "model.layers.3.mlp.experts.{}.up_proj.weight"


def test_a_stack_falls_apart_into_the_names_of_checkpoints():
    stack = torch.arange(12.0).view(4, 3)
    parts = dict(miles_stacks.apart(NAME.format("2-5"), stack))
    assert list(parts) == [NAME.format(number) for number in range(2, 6)]
    assert torch.equal(torch.stack(list(parts.values())), stack)
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    assert list(miles_stacks.apart(name, stack)) == [(name, stack)]


@pytest.mark.parametrize("limit, names", [(96, ["0-5"]), (95, ["0-4", "5-5"]), (40, ["0-1", "2-3", "4-5"]),
                                          (1, [f"{i}-{i}" for i in range(6)])])
def test_a_stack_is_cut_between_experts(limit, names):
    stack = torch.arange(24.0).view(6, 4)
    parts = list(miles_stacks.cut(NAME.format("0-5"), stack, limit))
    assert [name for name, _ in parts] == [NAME.format(one) for one in names]
    assert torch.equal(torch.cat([part for _, part in parts]), stack)
    assert len(list(miles_stacks.cut("model.norm.weight", stack, limit))) == 1


class Model(torch.nn.Module):
    """Its experts are layers of their own, as a server's without SGLang's fused ones."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ParameterList(torch.zeros(4) for _ in range(EXPERTS))
        self.seen = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.seen.append(name)
            self.experts[int(name.split(".")[-3])].data.copy_(tensor)


def test_a_model_without_fused_experts_gets_them_one_by_one():
    model, stack = Model(), torch.randn(EXPERTS, 4)
    plan = {"tensors": [[NAME.format("0-5"), "float32", [EXPERTS, 4], 0]]}
    miles_weights.load(model, [(json.dumps(plan), stack.view(-1).view(torch.uint8))])
    assert not miles_weights._errors
    assert model.seen == [NAME.format(number) for number in range(EXPERTS)]
    assert torch.equal(torch.stack(list(model.experts)), stack)


class FusedMoE(torch.nn.Module):
    """As much of SGLang's layer as is asked: two of four experts, of which the second half of the rows."""

    class UnquantizedFusedMoEMethod:
        pass

    use_triton_kernels = use_flashinfer_trtllm_moe = False
    moe_tp_rank, _num_global_routed = 1, 4

    def __init__(self):
        super().__init__()
        self.quant_method, self.calls = self.UnquantizedFusedMoEMethod(), []
        for name, shape in {"w13_weight": (2, 6, 5), "w2_weight": (2, 5, 3)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
            getattr(self, name).weight_loader = self.weight_loader

    def weight_loader(self, param, loaded_weight, weight_name, shard_id, expert_id):
        if expert_id in (2, 3):
            self._weight_loader_impl(param=param, loaded_weight=loaded_weight, weight_name=weight_name,
                                     shard_id=shard_id, expert_id=expert_id - 2)

    def _load_model_weight_or_group_weight_scale(self, shard_dim, expert_data, shard_id, loaded_weight, tp_rank):
        self.calls.append((shard_dim, shard_id, tp_rank))
        rows = expert_data if shard_id == "w2" else expert_data.chunk(2, 1)[shard_id == "w3"]
        rows.copy_(loaded_weight.chunk(2, shard_dim)[tp_rank])


def test_a_rank_takes_its_experts_out_of_a_stack():
    model = torch.nn.ModuleDict({"experts": FusedMoE()})
    experts, layer = miles_stacks.FusedExperts(model), model["experts"]
    assert experts.hindrance is None and not hasattr(layer, "_weight_loader_impl")
    gate, up, down = torch.randn(4, 6, 5), torch.randn(4, 6, 5), torch.randn(4, 5, 6)
    assert experts.take("experts.0-3.gate_proj.weight", gate) and experts.take("experts.0-3.down_proj.weight", down)
    assert experts.take("experts.0-2.up_proj.weight", up[:3]), "the third of four experts"
    assert torch.equal(layer.w13_weight[:, :3], gate[2:, 3:]) and torch.equal(layer.w2_weight, down[2:, :, 3:])
    assert torch.equal(layer.w13_weight[0, 3:], up[2, 3:]) and not layer.w13_weight[1, 3:].any()
    assert experts.take("experts.0-1.up_proj.weight", up[:2]) and len(layer.calls) == 3, "none of this rank's"
    assert not experts.take("experts.0-3.gate_proj.bias", gate) and not experts.take("experts.0.gate_proj.weight", gate)
