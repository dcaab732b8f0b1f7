"""Runs in SGLang's Python: stacked experts into its own layers, against the experts one by one through its own loader.

Prints what it found as JSON; test_stacks.py says what has to be found.
"""

import json
import sys
import types
from pathlib import Path

import sglang_cpu  # noqa: F401 - stands in for the kernels before SGLang is imported
import torch
from sglang.srt.layers.moe.fused_moe_triton import layer as fused
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/miles-sglang/src/miles_sglang/server_extension"))
from miles_stacks import FusedExperts, apart, cut

EXPERTS, INNER, HIDDEN = 8, 12, 16
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

fused.get_server_args = lambda: types.SimpleNamespace(enable_eplb=False)


class Layer(fused.FusedMoE):
    """SGLang's experts as one rank of several has them, without processes for the others."""

    def __init__(self, expert_ranks=1, expert_rank=0, tensor_ranks=1, tensor_rank=0):
        torch.nn.Module.__init__(self)
        self.moe_tp_size, self.moe_tp_rank = tensor_ranks, tensor_rank
        self.moe_ep_size, self._expert_storage_rank = expert_ranks, expert_rank
        self._num_global_routed, self._num_local_routed = EXPERTS, EXPERTS // expert_ranks
        self.num_local_experts, self._has_fused_shared = self._num_local_routed, False
        self.quant_config, self.layer_id, self.use_presharded_weights = None, 0, False
        self.use_triton_kernels = self.use_flashinfer_trtllm_moe = self.uses_expert_location = False
        self.moe_runner_config = types.SimpleNamespace(is_gated=True)
        self.quant_method = UnquantizedFusedMoEMethod()
        self.quant_method.create_weights(self, self.num_local_experts, HIDDEN, INNER // tensor_ranks, torch.float32,
                                         weight_loader=self.weight_loader)
        for parameter in self.parameters():
            torch.nn.init.constant_(parameter, torch.nan)


def model(*ranks):
    return torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"experts": Layer(*ranks)})})


def same(*ranks):
    """Whether a rank holds after stacks, whole and in parts, what it holds after single experts; and some of each."""
    draw = torch.Generator().manual_seed(0)
    stacks = [(f"mlp.experts.0-{EXPERTS - 1}.{kind}.weight", torch.randn(EXPERTS, *shape, generator=draw))
              for kind, shape in SHAPES.items()]
    one_by_one, answers = Layer(*ranks), []
    for name, tensor in (pair for stack in stacks for pair in apart(*stack)):
        _, _, number, kind, _ = name.split(".")
        parameter = one_by_one.w2_weight if kind == "down_proj" else one_by_one.w13_weight
        one_by_one.weight_loader(parameter, tensor, name, SHARDS[kind], int(number))
    for limit in (10**9, 3 * INNER * HIDDEN * 4, 1):
        whole = model(*ranks)
        experts = FusedExperts(whole)
        assert experts.hindrance is None, experts.hindrance
        answers.append(all(experts.take(*part) for stack in stacks for part in cut(*stack, limit)))
        answers += [torch.equal(one, other) and not one.isnan().any() for one, other in zip(
            whole.parameters(), one_by_one.parameters(), strict=True)]
    return all(answers)


def hindrance(change):
    one = model()
    change(one["mlp"]["experts"])
    experts = FusedExperts(one)
    assert not experts.take(f"mlp.experts.0-{EXPERTS - 1}.gate_proj.weight", torch.zeros(EXPERTS, INNER, HIDDEN))
    return experts.hindrance


class Fp8MoEMethod(torch.nn.Module):
    """By its name alone."""


def swapped(layer):
    """The first two experts have each other's place."""
    layer._map_global_expert_id_to_local_expert_id = lambda expert: {0: 1, 1: 0}.get(expert, expert)


if __name__ == "__main__":
    ranks = [(expert_ranks, expert_rank, tensor_ranks, tensor_rank)
             for expert_ranks in (1, 2, 4) for expert_rank in range(expert_ranks)
             for tensor_ranks in (1, 2, 3) for tensor_rank in range(tensor_ranks)]
    found = {"ranks": len(ranks), "wrong": [rank for rank in ranks if not same(*rank)]}
    found["hindrances"] = [hindrance(change) for change in (
        lambda layer: setattr(layer, "quant_method", Fp8MoEMethod()),
        lambda layer: setattr(layer, "use_triton_kernels", True),
        lambda layer: setattr(layer.w2_weight, "weight_loader", layer.weight_loader_fused), swapped)]
    fused.get_server_args = lambda: types.SimpleNamespace(enable_eplb=True)
    found["hindrances"].append(hindrance(lambda layer: None))
    print(json.dumps(found))
