"""Packing: every index once, within the capacity, the same every time, and not far from the best that there is."""

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import BatchError
from miles_core.packing import first_fit_decreasing, fixed, in_steps, karmarkar_karp, oversized, schedule

LENGTHS = st.lists(st.integers(1, 60), max_size=60)
LOADS = st.lists(st.integers(0, 100), max_size=40)


def fewest(lengths, capacity):
    """The optimal number of bins, by exhaustive search; for a handful of items."""
    best = len(lengths)

    def place(index, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(lengths):
            best = len(rooms)
            return
        for i, room in enumerate(rooms):
            if lengths[index] <= room:
                place(index + 1, [*rooms[:i], room - lengths[index], *rooms[i + 1 :]])
        place(index + 1, [*rooms, capacity - lengths[index]])

    place(0, [])
    return best


@given(LENGTHS, st.integers(1, 80))
def test_every_index_once_within_the_capacity_and_what_is_too_long_alone(lengths, capacity):
    bins = first_fit_decreasing(lengths, capacity)
    assert sorted(index for part in bins for index in part) == list(range(len(lengths)))
    for part in bins:
        assert part == sorted(part) and part
        assert sum(lengths[i] for i in part) <= capacity or len(part) == 1


@given(LENGTHS, st.integers(1, 80))
def test_the_result_depends_on_the_lengths_alone(lengths, capacity):
    assert first_fit_decreasing(tuple(lengths), capacity) == first_fit_decreasing(list(lengths), capacity)


@given(LENGTHS.filter(len), st.integers(1, 80), st.randoms())
def test_the_order_of_samples_changes_no_bins_contents(lengths, capacity, random):
    """As multisets of lengths: a shuffled batch is packed alike."""
    shuffled = list(lengths)
    random.shuffle(shuffled)
    one, other = (sorted(sorted(of[i] for i in part) for part in first_fit_decreasing(of, capacity))
                  for of in (lengths, shuffled))
    assert one == other


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(20, 40))
def test_at_most_eleven_ninths_of_the_fewest_bins_plus_one(lengths, capacity):
    assert len(first_fit_decreasing(lengths, capacity)) <= 11 / 9 * fewest(tuple(lengths), capacity) + 1


def test_by_hand():
    assert first_fit_decreasing([4, 8, 1, 4, 2, 1], 10) == [[1, 4], [0, 2, 3, 5]]
    assert first_fit_decreasing([3, 3, 3], 6) == [[0, 1], [2]]
    assert first_fit_decreasing([50, 1], 10) == [[0], [1]]
    assert first_fit_decreasing([], 10) == []


@pytest.mark.parametrize(("rollouts", "steps", "expected"), [
    ("00001" "23", 2, [[0, 1, 2, 3, 4], [5, 6]]),
    ("0101", 2, [[0, 2], [1, 3]]),
    ("0123456789", 3, [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]),
    ("0123", 2, [[0, 1], [2, 3]]),
])  # fmt: skip
def test_a_step_has_whole_rollouts(rollouts, steps, expected):
    assert in_steps(rollouts, steps) == expected


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.data())
def test_steps_have_every_sample_once_and_no_rollout_twice(rollouts, data):
    steps = data.draw(st.integers(1, len(set(rollouts))))
    parts = in_steps(rollouts, steps)
    assert sorted(index for part in parts for index in part) == list(range(len(rollouts)))
    sizes = [len({rollouts[index] for index in part}) for part in parts]
    assert sum(sizes) == len(set(rollouts)) and max(sizes) - min(sizes) <= 1


def test_a_step_without_a_rollout_is_refused():
    with pytest.raises(BatchError, match=r"rollout.num_steps_per_rollout"):
        in_steps("0000", 2)


@given(st.integers(0, 50), st.integers(1, 12))
def test_fixed_cuts_consecutive_parts(count, size):
    parts = fixed(count, size)
    assert [index for part in parts for index in part] == list(range(count))
    assert all(len(part) == size for part in parts[:-1])


def sums(loads, parts):
    """The load of each part."""
    return [sum(loads[i] for i in part) for part in parts]


