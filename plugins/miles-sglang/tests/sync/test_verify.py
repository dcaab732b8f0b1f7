"""The sums tell weights apart that differ, and do not depend on how an engine lays them out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_sglang.server_extension.miles_sums import PIECE, SMALL, sums
from miles_sglang.sync.verify import SumComparison, Sums, check

from miles_core.errors import SyncError

LAYER = {"self_attn.q_proj": (16, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8),
         "self_attn.o_proj": (8, 16), "mlp.gate_proj": (24, 8), "mlp.up_proj": (24, 8), "mlp.down_proj": (8, 24),
         "input_layernorm": (8,)}


def one(tensor):
    return tuple(sums([tensor])[0].tolist())


def by_name(tensors):
    return Sums(tuple(tensors), sums(list(tensors.values())))


def policy(dtype=torch.bfloat16, layers=2):
    """What a trainer sends."""
    torch.manual_seed(0)
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in LAYER.items()}
    shapes |= {"model.embed_tokens.weight": (40, 8), "model.norm.weight": (8,), "lm_head.weight": (40, 8)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def engine(tensors, ranks=1, replicas=1):
    """What an engine's ranks then hold: q, k, v fused, gate and up fused, cut among ranks; the rest as it is."""
    found = [{} for _ in range(ranks)]

    def cut(name, axis):
        return tensors[name].chunk(ranks, axis)

    for name, tensor in tensors.items():
        base, _, kind = name.removesuffix(".weight").rpartition(".")
        for rank in range(ranks):
            if kind == "q_proj":
                q = cut(name, 0)[rank]
                k, v = (tensors[f"{base}.{part}_proj.weight"].chunk(ranks // replicas)[rank // replicas]
                        for part in "kv")
                found[rank][f"{base}.qkv_proj.weight"] = torch.cat([q, k, v])
            elif kind == "gate_proj":
                gate, up = cut(name, 0)[rank], cut(f"{base}.up_proj.weight", 0)[rank]
                found[rank][f"{base}.gate_up_proj.weight"] = torch.cat([gate, up])
            elif kind in ("o_proj", "down_proj"):
                found[rank][name] = cut(name, 1)[rank]
            elif kind in ("embed_tokens", "lm_head"):
                found[rank][name] = torch.cat([cut(name, 0)[rank], torch.zeros(6, 8, dtype=tensor.dtype)])  # padding
            elif kind not in ("k_proj", "v_proj", "up_proj"):
                found[rank][name] = tensor
    return found


def reports(found, changed=()):
    return [{"names": list(tensors), "sums": by_name(tensors).values.numpy().tobytes().hex(),
             "changed": [list(tensors).index(name) for name in changed]} for tensors in found]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]))
def test_sums_add_up_over_parts_in_any_order(data, dtype):
    tensor = torch.randint(-9, 9, (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))).to(dtype)
    cut = data.draw(st.integers(0, tensor.shape[1]))
    parts = [tensor[:, :cut], tensor[:, cut:].t()]
    assert tuple(sums(parts).sum(0).tolist()) == one(tensor) == one(torch.cat([tensor, torch.zeros_like(tensor)]))


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=20), data=st.data())
def test_any_other_value_of_one_element_changes_a_sum(values, data):
    bits = torch.tensor(values, dtype=torch.int32).to(torch.int16)
    other = bits.clone()
    other[data.draw(st.integers(0, len(values) - 1))] ^= 1 << data.draw(st.integers(0, 14))
    assert one(other) != one(bits)


def test_signs_that_change_on_both_sides_of_zero_are_seen():
    """The plain sum alone would not see it: two flips of the sign bit cancel."""
    before, after = torch.tensor([1.5, -2.5]).bfloat16(), torch.tensor([-1.5, 2.5]).bfloat16()
    assert one(before)[0] == one(after)[0] and one(before)[1] != one(after)[1]


def test_large_and_small_tensors_in_one_call_are_those_of_each_alone():
    torch.manual_seed(0)
    sizes = [1, 5, 5, SMALL, SMALL + 1, PIECE["cpu"] + 3, 5, 0]
    tensors = [torch.randn(size).bfloat16() for size in sizes] + [torch.arange(9, dtype=torch.uint8)]
    assert [tuple(row) for row in sums(tensors).tolist()] == [one(tensor) for tensor in tensors]
    lanes = tensors[5].view(torch.int16)
    mixed = ((lanes >> 7) * lanes).to(torch.int64)
    assert one(tensors[5]) == (int(lanes.to(torch.int64).sum()), int(mixed.sum()))


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 1), (8, 2)])
def test_an_engine_that_holds_what_was_sent_passes(ranks, replicas):
    sent = policy()
    check("engine 0", "", by_name(sent), reports(engine(sent, ranks, replicas)), layers=2, copies=replicas,
          random=True)


