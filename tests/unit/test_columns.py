"""Columns: the one path that the core's and any plugin's data take into the trainer."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core import columns as module
from miles_core.columns import Align, Column, Columns, grid, read_only, split
from miles_core.errors import ColumnError
from miles_core.types import Prompt, Sample

ROUTES = Column("routes", Align.PREDICTION, "int16", axes=("layer", "topk"), pad=-1, missing="pad", owner="toy")
SCORE = Column("score", Align.SAMPLE, "float32", missing="pad", owner="toy")
SPAN = Column("span", Align.TOKEN, "int8", missing="pad", owner="toy")


def sample(prompt_tokens, response_tokens, seed=0, routes=True):
    rng = np.random.default_rng(seed)
    total = prompt_tokens + response_tokens
    columns = {
        "tokens": rng.integers(0, 100, total).astype(np.int32),
        "loss_mask": np.ones(response_tokens, np.uint8),
        "rollout_log_probs": -rng.random(response_tokens).astype(np.float32),
        "versions": np.ones(response_tokens, np.int32),
        "score": np.float32(seed),
        "span": np.arange(total, dtype=np.int8),
    }
    if routes:
        columns["routes"] = rng.integers(0, 8, (total - 1, 3, 2)).astype(np.int16)
    return Sample(Prompt(seed, seed, "", (0,) * prompt_tokens), 0, columns, response_tokens)


lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([1, 2, 4]), st.sampled_from([1, 8]))
def test_packing_puts_every_row_where_its_alignment_says_and_padding_elsewhere(shapes, multiple, total_multiple):
    declared = Columns([ROUTES, SCORE, SPAN])
    samples = [sample(p, r, seed) for seed, (p, r) in enumerate(shapes)]
    packed = declared.pack(samples, multiple=multiple, total_multiple=total_multiple)
    assert len(packed.rows["tokens"]) % total_multiple == 0
    for name in ("tokens", "loss_mask", "rollout_log_probs", "versions", "routes", "span"):
        rows, filled = packed.rows[name], np.zeros(len(packed.rows[name]), bool)
        for start, one in zip(packed.cu_seqlens, samples):
            where = grid(declared[name].align, one)
            here = slice(start + where.start, start + where.stop)
            assert np.array_equal(rows[here], one.columns[name])
            filled[here] = True
        assert (rows[~filled] == declared[name].pad).all()
    assert packed.values["score"].tolist() == [float(i) for i in range(len(samples))]


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from([2, 4]))
def test_splitting_loses_and_repeats_nothing(shapes, size):
    declared = Columns([ROUTES])
    samples = [sample(p, r, seed) for seed, (p, r) in enumerate(shapes)]
    for one in samples:
        del one.columns["score"], one.columns["span"]
    packed = declared.pack(samples, multiple=2 * size)
    parts = [split(packed, rank, size) for rank in range(size)]
    for name, rows in packed.rows.items():
        rebuilt, times = np.zeros_like(rows), np.zeros(len(rows), int)
        for rank, part in enumerate(parts):
            here = zigzag(packed.cu_seqlens, rank, size)
            rebuilt[here] = part.rows[name]
            times[here] += 1
        assert np.array_equal(rebuilt, rows) and (times == 1).all(), name


def zigzag(bounds, rank, size):
    """The rows that a rank holds, written down independently."""
    rows = []
    for start, stop in zip(bounds, bounds[1:]):
        chunks = np.split(np.arange(start, stop), 2 * size)
        rows += [chunks[rank], chunks[2 * size - 1 - rank]]
    return np.concatenate(rows)


@pytest.mark.parametrize("broken", ["grid", "split"])
def test_the_core_and_a_plugin_share_one_path_breaking_it_breaks_both(broken, monkeypatch):
    """R3's data cannot rot unnoticed: a fault in packing or splitting shows in the core's tokens as well."""
    declared = Columns([ROUTES])
    one = sample(3, 6)
    del one.columns["score"], one.columns["span"]
    good = split(declared.pack([one], multiple=4), 0, 2)
    if broken == "grid":
        right = module.grid
        monkeypatch.setattr(module, "grid", lambda align, s: slice(1, 1 + right(align, s).stop - right(align, s).start))
        bad = split(declared.pack([one], multiple=4), 0, 2)
    else:
        packed = declared.pack([one], multiple=4)
        bad = split(packed, 1, 2)
    wrong = {name for name in good.rows if not np.array_equal(good.rows[name], bad.rows[name])}
    assert {"tokens", "routes", "rollout_log_probs"} <= wrong


def test_two_owners_of_one_column_are_both_named():
    with pytest.raises(ColumnError, match="toy and other"):
        Columns([ROUTES, Column("routes", Align.TOKEN, owner="other")])
    with pytest.raises(ColumnError, match="core and other"):
        Columns([Column("tokens", Align.TOKEN, owner="other")])


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c.update(routes=c["routes"][:-1]), r"'routes'.*should have shape \[7, 'layer', 'topk'\]"),
    (lambda c: c.update(loss_mask=np.ones(4, np.uint8)), "'loss_mask'"),
    (lambda c: c.update(extra=np.ones(1)), "undeclared column 'extra'"),
    (lambda c: c.pop("versions"), "lacks the column 'versions'"),
    (lambda c: c.update(rollout_log_probs=np.full(5, np.nan, np.float32)), "NaN"),
    (lambda c: c.update(routes=c["routes"].astype(np.int64) + 70000), "does not fit int16"),
])
def test_data_that_do_not_fit_are_refused_with_the_sample_and_the_owner(change, message):
    one = sample(3, 5)
    change(one.columns)
    with pytest.raises(ColumnError, match=message):
        Columns([ROUTES, SCORE, SPAN]).check(one)


def test_a_sample_without_an_optional_column_is_padded_and_one_of_other_axes_refused():
    declared = Columns([ROUTES, SCORE, SPAN])
    packed = declared.pack([sample(2, 2, 0), sample(2, 2, 1, routes=False)])
    assert (packed.rows["routes"][4:] == -1).all() and (packed.rows["routes"][:3] >= 0).all()
    other = sample(2, 2, 2)
    other.columns["routes"] = other.columns["routes"][:, :2]
    with pytest.raises(ColumnError, match="disagree on the axes"):
        declared.pack([sample(2, 2, 0), other])


def through_torch(one):
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it will write where numpy would not
        torch.from_numpy(one.columns["rollout_log_probs"]).add_(1)


def through_the_base(one):
    one.columns["tokens"].base[0] += 1


def with_the_flag_set(one):
    one.columns["versions"].flags.writeable = True
    one.columns["versions"][:] = 7


def by_sorting(one):
    """The sum of all values stays."""
    one.columns["tokens"].base.sort()


@pytest.mark.parametrize("write", [through_torch, through_the_base, with_the_flag_set, by_sorting])
def test_a_write_that_numpy_does_not_refuse_is_found(write):
    samples = [sample(3, 4, seed) for seed in (1, 2)]
    with pytest.raises(ColumnError) as caught, read_only(samples, "the vandal"):
        write(samples[1])
    assert caught.value.who == "the vandal"
    with read_only(samples, "one who looks"):
        assert sum(int(one.tokens.sum()) for one in samples)