def spread(loads, parts):
    """From the heaviest part to the lightest."""
    return max(sums(loads, parts)) - min(sums(loads, parts))


def differencing(loads):
    """The difference of two parts, as Karmarkar and Karp write it: replace the two largest by their difference."""
    heap = [-load for load in loads]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, first - second)
    return -heap[0] if heap else 0


@given(LOADS, st.integers(1, 9))
def test_karmarkar_karp_has_every_index_once_and_parts_within_one_item(loads, parts):
    found = karmarkar_karp(loads, parts, equal=False)
    assert len(found) == parts
    assert sorted(index for part in found for index in part) == list(range(len(loads)))
    assert sums(loads, found) == sorted(sums(loads, found), reverse=True)
    assert spread(loads, found) <= max(loads, default=0)
    assert sum(map(bool, found)) == min(parts, len(loads))  # no part is empty while there are items
    assert found == karmarkar_karp(tuple(loads), parts, equal=False)


@given(LOADS)
def test_two_parts_differ_by_what_the_differencing_of_numbers_leaves(loads):
    assert spread(loads, karmarkar_karp(loads, 2, equal=False)) == differencing(loads)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_the_heaviest_part_is_near_the_best(loads, parts):
    """At most 4/3 - 1/(3 parts) of the optimum (Michiels et al., 2003)."""
    best = min(max(sums(loads, [[i for i, to in enumerate(dealt) if to == part] for part in range(parts)]))
               for dealt in itertools.product(range(parts), repeat=len(loads)))
    assert max(sums(loads, karmarkar_karp(loads, parts, equal=False))) <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9


@given(st.integers(1, 9), st.integers(0, 6), st.data())
def test_equal_parts_are_equal_and_spread_no_further_than_strided_dealing(parts, size, data):
    loads = data.draw(st.lists(st.integers(0, 100), min_size=parts * size, max_size=parts * size))
    found = karmarkar_karp(loads, parts, equal=True)
    assert [len(part) for part in found] == [size] * parts
    assert sorted(index for part in found for index in part) == list(range(len(loads)))
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    rounds = [order[i : i + parts] for i in range(0, len(order), parts)]
    assert spread(loads, found) <= spread(loads, [order[part::parts] for part in range(parts)])
    assert spread(loads, found) <= max((loads[turn[0]] - loads[turn[-1]] for turn in rounds), default=0)


def test_karmarkar_karp_by_hand():
    assert sums([4, 5, 6, 7, 8], karmarkar_karp([4, 5, 6, 7, 8], 2, equal=False)) == [16, 14]  # the paper's example
    assert karmarkar_karp([], 3, equal=True) == [[], [], []]
    with pytest.raises(ValueError, match="5 items do not divide into 2 parts"):
        karmarkar_karp([1, 2, 3, 4, 5], 2, equal=True)


STEP = st.lists(st.integers(1, 60), min_size=15, max_size=60)


@given(STEP, st.integers(10, 80), st.booleans(), st.integers(1, 5), st.integers(1, 3))
def test_a_schedule_has_every_index_once_within_the_capacity_and_the_same_number_for_each_rank(
        lengths, capacity, balance, data, multiple):
    lengths = lengths[: len(lengths) // (data * multiple) * data * multiple]
    options = dict(data=data, capacity=capacity, micro_batch_size=1, multiple=multiple, balance=balance)
    ranks = schedule(lengths, **options)
    assert len(ranks) == data and len({len(parts) for parts in ranks}) == 1 and len(ranks[0]) % multiple == 0
    assert sorted(index for parts in ranks for part in parts for index in part) == list(range(len(lengths)))
    for part in itertools.chain(*ranks):
        assert part and part == sorted(part)
        assert sum(lengths[i] for i in part) <= capacity or part[0] in oversized(lengths, capacity) and len(part) == 1
    assert ranks == schedule(tuple(lengths), **options)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(10, 80), st.integers(1, 5),
       st.integers(1, 3), st.booleans())
