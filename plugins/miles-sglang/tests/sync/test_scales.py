"""Quantised weights on their way: scales keep their dtype on both sides, whatever the rest is cast to."""

import pytest
import torch
from miles_local.buckets import Cutter, sent_as
from miles_sglang.server_extension.miles_sums import Held
from miles_sglang.sync.verify import Ledger, check

from miles_core.errors import SyncError

LAYER = "model.layers.0."


def sent():
    """A layer whose scales are float32, with a router's bias that is float32 as well, by names of a checkpoint."""
    draw = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(8, 8, generator=draw).bfloat16()}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.experts.0.down_proj"):
        tensors[f"{LAYER}{name}.weight"] = torch.randn(8, 8, generator=draw).to(torch.float8_e4m3fn)
        tensors[f"{LAYER}{name}.weight_scale_inv"] = torch.rand(2, 2, generator=draw)
    tensors[f"{LAYER}mlp.gate.bias"] = torch.randn(4, generator=draw)
    tensors[f"{LAYER}self_attn.o_proj.bias"] = torch.randn(4, generator=draw).bfloat16()
    tensors[f"{LAYER}input_layernorm.weight"] = torch.randn(8, generator=draw).bfloat16()
    return tensors


def engine(tensors):
    """What an engine makes of it: parameters that are joined, and a norm that is held wider than it was sent."""
    model, attention = torch.nn.Module(), f"{LAYER}self_attn."
    joined = {"embed_tokens.weight": tensors["model.embed_tokens.weight"],
              "gate.bias": tensors[f"{LAYER}mlp.gate.bias"], "o.bias": tensors[f"{attention}o_proj.bias"].float(),
              "input_layernorm.weight": tensors[f"{LAYER}input_layernorm.weight"].float()}
    for end in ("weight", "weight_scale_inv"):
        joined[f"qkv.{end}"] = torch.cat([tensors[f"{attention}{x}_proj.{end}"] for x in "qkv"])
        joined[f"experts.w2_{end}"] = tensors[f"{LAYER}mlp.experts.0.down_proj.{end}"][None]
    for name, tensor in joined.items():
        places = {"embed_tokens": "model", "gate": "model.layers.0.mlp", "experts": "model.layers.0.mlp",
                  "o": "model.layers.0.self_attn", "qkv": "model.layers.0.self_attn"}
        owner, *path = model, *places.get(name.split(".")[0], "model.layers.0").split("."), name.rpartition(".")[0]
        for part in path:
            part = {"o": "o_proj"}.get(part, part)
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(name.rpartition(".")[2], torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return model


def compare(model, ledger):
    held = Held(model, tuple(ledger.expectation().values()))
    names, sums = held.names, held.sums().arrived()
    check("engine 0", "url", ledger.total(), [{"names": names, "sums": sums.numpy().tobytes().hex(), "changed": []}],
          layers=1)


def test_what_was_sent_in_another_dtype_is_compared_in_it():
    tensors, ledger = sent(), Ledger()
    ledger.add(tensors.items())
    said = ledger.expectation()
    assert said["kinds"] == {"weight_scale_inv": "float32"}
    assert said["dtypes"] == {f"{LAYER}mlp.gate.bias": "float32"}, "one byte is never held wider; one bias is"
    compare(engine(tensors), ledger)


@pytest.mark.parametrize("name", ["layers.0.self_attn.qkv.weight", "layers.0.self_attn.qkv.weight_scale_inv",
                                  "layers.0.mlp.experts.w2_weight_scale_inv", "layers.0.mlp.gate.bias"])
def test_one_bit_of_a_weight_or_of_its_scale_is_noticed(name):
    tensors, ledger = sent(), Ledger()
    ledger.add(tensors.items())
    model = engine(tensors)
    bits = model.get_parameter(f"model.{name}").data.view(torch.uint8)
    bits.view(-1)[0] ^= 1  # of a float32: far below what bfloat16 could hold
    with pytest.raises(SyncError, match="does not hold the weights"):
        compare(model, ledger)


def test_a_tensor_may_keep_its_dtype():
    scale = torch.tensor([1.0009765625])
    assert sent_as(scale, torch.float32, torch.bfloat16) == torch.bfloat16
    scale.keeps_dtype = True
    assert sent_as(scale, torch.float32, torch.bfloat16) == torch.float32
    (bucket,) = Cutter(64, torch.float32, torch.bfloat16)([("a.weight_scale_inv", scale)])
    assert dict(bucket.views())["a.weight_scale_inv"].item() == 1.0009765625
