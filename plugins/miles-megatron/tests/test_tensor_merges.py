"""Every join puts tensors together and takes them apart again, whole and in the parts of tensor-parallel ranks."""

import pytest
import torch
from miles_megatron import tensor_merges
from miles_megatron.specs import Rule, WeightMap

WEIGHTS = WeightMap((), heads=4, groups=2, head_dim=3)
RULES = {
    "same": (Rule("p", ("a",)), [12]),
    "rows": (Rule("p", ("a", "b"), "rows"), [6, 6]),
    "halves": (Rule("p", ("a",), "halves"), [12]),
    "sections": (Rule("p", ("a",), "sections", sections=(2, 2, 4)), [16]),
    "stacks": (Rule("p", ("a", "b"), "sections", sections=(2, 2, 4, 4), stacks=(3, 1)), [16, 8]),
    "qkv": (Rule("p", ("q", "k", "v"), "qkv"), [12, 6, 6]),
    "qkv, no values": (Rule("p", ("q", "k"), "qkv"), [12, 6]),
    "qkv, heads of its own": (Rule("p", ("q", "k", "v"), "qkv", head_dim=2, groups=4), [8, 8, 8]),
    "qkv_gate": (Rule("p", ("q", "k", "v"), "qkv_gate"), [24, 6, 6]),
    "qkv_stacked": (Rule("p", ("qkv",), "qkv_stacked", sections=(4, 2, 2)), [24]),
}


def made(rows, *trailing):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(count, *trailing, generator=draw) for count in rows]


def whole(rule, tensors):
    pieces = [piece for i, tensor in enumerate(tensors) for piece in tensor_merges.pieces(rule, tensor, i)]
    return tensor_merges.join(rule, pieces, WEIGHTS)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("trailing", [(), (5,), (1, 4)], ids=len)
def test_what_is_joined_comes_apart(name, trailing):
    rule, rows = RULES[name]
    tensors = made(rows, *trailing)
    parameter = whole(rule, tensors)
    assert tensor_merges.hf_shapes(rule, parameter.shape, WEIGHTS) == [list(tensor.shape) for tensor in tensors]
    back = tensor_merges.whole(rule, list(tensor_merges.split(rule, parameter, WEIGHTS, 1)))
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    if not tensor_merges.has_views(rule):
        return
    views = tensor_merges.hf_views(rule, parameter, WEIGHTS)
    assert all(torch.equal(view.reshape(tensor.shape), tensor) for view, tensor in zip(views, tensors, strict=True))
    assert all(view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() for view in views)


@pytest.mark.parametrize("name", RULES)
def test_ranks_hold_parts_that_come_together(name):
    """Each rank joins its part of every piece; gathered piece by piece, the tensors are whole."""
    rule, rows = RULES[name]
    tensors = made(rows, 5)
    pieces = [piece for i, tensor in enumerate(tensors) for piece in tensor_merges.pieces(rule, tensor, i)]
    ranks = [tensor_merges.join(rule, [piece.chunk(2)[rank] for piece in pieces], WEIGHTS) for rank in range(2)]
    parts = [tensor_merges.split(rule, rank, WEIGHTS, 2) for rank in ranks]
    gathered = tensor_merges.whole(rule, [torch.cat(both) for both in zip(*parts, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(gathered, tensors, strict=True))


def test_a_gate_follows_the_queries_of_its_group():
    """q0 g0 q1 g1 | q2 g2 q3 g3 of a checkpoint are q0 q1 g0 g1 k0 v0 | q2 q3 g2 g3 k1 v1 of Megatron's."""
    heads = WeightMap((), heads=4, groups=2, head_dim=1)
    rule, _ = RULES["qkv_gate"]
    parameter = tensor_merges.join(rule, [torch.arange(8), torch.tensor([10, 11]), torch.tensor([20, 21])], heads)
    assert parameter.tolist() == [0, 2, 1, 3, 10, 20, 4, 6, 5, 7, 11, 21]


def test_one_tensor_of_queries_keys_and_values_is_the_three_that_lie_in_it():
    [whole_one], (rule, _) = made([24], 5), RULES["qkv_stacked"]
    assert torch.equal(whole(rule, [whole_one]), whole(RULES["qkv"][0], list(whole_one.split([12, 6, 6]))))
    with pytest.raises(ValueError, match="in pieces"):
        tensor_merges.hf_views(rule, whole_one, WEIGHTS)


def test_sections_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="15 rows of p do not divide"):
        tensor_merges.pieces(RULES["sections"][0], torch.zeros(15))


def test_ranks_that_share_a_key_have_no_whole_groups():
    qkv, same = RULES["qkv"][0], RULES["same"][0]
    for rule, ranks in ((qkv, 2), (same, 4), (RULES["qkv, heads of its own"][0], 4)):
        assert tensor_merges.whole_groups(rule, WEIGHTS, ranks)
    assert not tensor_merges.whole_groups(qkv, WEIGHTS, 4)