def test_any_number_of_samples_is_dealt_with_the_shortest_once_more_where_all_are_alone(
        lengths, capacity, data, multiple, balance):
    ranks = schedule(lengths, data=data, capacity=capacity, micro_batch_size=1, multiple=multiple, balance=balance)
    assert len(ranks) == data and len({len(parts) for parts in ranks}) == 1 and len(ranks[0]) % multiple == 0
    parts = [part for parts in ranks for part in parts]
    once = [part for part in parts if len(lengths) not in part]
    assert sorted(index for part in once for index in part) == list(range(len(lengths)))
    if once != parts:
        assert [part for part in parts if part not in once] == [[len(lengths)]] * (len(parts) - len(lengths))
        assert len(once) == len(lengths) and len(parts) - len(lengths) < data * multiple


@given(STEP, st.integers(10, 80), st.integers(2, 5))
def test_dealing_by_load_is_no_worse_than_in_turns_of_falling_load(lengths, capacity, data):
    lengths = lengths[: len(lengths) // data * data]
    ranks = schedule(lengths, data=data, capacity=capacity, micro_batch_size=1)
    packed = sorted((sum(lengths[i] for i in part) for parts in ranks for part in parts), reverse=True)
    totals = [sum(sums(lengths, parts)) for parts in ranks]
    turns = [sum(packed[rank::data]) for rank in range(data)]
    assert max(totals) - min(totals) <= max(turns) - min(turns)
    for parts in ranks:
        assert sums(lengths, parts) == sorted(sums(lengths, parts), reverse=True)


@given(LENGTHS.filter(len), st.integers(1, 80), st.integers(1, 9))
def test_one_rank_runs_what_was_packed_in_the_order_in_which_it_was(lengths, capacity, size):
    assert schedule(lengths, data=1, capacity=capacity, micro_batch_size=1) == [first_fit_decreasing(lengths, capacity)]
    assert schedule(lengths, data=1, capacity=None, micro_batch_size=size) == [fixed(len(lengths), size)]


def test_schedules_by_hand():
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]
    assert schedule(lengths, data=2, capacity=None, micro_batch_size=2, balance=False) == [[[0, 1], [4, 5]],
                                                                                          [[2, 3], [6, 7]]]
    assert schedule([9, 1, 9, 1], data=2, capacity=None, micro_batch_size=1, balance=False) == [[[0], [2]], [[1], [3]]]
    assert schedule([9, 1, 9, 1], data=2, capacity=None, micro_batch_size=1) == [[[0], [3]], [[2], [1]]]
    assert schedule([5, 5, 5, 5], data=1, capacity=20, micro_batch_size=1, multiple=2) == [[[0, 3], [1, 2]]]
    assert schedule([6, 5, 6], data=2, capacity=6, micro_batch_size=1) == [[[0], [3]], [[2], [1]]]
    assert schedule([6, 6, 1, 1], data=3, capacity=12, micro_batch_size=1) == [[[0]], [[1]], [[2, 3]]]
    # one sample of 4 is as costly as the other three where cost grows with the square
    assert schedule([4, 2, 2, 2], data=2, capacity=6, micro_batch_size=1, loads=[16, 4, 4, 4]) == [[[0, 1]], [[2, 3]]]


def test_samples_over_the_capacity_are_named():
    assert oversized([5, 9, 3, 10], 8) == [1, 3]
    assert oversized([5, 9], None) == []


@pytest.mark.parametrize(("lengths", "options", "message"), [
    ([], {"data": 2, "capacity": 10}, "0 samples, 1 at a time, hence 0"),
    ([9, 9, 9], {"data": 2, "capacity": None}, "3 samples, 1 at a time, hence 3"),
    ([1] * 6, {"data": 2, "multiple": 2, "capacity": None}, "6 samples, 1 at a time, hence 6"),
])  # fmt: skip
def test_what_cannot_be_dealt_says_what_would(lengths, options, message):
    with pytest.raises(BatchError) as caught:
        schedule(lengths, micro_batch_size=1, **options)
    assert caught.value.got == message and caught.value.code == "micro-batches-not-divisible"
