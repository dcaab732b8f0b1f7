"""Packing: every index once, within the capacity, the same every time, and not far from the fewest bins."""

from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.packing import first_fit_decreasing, fixed

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


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


@given(st.integers(0, 50), st.integers(1, 12))
def test_fixed_cuts_consecutive_parts(count, size):
    parts = fixed(count, size)
    assert [index for part in parts for index in part] == list(range(count))
    assert all(len(part) == size for part in parts[:-1])
