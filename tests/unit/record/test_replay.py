"""What was under way, in a checkpoint and back: the same to the bit, or an error with a sentence."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_core.errors import CheckpointError, DataError, RunDirectoryError
from miles_core.record.replay import FLOW, load_batch, load_flow, save_batch, save_flow
from miles_core.stages.buffer import Slot
from miles_core.types import Batch, Drop, Group, Prompt, Sample, Status

TEXT = st.text(max_size=8)
PLAIN = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5)
COUNTS, PLACES = st.integers(0, 2**40), st.integers(0, 2**20)
DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")


@st.composite
def prompts(draw):
    messages = st.none() | st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=2).map(tuple)
    return Prompt(draw(COUNTS), draw(COUNTS), draw(TEXT), tuple(draw(st.lists(PLACES, max_size=4))),
                  draw(st.none() | TEXT), draw(st.dictionaries(TEXT, PLAIN, max_size=2)), draw(messages))


@st.composite
def arrays(draw, rows):
    """A column of any alignment: rows or none, further axes or none, in any order of memory."""
    axes = draw(st.lists(st.integers(0, 3), max_size=2))
    shape = [*draw(st.sampled_from([[], [rows]])), *axes]
    count, dtype = int(np.prod(shape)), draw(st.sampled_from(DTYPES))
    data = np.frombuffer(draw(st.binary(min_size=8 * count, max_size=8 * count)), np.uint8)
    array = (data[:count] % 2).astype(bool) if dtype == "bool" else data.view(dtype)[:count]
    array = array.reshape(shape)
    return np.asarray(array, order="F") if draw(st.booleans()) else array


@st.composite
def samples(draw, prompt, status=None):
    length = draw(st.integers(0, 4))
    columns = {"tokens": np.arange(len(prompt.token_ids) + length, dtype=np.int32),
               "versions": np.array(draw(st.lists(PLACES, min_size=length, max_size=length)), np.int32)}
    for name in draw(st.lists(st.sampled_from(["routes", "a.b", "0", "Ünï"]), max_size=3)):
        columns[name] = draw(arrays(length))
    return Sample(prompt, draw(st.integers(0, 9)), columns, length, draw(TEXT), status or draw(st.sampled_from(Status)),
                  draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)),
                  draw(st.none() | st.floats(allow_nan=False)), draw(st.none() | COUNTS),
                  draw(st.dictionaries(TEXT, PLAIN, max_size=2)))


@st.composite
def groups(draw, status=None):
    prompt = draw(prompts())
    return Group(prompt, draw(st.lists(samples(prompt, status), min_size=1, max_size=3)))


@st.composite
def slots(draw):
    """(round, slot): finished, dropped, called back by the engine, gone on with, or only begun."""
    group, kind = draw(groups()), draw(st.sampled_from(["finished", "dropped", "aborted", "begun", "fresh"]))
    slot = Slot(draw(st.integers(-5, 0)), group.prompt)
    if kind == "finished":
        slot.outcome = slot.group = group
    elif kind == "dropped":
        slot.outcome, slot.group = Drop(draw(st.sampled_from(["zero_std", "stale"])), draw(TEXT)), group
    elif kind == "aborted":
        slot.outcome, slot.group = Drop("aborted", "it has 1 sample(s) that did not finish"), group
    elif kind == "begun":
        slot.begun = tuple(group.samples)
    return slot.round, slot


def plain(sample):
    """All that a sample says, with its arrays as type, shape and bytes."""
    columns = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in sample.columns.items()}
    return (sample.prompt, sample.index, columns, sample.response_length, sample.text, sample.status, sample.rewards,
            sample.reward, sample.rollout, sample.metadata)


def contents(slot):
    """All of a slot that a resumed run needs."""
    lost = isinstance(slot.outcome, Drop) and slot.outcome.reason != "aborted"
    drop = slot.outcome if isinstance(slot.outcome, Drop) else None
    group = None if slot.group is None or lost else [plain(sample) for sample in slot.group.samples]
    return slot.round, slot.prompt, drop, group, [plain(sample) for sample in slot.begun]


def through_a_checkpoint(state):
    """As a checkpoint writes and reads it: JSON, and files of bytes."""
    if not state:
        return {}
    return {**json.loads(json.dumps({"flow": state["flow"]})), "files": dict(state["files"])}


@settings(deadline=None, max_examples=100)
@given(st.lists(slots(), max_size=4), st.lists(groups(), max_size=2))
def test_what_is_under_way_comes_back_to_the_bit(under_way, begun):
    found, later = load_flow(through_a_checkpoint(save_flow(under_way, begun)))
    assert [contents(slot) for slot in found] == [contents(slot) for _, slot in under_way]
    assert [[plain(s) for s in group.samples] for group in later] == [[plain(s) for s in g.samples] for g in begun]
    assert all(slot.outcome is slot.group for slot in found if isinstance(slot.outcome, Group))
    assert all(group.prompt == same.prompt for group, same in zip(later, begun, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(slots(), min_size=1, max_size=3), st.data())
def test_a_torn_or_changed_file_is_an_error_with_a_sentence(under_way, data):
    state = through_a_checkpoint(save_flow(under_way, []))
    whole = state["files"][FLOW]
    if data.draw(st.booleans()):
        state["files"][FLOW] = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        changed = bytearray(whole)
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        state["files"][FLOW] = bytes(changed)
    with pytest.raises(CheckpointError, match=r"\[unfinished-groups-unreadable\]"):
        load_flow(state)


def group_of(uid, count=2, **columns):
    prompt = Prompt(uid, uid, "1+1=", (1, 2, 3))
    held = {"tokens": np.array([1, 2, 3, 4], np.int32), "versions": np.array([uid], np.int32), **columns}
    return Group(prompt, [Sample(prompt, i, dict(held), 1, "2", Status.COMPLETED, reward=1.0) for i in range(count)])


def test_a_file_of_another_checkpoint_is_an_error_with_a_sentence():
    def state(uid):
        group = group_of(uid)
        return through_a_checkpoint(save_flow([(-1, Slot(0, group.prompt, outcome=group))], []))

    for foreign in (state(2)["files"], {}, {FLOW: b""}):
        with pytest.raises(CheckpointError, match=r"\[unfinished-groups-unreadable\]"):
            load_flow({**state(1), "files": foreign})
    for changes in ({"slots": [{}]}, {"slots": None}, {"begun": [5]}, {"slots": [], "begun": []}):
        broken = state(1)
        broken["flow"].update(changes)
        with pytest.raises(CheckpointError, match=r"\[unfinished-groups-unreadable\]"):
            load_flow(broken)


def test_nothing_under_way_leaves_no_trace():
    assert save_flow([], []) == {} and load_flow({"prompts": {}}) == ([], [])


def test_what_json_cannot_hold_is_kept_as_well_as_can_be():
    group = group_of(7)
    group.samples[0].metadata = {"array": np.arange(3), 1: {2}, "one": np.float32(0.5), "pair": (1, np.int64(2))}
    group.samples[0].reward = np.float32(0.25)
    [slot], _ = load_flow(through_a_checkpoint(save_flow([(-1, Slot(0, group.prompt, outcome=group))], [])))
    kept = slot.outcome.samples[0]
    assert kept.metadata == {"array": [0, 1, 2], "1": "{2}", "one": 0.5, "pair": [1, 2]} and kept.reward == 0.25


def test_texts_beyond_what_a_safetensors_header_holds():
    group = group_of(3)
    group.samples[0].text = "é" * 17_000_000  # six bytes each in JSON; a header may have 100 MB
    [slot], _ = load_flow(save_flow([(-1, Slot(0, group.prompt, outcome=group))], []))
    assert slot.outcome.samples[0].text == group.samples[0].text


@settings(deadline=None, max_examples=30)
@given(held=st.lists(groups(), min_size=1, max_size=3), version=COUNTS, place=st.data())
def test_a_rollout_comes_back_to_the_bit(tmp_path_factory, held, version, place):
    template = str(tmp_path_factory.mktemp("debug") / "{rollout_id}.safetensors")
    path = save_batch(template, Batch(5, held, version))
    found = load_batch(template, 5)
    assert (found.rollout_id, found.version) == (5, version)
    assert [[plain(s) for s in g.samples] for g in found.groups] == [[plain(s) for s in g.samples] for g in held]
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[place.draw(st.integers(0, len(whole) - 1))] ^= 1 << place.draw(st.integers(0, 7))
    for damaged in (whole[:-1], flipped):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"\[file-unreadable\]"):
            load_batch(template, 5)


def test_a_place_where_no_rollout_can_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "saved", tmp_path / "file" / "deep" / "saved", "/proc/none/saved"):
        with pytest.raises(RunDirectoryError) as caught:
            save_batch(f"{place}/{{rollout_id}}", Batch(3, [], 1))
        assert (caught.value.code, caught.value.who) == ("run-directory-unwritable", f"{place}/3")
