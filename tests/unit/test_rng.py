"""Keys of random draws: a function of the place alone, pinned, and never shared."""

from hypothesis import given
from hypothesis import strategies as st

from miles_core import rng

STREAM = st.text(st.characters(min_codepoint=32), max_size=12)
PLACE = st.tuples(st.integers(0, 2**31), STREAM, st.lists(st.integers(0, 2**40), max_size=4).map(tuple))


def test_pinned_values():
    """A change of these would change every run ever recorded."""
    assert rng.key(42, "train", 0, 0, 0) == 13665133752298452991
    assert rng.key(42, "eval/gsm8k", 7, 3, 1) == 6289720402635978982
    assert rng.key(1, "shuffle", 2) == 16585931547859118059


@given(PLACE)
def test_a_key_is_64_bits_and_a_function(place):
    seed, stream, where = place
    assert rng.key(seed, stream, *where) == rng.key(seed, stream, *where)
    assert 0 <= rng.key(seed, stream, *where) < 2**64


@given(PLACE, PLACE)
def test_two_places_never_share_a_key(one, other):
    keys = [rng.key(seed, stream, *where) for seed, stream, where in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


def test_all_keys_of_a_run_differ():
    keys = {rng.key(42, stream, prompt, sample, turn) for stream in ("train", "eval/a", "eval/b")
            for prompt in range(100) for sample in range(16) for turn in range(2)}
    assert len(keys) == 3 * 100 * 16 * 2


def test_digits_do_not_run_together():
    assert len({rng.key(1, "train", 1, 23), rng.key(1, "train", 12, 3), rng.key(11, "train", 1, 23)}) == 3
