"""Buckets hold what the stream held, within the limit, with groups that belong together in one piece."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_local.buckets import Cutter, atom

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
KINDS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "input_layernorm", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"]


@st.composite
def streams(draw, dtypes=DTYPES):
    """Distinct names in any order, small tensors of any dtype."""
    names = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), min_size=1, max_size=20, unique=True))
    stream = []
    for i, (layer, kind) in enumerate(names):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        tensor = (torch.arange(torch.Size(shape).numel()) + i).view(shape).to(draw(st.sampled_from(dtypes)))
        stream.append((f"model.layers.{layer}.{kind}.weight", tensor))
    return stream


@settings(max_examples=60, deadline=None)
@given(stream=streams(), limit=st.integers(1, 600), alignment=st.sampled_from([8, 16, 64]))
def test_buckets_hold_the_stream_in_order_and_within_the_limit(stream, limit, alignment):
    found, where = [], {}
    for number, bucket in enumerate(Cutter(limit, alignment=alignment)(iter(stream))):
        views = [(name, view.clone()) for name, view in bucket.views()]
        found += views
        for name, _ in views:
            where.setdefault(atom(name), set()).add(number)
        starts = [start for *_, start in bucket.tensors]
        assert all(start % alignment == 0 for start in starts) and starts == sorted(starts)
        if bucket.size > limit:
            assert len({atom(name) for name, _ in views}) == 1, "only a group that is larger by itself"
    assert [name for name, _ in found] == [name for name, _ in stream]
    for (_, got), (_, sent) in zip(found, stream, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent)
    runs = [atom(name) for i, (name, _) in enumerate(stream) if i == 0 or atom(stream[i - 1][0]) != atom(name)]
    for key in {run for run in runs if runs.count(run) == 1}:
        assert len(where[key]) == 1, f"{key} is split"


def test_only_the_trainers_dtype_is_cast():
    stream = [("a.weight", torch.tensor([1.0009765625])), ("b.weight", torch.tensor([1.0], dtype=torch.float64))]
    (bucket,) = Cutter(64, torch.float32, torch.bfloat16)(stream)
    views = dict(bucket.views())
    assert views["a.weight"].dtype == torch.bfloat16 and views["a.weight"].item() == 1.0
    assert views["b.weight"].dtype == torch.float64


def test_two_buckets_share_their_memory_in_turn():
    made = []

    def allocate(index, size, device):
        made.append((index, size))
        return torch.empty(size, dtype=torch.uint8)

    stream = [(f"{i}.weight", torch.full((4,), float(i))) for i in range(7)]
    buckets = Cutter(16, buffers=2, allocate=allocate)(stream)
    first, second = next(buckets), next(buckets)
    assert first.buffer.data_ptr() != second.buffer.data_ptr()
    third = next(buckets)
    assert third.buffer.data_ptr() == first.buffer.data_ptr()
    assert len(list(buckets)) == 4 and len(made) == 2


@pytest.mark.parametrize(("one", "other"), [
    ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"),
    ("model.layers.0.mlp.experts.7.gate_proj.weight", "model.layers.0.mlp.experts.7.up_proj.weight"),
    ("model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
])
def test_what_an_engine_fuses_belongs_together(one, other):
    assert atom(one) == atom(other) != atom(one.replace("layers.0", "layers.1"))
