"""One group at a time: what is kept of it, what its samples say, which goes on first; and how columns of spans join."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_partial_rollout.order import to_go
from miles_partial_rollout.plugin import PartialRollout, PartialRolloutOptions
from miles_partial_rollout.spans import tell

from miles_core.columns import Align, Column, Columns, joined
from miles_core.config.tables import Rollout, RunConfig
from miles_core.errors import ColumnError
from miles_core.types import Group, Prompt, Sample, Status

PROMPT = Prompt(3, 3, "1+1=", (1, 2))


def sample(index, length, status=Status.ABORTED, version=2, **metadata):
    columns = {"tokens": np.arange(2 + length, dtype=np.int32), "loss_mask": np.ones(length, np.uint8),
               "rollout_log_probs": np.full(length, -1.0, np.float32), "versions": np.full(length, version, np.int32)}
    return Sample(PROMPT, index, columns, length, status=status, metadata=metadata)


def plugin(**options):
    return PartialRollout(PartialRolloutOptions(**options), RunConfig(rollout=Rollout(rollout_max_response_len=10)))


def unfinished(*samples, **options):
    return plugin(**options).unfinished(Group(PROMPT, list(samples))).samples


def test_a_sample_is_stamped_once_and_says_where_it_was_cut():
    fresh, done, none = unfinished(sample(0, 4), sample(1, 3, Status.COMPLETED), sample(2, 0))
    assert fresh.metadata == {"start_rollout_id": 1, "cuts": [4]}
    assert done.metadata == {"start_rollout_id": 1}, "a finished sample has one span"
    assert none.metadata == {}, "nothing was begun"
    fresh.columns["versions"][:] = 9  # whatever comes later, the stamp stays
    again, = unfinished(fresh)
    assert again.metadata == {"start_rollout_id": 1, "cuts": [4]}, "called back before it drew another token"


@pytest.mark.parametrize("samples", [
    [sample(0, 0), sample(1, 0)], [sample(0, 3), sample(1, 2, Status.FAILED)],
    [sample(0, 3), sample(1, 2, drop={"reason": "sandbox"})],
], ids=["nothing drawn", "failed", "dropped by its generator"])
def test_a_group_that_nobody_can_go_on_with_is_sampled_anew(samples):
    assert unfinished(*samples) == []


def test_with_masks_everything_drawn_so_far_is_masked_siblings_too():
    kept = unfinished(sample(0, 4), sample(1, 3, Status.TRUNCATED), mask_offpolicy_in_partial_rollout=True)
    assert [one.columns["loss_mask"].tolist() for one in kept] == [[0] * 4, [0] * 3]
    assert [one.columns["loss_mask"].tolist() for one in unfinished(sample(0, 4))] == [[1] * 4]


def test_with_masks_a_group_with_nothing_to_go_is_sampled_anew():
    done = [sample(0, 4, Status.COMPLETED), sample(1, 3, Status.TRUNCATED)]
    assert unfinished(*done, mask_offpolicy_in_partial_rollout=True) == []
    assert unfinished(*done) == done


def test_figures_of_a_trained_sample():
    whole, resumed, ended = sample(0, 6), sample(1, 9, cuts=[2, 6]), sample(2, 6, cuts=[2, 6], figures={"x": 1.0})
    for one in (whole, resumed, ended):
        tell(one)
    assert whole.metadata == {"start_rollout_id": 1, "figures": {"resumed": 0.0}}
    assert resumed.metadata["figures"] == {"resumed": 1.0, "spans": 3.0, "tokens_per_span": 3.0}
    assert ended.metadata["figures"] == {"x": 1.0, "resumed": 1.0, "spans": 2.0, "tokens_per_span": 3.0}


def test_orders():
    def group(uid, *samples):
        return Group(Prompt(uid, uid, "", (1, 2)), list(samples))

    groups = [group(0, sample(0, 2, version=5), sample(1, 9, Status.COMPLETED, version=5)),
              group(1, sample(0, 7, version=4), sample(1, 7, version=6)),
              group(2, sample(0, 9, version=5)), group(3, sample(0, 7, version=4), sample(1, 7, version=4))]
    assert [to_go(one, 10) for one in groups] == [8, 6, 1, 6]

    def order(name):
        return [one.prompt.uid for one in plugin(order=name).select_from_buffer(groups)]

    assert order("fifo") == [0, 1, 2, 3]
    assert order("stalest") == [1, 3, 0, 2]
    assert order("most-complete") == [2, 1, 3, 0]


AXES = ("layer", "topk")
COLUMNS = Columns([Column(f"{align}_rows", align, "int32", axes=AXES, pad=-1, missing="pad")
                   for align in (Align.TOKEN, Align.PREDICTION, Align.RESPONSE)]
                  + [Column("last_rows", Align.TOKEN, "int32", spans="last", missing="pad"),
                     Column("holes", Align.RESPONSE, "int32", pad=-7, missing="pad"),
                     Column("score", Align.SAMPLE, "float32", missing="pad")])  # fmt: skip


def span(number, before, length, hole):
    """The `number`-th span, of `length` tokens after `before` others, all of which it computes again.

    A row says which span computed it and where: 1000 x number + place; its axes are 2 layers of 3.
    """
    total = before + length
    sizes = {"token_rows": total, "prediction_rows": total - 1, "response_rows": length}
    rows = {name: (1000 * number + np.arange(size))[:, None, None] * np.ones((1, 2, 3), np.int32)
            for name, size in sizes.items()}
    columns = {
        "tokens": np.arange(total, dtype=np.int32), "loss_mask": np.ones(length, np.uint8),
        "rollout_log_probs": np.full(length, -number, np.float32), "versions": np.full(length, number, np.int32),
        "last_rows": 1000 * number + np.arange(total, dtype=np.int32), "score": np.float32(number), **rows,
    }  # fmt: skip
    if not hole:
        columns["holes"] = np.full(length, number, np.int32)
    return Sample(PROMPT, 0, columns, length, status=Status.ABORTED)


@settings(max_examples=60, deadline=None)
@given(prompt=st.integers(1, 5), spans=st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=5))
def test_columns_of_spans_join_to_what_was_computed_first(prompt, spans):
    """Cut anywhere into any number of spans, empty ones included; each later one recomputes the whole prefix."""
    ends = prompt + np.cumsum([length for length, _ in spans])
    whole, before = None, prompt
    for number, (length, hole) in enumerate(spans):
        later = span(number, before, length, hole)
        COLUMNS.check(later)
        whole = later if whole is None else joined(whole, later, COLUMNS)
        COLUMNS.check(whole)
        before += length

    total, response = int(ends[-1]), int(ends[-1]) - prompt
    assert (whole.length, whole.response_length) == (total, response)
    assert whole.tokens.tolist() == list(range(total))
    number_of = [n for n, (length, _) in enumerate(spans) for _ in range(length)]  # of each response token
    assert whole.columns["versions"].tolist() == number_of
    assert whole.columns["rollout_log_probs"].tolist() == [-n for n in number_of]
    first = {"token_rows": [1000 * int(np.argmax(place < ends)) + place for place in range(total)],
             "prediction_rows": [1000 * int(np.argmax(place < ends - 1)) + place for place in range(total - 1)],
             "response_rows": [1000 * n + place for n, (length, _) in enumerate(spans) for place in range(length)]}
    for name, expected in first.items():
        assert whole.columns[name].shape == (len(expected), 2, 3)
        np.testing.assert_array_equal(whole.columns[name], np.array(expected)[:, None, None] * np.ones((1, 2, 3)))
    last = len(spans) - 1
    assert whole.columns["last_rows"].tolist() == [1000 * last + place for place in range(total)]
    assert whole.columns["score"] == last
    if not all(hole for _, hole in spans):
        assert whole.columns["holes"].tolist() == [-7 if spans[n][1] else n for n in number_of]


def test_spans_of_other_tokens_do_not_join():
    later = span(1, 5, 2, False)
    later.columns["tokens"][3] = 77
    with pytest.raises(ColumnError, match=r"\[continued-tokens-differ\]"):
        joined(span(0, 2, 3, False), later, COLUMNS)
