"""Rows that are read as they are needed: the order of windows, epochs, and a state from which the stream goes on."""

import json

import pyarrow.parquet
import pytest
from formats import write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_core.errors import DataError

ROWS = [{"q": f"question {i}", "a": str(i)} for i in range(50)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "data.parquet", ROWS)


def rows(source, count):
    return [source.next().row for _ in range(count)]


@pytest.mark.parametrize("cut", ["", "@[5:25]", "@[-9:]"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_window_of_all_rows_is_the_order_of_a_table(prompts, path, cut, shuffle):
    """Prompt for prompt, over three epochs: the same rows, numbers, texts and labels."""
    table, stream = (prompts(f"{path}{cut}", label_key="a", shuffle=shuffle, seed=7, stream=how)
                     for how in (False, True))
    assert [stream.next() for _ in range(130)] == [table.next() for _ in range(130)]
    assert len(stream) == len(table)


def test_windows_are_shuffled_each_by_itself_and_anew_in_each_epoch(prompts, path):
    source = prompts(path, stream=True, shuffle=True, buffer=8)
    epochs = [rows(source, 50) for _ in range(2)]
    for epoch in epochs:
        for first in range(0, 50, 8):
            assert sorted(epoch[first:first + 8]) == list(range(first, min(first + 8, 50)))
    places = [[row % 8 for row in epoch[first:first + 8]] for epoch in epochs for first in range(0, 48, 8)]
    assert len({tuple(order) for order in places}) == len(places)
    assert rows(prompts(path, stream=True, buffer=8), 60) == [*range(50), *range(10)]
    assert rows(prompts(path, stream=True, shuffle=True, buffer=8, seed=1), 50) != epochs[0]


def test_long_rows_are_passed_over_in_every_epoch(prompts, tmp_path):
    data = write(tmp_path / "data.parquet", [{"q": "x" * (900 if i % 2 else 5)} for i in range(20)], group=3)
    source = prompts(data, stream=True, buffer=4, max_prompt_len=800)
    assert rows(source, 25) == [*range(0, 20, 2)] * 2 + [0, 2, 4, 6, 8]
    for changes, known in (({"max_prompt_len": 2}, "no prompt"), ({"context": 800}, "row 1")):
        with pytest.raises(DataError, match=known):
            prompts(data, stream=True, **changes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=12)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=20), st.integers(0, 20))
def test_any_interleaving_survives_a_restart(prompts, path, steps, cut):
    """Prompts taken, some given back; stop anywhere: the restarted stream hands out exactly what was to come."""
    values = {"stream": True, "shuffle": True, "seed": 1, "buffer": 7, "label_key": "a"}
    source, held = prompts(f"{path}@[3:20]", **values), []
    for give, count in steps[:cut]:
        if give and held:
            back, held = held[-count:] if count else [], held[: len(held) - count] if count else held
            source.give_back(back)
        else:
            held += [source.next() for _ in range(count)]
    state = json.loads(json.dumps(source.state_dict()))
    restarted = prompts(f"{path}@[3:20]", **values)
    restarted.load_state_dict(state)
    expected = [source.next() for _ in range(40)]
    assert [restarted.next() for _ in range(40)] == expected


def test_a_position_is_of_windows_of_one_size(prompts, path):
    state = prompts(path, stream=True, buffer=8).state_dict()
    with pytest.raises(DataError, match="shuffle-buffer 8"):
        prompts(path, stream=True, buffer=9).load_state_dict(state)


@pytest.mark.parametrize("buffer", [50, 8])
def test_a_position_beyond_rows_that_have_gone_goes_on_with_the_next_epoch(prompts, path, buffer):
    """Of the prompts that come again, those whose rows are still there do."""
    source = prompts(path, stream=True, buffer=buffer)
    taken = [source.next() for _ in range(46)]
    source.give_back([taken[45], taken[3]])
    shorter = prompts(f"{path}@[:30]", stream=True, buffer=buffer)
    shorter.load_state_dict(source.state_dict())
    assert rows(shorter, 5) == [3, 0, 1, 2, 3]


def test_epochs_need_a_number_of_rows_and_slices_from_the_end_too(prompts, tmp_path):
    for kind in ("arrow", "csv", "jsonl"):
        data = write(tmp_path / f"data.{kind}", ROWS)
        source = prompts(data, stream=True, buffer=20, label_key="a")
        assert [source.next().label for _ in range(60)] == [row["a"] for row in [*ROWS, *ROWS[:10]]]
        went_on = prompts(data, stream=True, buffer=20, label_key="a")
        went_on.load_state_dict(source.state_dict())
        assert rows(went_on, 50) == rows(source, 50)
    with pytest.raises(DataError, match="list"):
        prompts(write(tmp_path / "data.json", ROWS), stream=True)
    with pytest.raises(DataError, match="--num-rollout"):
        len(source)
    with pytest.raises(DataError, match=r"\[-2:\]"):
        prompts(f"{data}@[-2:]", stream=True)


def test_what_lies_behind_the_window_is_not_read(prompts, tmp_path):
    """Damage in the last row group ends the stream where it is reached, and a table before its first prompt."""
    data = write(tmp_path / "data.parquet", ROWS * 200, group=50)
    last = pyarrow.parquet.read_metadata(data).row_group(199).column(0)
    content = bytearray(data.read_bytes())
    first = last.dictionary_page_offset or last.data_page_offset
    content[first:first + last.total_compressed_size] = b"\xff" * last.total_compressed_size
    data.write_bytes(content)
    source = prompts(data, stream=True, buffer=50)
    assert rows(source, 500) == list(range(500))
    with pytest.raises(DataError, match="data.parquet"):
        rows(source, 9_501)
    with pytest.raises(DataError, match="data.parquet"):
        prompts(data)