def wrong(name):
    sent, tensors = policy(), policy()
    if name == "a flipped bit":
        tensors["model.layers.1.self_attn.k_proj.weight"].view(torch.int16)[3, 4] ^= 1
    elif name == "a swapped layer":
        for kind in LAYER:
            one, other = (f"model.layers.{i}.{kind}.weight" for i in (0, 1))
            tensors[one], tensors[other] = tensors[other], tensors[one]
    elif name == "a bucket left out":
        for kind in ("gate_proj", "up_proj"):
            tensors[f"model.layers.1.mlp.{kind}.weight"] = torch.zeros(24, 8).bfloat16()
    elif name == "embedding and output layer swapped":
        tensors["lm_head.weight"], tensors["model.embed_tokens.weight"] = (
            tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    elif name == "an older version":
        tensors = {key: tensor + 0.01 for key, tensor in tensors.items()}
    return sent, tensors


@pytest.mark.parametrize(("name", "said"), [
    ("a flipped bit", "layer 1"), ("a swapped layer", "layers.0"), ("a bucket left out", "gate_up_proj"),
    ("embedding and output layer swapped", "lm_head"), ("an older version", "and"),
])
@pytest.mark.parametrize("ranks", [1, 2])
def test_half_applied_updates_are_caught_and_named(name, said, ranks):
    sent, tensors = wrong(name)
    with pytest.raises(SyncError, match="engine 3 does not hold") as caught:
        check("engine 3", "http://x", by_name(sent), reports(engine(tensors, ranks)), layers=2)
    assert said in str(caught.value)


def test_the_order_inside_of_a_fused_parameter_is_not_seen():
    """What the sums cannot tell, as docs/weight-sync.md says: gate and up exchanged, two rows exchanged."""
    sent, tensors = policy(), policy()
    gate, up = (f"model.layers.0.mlp.{kind}.weight" for kind in ("gate_proj", "up_proj"))
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    tensors["model.layers.0.self_attn.o_proj.weight"] = tensors["model.layers.0.self_attn.o_proj.weight"].flip(0)
    check("engine 0", "", by_name(sent), reports(engine(tensors)), layers=2)


def test_what_was_never_sent_has_to_be_from_a_checkpoint_and_to_stay():
    sent = policy()
    found = [tensors | {"model.layers.0.mlp.gate.bias": torch.ones(4)} for tensors in engine(sent)]
    left_out = by_name({name: tensor for name, tensor in sent.items() if name != "model.norm.weight"})
    check("engine 0", "", left_out, reports(engine(sent)), layers=2, random=False)
    with pytest.raises(SyncError, match="never sends; they are random") as caught:
        check("engine 0", "", left_out, reports(engine(sent)), layers=2, random=True)
    assert caught.value.got == "model.norm.weight"
    with pytest.raises(SyncError, match="changed since its first sync"):
        check("engine 0", "", left_out, reports(engine(sent), changed=["model.norm.weight"]), layers=2)
    with pytest.raises(SyncError, match="gate.bias"):  # compared with the others of its layer
        check("engine 0", "", by_name(sent), reports(found), layers=2)


def test_layers_for_multi_token_prediction_are_for_a_draft_model():
    extra = {name: torch.ones(3) for name in ("mtp.layers.0.mlp.down_proj.weight", "mtp.fc.weight",
                                              "model.layers.2.eh_proj.weight", "model.mtp_layers.0.input_proj.weight")}
    check("engine 0", "", by_name(policy() | extra), reports(engine(policy())), layers=2)


def test_ranks_that_hold_other_tensors_are_put_together():
    """Equal parts are copies, also where a rank before has none of it; and a copy that differs is another part."""
    sent = {f"model.layers.{i}.x.weight": torch.randn(4) for i in range(3)}
    one, two, three = sent
    held = [{one: sent[one], two: sent[two][:2]}, {three: sent[three], two: sent[two][2:]}, {two: sent[two][2:]}]
    check("engine 0", "", by_name(sent), reports(held), layers=3, random=True)
    held[2][two] = sent[two][2:] + 1
    with pytest.raises(SyncError) as caught:
        check("engine 0", "", by_name(sent), reports(held), layers=3)
    assert caught.value.got == two


def test_what_follows_from_names_is_worked_out_once_for_each_set_of_names():
    sent = by_name(policy()).names
    once = SumComparison.of(sent, (sent,), 2, 1)
    assert SumComparison.of((*sent,), ((*sent,),), 2, 1) is once
    assert SumComparison.of(sent, (sent[1:],), 2, 1) is not once


def test_what_the_engine_has_no_place_for_is_named():
    """Zeros, too, whose sums are those of nothing."""
    sent = policy() | {"model.layers.7.extra.weight": torch.zeros(3)}
    with pytest.raises(SyncError, match="no place for model.layers.7.extra.weight"):
        check("engine 0", "", by_name(sent), reports(engine(policy())), layers=8)
