"""Stop a run anywhere, restore its buffer from the last checkpoint, go on: the shipped loop on virtual time.

Answers are drawn token by token, each from the weights of the moment, so that a group tells whether it was kept, went
on or was sampled again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_testing.clock import run_virtual
from miles_testing.toy import toy_run

from miles_core import rng
from miles_core.config.tables import Checkpoint
from miles_core.loop import train
from miles_core.record.replay import load_flow
from miles_core.run import Run
from miles_core.stages.buffer import Buffer, Slot
from miles_core.types import Batch, Drop, Group, Prompt, Sample, Status


def third(uid):
    return uid % 3 == 0


def length(uid, index):
    """Tokens of an answer: heavy-tailed, the same whenever the prompt is sampled."""
    return min(30, int(random.Random(f"{uid}-{index}").paretovariate(1.1)))


def token(uid, index, turn, place):
    return rng.key(0, "train", uid, index, turn, place) % 100


@dataclass
class Lineage:
    """The starts of one run, each from the last checkpoint of the one before; `batches` is what survives of them.

    Args:
        keeps: groups that are called back go on later.
    """

    rollouts: int
    keeps: bool = False
    done: int = 0
    state: dict = field(default_factory=dict)
    batches: list[tuple[Batch, int]] = field(default_factory=list)
    drops: list[tuple[int, Counter]] = field(default_factory=list)
    kept: list[tuple[int, dict]] = field(default_factory=list)
    flying: Counter = field(default_factory=Counter)

    def start(self, until: float | None = None, **flow) -> Run:
        """Go on to the end, or to a moment of virtual time."""
        run = toy_run(rollouts=self.rollouts - self.done, duration=lambda uid, tries: 0.0, dropped=third, **flow)
        run.first, run.last = self.done, self.rollouts
        run.config = replace(run.config, checkpoint=Checkpoint(save="x", save_interval=1))
        run.generate = lambda slot: self.generate(run, slot)
        run.unfinished, run.buffer.resumes = (lambda group: group) if self.keeps else None, self.keeps
        batches, drops, self.flying = self.batches, self.drops, Counter()

        async def save(folder, done, state):
            plain = {name: value for name, value in state.items() if name != "files"}
            self.done, self.state = done, {**json.loads(json.dumps(plain)), "files": state.get("files", {})}
            self.batches = batches + [(batch, flow["max_lag"]) for batch in run.trainer.batches]
            self.drops = drops + [(rollout, Counter({fields["reason"]: fields["count"]}))
                                  for kind, rollout, fields in run.journal.events if kind == "drop"]
            finished = [slot.outcome for slot in self.under_way()[0] if isinstance(slot.outcome, Group)]
            self.kept.append((done, {group.prompt.uid: plainly(group) for group in finished}))

        run.trainer.save = save
        run_virtual(lambda: self.go(run, until))
        return run

    async def go(self, run: Run, until: float | None) -> None:
        if self.state:
            run.prompts.fresh, run.prompts.again = self.state["prompts"]["next"], self.state["prompts"]["again"]
            slots, run.begun = load_flow(self.state)
            await run.requeue(run.buffer.restore(slots))
        try:
            async with asyncio.timeout(until):
                await train(run)
        except TimeoutError:
            assert until is not None

    async def generate(self, run: Run, slot: Slot) -> Group:
        """What is called back ends with what it has; a span has draws of its own."""
        uid = slot.prompt.uid
        self.flying[uid] += 1
        assert self.flying[uid] == 1, f"prompt {uid} is being sampled twice"
        most = run.buffer.most_in_flight
        assert most is None or self.flying.total() <= most
        try:
            return Group(slot.prompt, [await self.answer(run, slot, index) for index in range(2)])
        finally:
            self.flying[uid] -= 1

    async def answer(self, run: Run, slot: Slot, index: int) -> Sample:
        uid, whole = slot.prompt.uid, length(slot.prompt.uid, index)
        begun = next((sample for sample in slot.begun if sample.index == index), None)
        if begun is not None and begun.status is Status.COMPLETED:
            return begun
        versions = [] if begun is None else begun.columns["versions"].tolist()
        tokens = list(slot.prompt.token_ids) if begun is None else begun.tokens.tolist()
        spans = 0 if begun is None else begun.metadata["spans"]
        while len(versions) < whole and not slot.recall.cancelled:
            await asyncio.sleep(0.3)
            tokens.append(token(uid, index, spans, len(versions)))
            versions.append(run.version)
        columns = {"tokens": np.array(tokens, np.int32), "versions": np.array(versions, np.int32),
                   "loss_mask": np.ones(len(versions), np.uint8)}
        status = Status.COMPLETED if len(versions) == whole else Status.ABORTED
        return Sample(slot.prompt, index, columns, len(versions), status=status, reward=float(index),
                      metadata={"spans": spans + 1})

    def trained(self) -> list[int]:
        return [group.prompt.uid for batch, _ in self.batches for group in batch.groups]

    def under_way(self) -> tuple[list[Slot], list[Group]]:
        """Slots, and groups to go on with, of the last checkpoint."""
        return load_flow(self.state)

    def dropped(self) -> int:
        return sum(count.total() for _, count in self.drops)


def plainly(group: Group) -> list:
    return [(s.index, s.status, {name: array.tolist() for name, array in s.columns.items()}) for s in group.samples]


def check(run: Lineage, resampled: bool) -> None:
    """Every prompt that was handed out is accounted for once; what was trained on is whole, kept, and fresh enough.

    Args:
        resampled: a finished group may have its prompt sampled again, because no batch had room for it.
    """
    uids, (slots, begun) = run.trained(), run.under_way()
    again, handed_out = run.state["prompts"]["again"], run.state["prompts"]["next"]
    assert [batch.rollout_id for batch, _ in run.batches] == list(range(run.done))
    assert len(set(uids)) == len(uids), "trained on twice"
    assert not any(third(uid) for uid in uids), "dropped and trained on"
    to_come = [*again, *(slot.prompt.uid for slot in slots), *(group.prompt.uid for group in begun)]
    assert len(set(to_come)) == len(to_come) and not set(to_come) & set(uids), "would be trained on twice"
    lost = set(range(handed_out)) - {*uids, *to_come}
    assert all(third(uid) for uid in lost) and len(lost) == run.dropped(), "lost, or dropped twice"
    contents = {}
    for batch, max_lag in run.batches:
        for group in batch.groups:
            contents[group.prompt.uid] = plainly(group)
            assert run.keeps or batch.version - group.oldest_version <= max_lag
            for sample in group.samples:
                assert sample.response_length == length(group.prompt.uid, sample.index)
                assert (np.diff(sample.columns["versions"]) >= 0).all()
    for done, groups in run.kept:
        for uid in groups.keys() & contents.keys():
            anew = resampled and all(min(columns["versions"]) > done for _, _, columns in contents[uid])
            assert anew or contents[uid] == groups[uid], "finished at the checkpoint, and trained on otherwise"


FLOW = {"batch_size": st.integers(1, 4), "max_lag": st.integers(0, 3), "credit": st.integers(0, 3),
        "order": st.sampled_from(["started", "window"]), "most_in_flight": st.none() | st.integers(1, 6),
        "train": st.sampled_from([0.1, 1.0, 5.0])}
FLOWS = st.fixed_dictionaries(FLOW)
MOMENTS = st.lists(st.floats(0.5, 40), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(FLOWS, MOMENTS, st.booleans())
def test_stopped_anywhere_no_prompt_is_lost_or_trained_on_twice(flow, moments, keeps):
    run = Lineage(6, keeps)
    for moment in [*moments, None]:
        run.start(moment, **flow)
    assert run.done == 6
    check(run, resampled=flow["credit"] > 0 and not keeps)
    uids = run.trained()
    if flow["order"] == "started" and not flow["credit"]:
        assert uids == sorted(uids)


@settings(deadline=None, max_examples=60)
@given(st.lists(FLOWS, min_size=2, max_size=3), MOMENTS, st.integers(1, 6), st.booleans())
def test_resumed_with_other_settings_what_does_not_fit_is_sampled_again(flows, moments, rollouts, keeps):
    """Another lag, batch size, credit, order, bound, or fewer rollouts."""
    run = Lineage(6, keeps)
    for flow, moment in zip(flows, moments, strict=False):
        run.start(moment, **flow)
    run.rollouts = max(run.done + 1, rollouts)
    run.start(**flows[-1])
    check(run, resampled=True)
    last = [batch for batch, _ in run.batches][-1]
    assert len(last.groups) == flows[-1]["batch_size"]


@settings(deadline=None, max_examples=30)
@given(st.fixed_dictionaries({**FLOW, "max_lag": st.just(0)}), MOMENTS)
def test_at_max_lag_0_a_stop_changes_nothing(flow, moments):
    whole, stopped = Lineage(6), Lineage(6)
    whole.start(**flow)
    for moment in [*moments, None]:
        stopped.start(moment, **flow)

    def course(run):
        return [(batch.version, [plainly(group) for group in batch.groups]) for batch, _ in run.batches], run.drops

    assert course(stopped) == course(whole)


@pytest.mark.parametrize("order", ["started", "window"])
@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_what_is_called_back_goes_before_what_begins_and_ages_no_further(monkeypatch, order, max_lag):
    """Behind newer groups it would be left over and called back again, and again, whatever the lag that is allowed."""
    monkeypatch.setattr(f"{__name__}.length", lambda uid, index: 1 + (uid + index) % 2)
    run = Lineage(24, keeps=True)
    run.start(batch_size=2, max_lag=max_lag, credit=2, order=order)
    ages = Counter(batch.version - group.oldest_version for batch, _ in run.batches for group in batch.groups)
    assert max(ages) == max_lag + 1, f"a batch was called back, which is one more sync: {ages}"


def test_smaller_lag_and_batches_keep_the_oldest_that_fit():
    def slot(round_, uid, outcome=None):
        return Slot(round_, Prompt(uid, uid, "", (1,)), outcome=outcome)

    slots = [slot(-2, 0), slot(-2, 1, Drop("zero_std")), slot(-1, 2), slot(-1, 3, Drop("zero_std")), slot(-1, 4),
             slot(-1, 5), slot(-1, 6)]

    def left(max_lag, batch_size, batches, credit=0):
        buffer = Buffer(batch_size, max_lag, batches=batches, credit=credit)
        rest = [one.prompt.uid for one in buffer.restore(list(slots))]
        held = [(round_, one.prompt.uid) for round_, one in buffer.slots()]
        assert sorted(rest + [uid for _, uid in held]) == list(range(7)) and held == sorted(held)
        return rest

    assert left(2, 4, batches=9) == []
    assert left(1, 4, batches=9) == [0, 1], "too old now"
    assert left(0, 4, batches=9) == [0, 1, 2, 3, 4, 5, 6]
    assert left(1, 1, batches=9) == [0, 1, 5, 6], "room for two, and a drop takes none"
    assert left(1, 1, batches=9, credit=1) == [0, 1, 6]
    assert left(2, 4, batches=1) == [6], "fewer rollouts are left"


AHEAD = {"batch_size": 4, "max_lag": 3, "credit": 0, "order": "started", "most_in_flight": None, "train": 5.0}
SMALL = {**AHEAD, "batch_size": 2, "max_lag": 1}


def test_the_tests_above_catch_a_restore_that_forgets_what_does_not_fit(monkeypatch):
    other_settings = test_resumed_with_other_settings_what_does_not_fit_is_sampled_again.hypothesis.inner_test
    other_settings([AHEAD, SMALL], [12.0], 6, False)
    restore = Buffer.restore
    monkeypatch.setattr(Buffer, "restore", lambda self, slots: restore(self, slots) and [])
    with pytest.raises(AssertionError, match="lost"):
        other_settings([AHEAD, SMALL], [12.0], 6, False)


def test_the_tests_above_catch_a_checkpoint_without_the_buffer(monkeypatch):
    anywhere = test_stopped_anywhere_no_prompt_is_lost_or_trained_on_twice.hypothesis.inner_test
    anywhere(AHEAD, [12.0], False)
    monkeypatch.setattr(Buffer, "slots", lambda self: [])
    with pytest.raises(AssertionError, match="lost"):
        anywhere(AHEAD, [12.0], False)


class Watched(Slot):
    """A slot that counts how often its outcome is looked at."""

    __slots__ = ("own",)
    looks = 0

    @property
    def outcome(self):
        Watched.looks += 1
        return self.own

    @outcome.setter
    def outcome(self, value):
        self.own = value


@pytest.mark.parametrize("ordered", [True, False])
def test_a_full_batch_is_waited_for_with_few_looks_at_its_groups(monkeypatch, ordered):
    """A group that is finished has the batch looked at, which must not mean at all groups: thousands may be sampled."""
    monkeypatch.setattr("miles_core.stages.buffer.Slot", Watched)

    async def looks(size):
        buffer = Buffer(size, 0, batches=1)
        slots = [await buffer.reserve() for _ in range(size)]
        taken, Watched.looks = asyncio.create_task(buffer.take()), 0
        for slot in slots if ordered else random.Random(0).sample(slots, size):
            with buffer.filling(slot):
                slot.outcome = Group(None, [])
            for _ in range(3):
                await asyncio.sleep(0)
        assert len((await taken).groups) == size
        return Watched.looks / size

    assert asyncio.run(looks(400)) < 20


@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_a_surplus_comes_again_once_however_fast_sampling_is(max_lag):
    """What begins between a take and its sync is as old as what was left over; behind that it would be left over again,
    and the same prompts would be sampled in each rollout and trained on in none."""
    fresh, again, asked, trained = itertools.count(), deque(), Counter(), []

    async def requeue(slots):
        again.extend(slot.prompt for slot in slots)

    async def produce(buffer):
        while True:
            slot = await buffer.reserve()
            with buffer.filling(slot):
                slot.prompt = again.popleft() if again else Prompt(next(fresh), 0, "", (0,))
                slot.outcome = Group(slot.prompt, [])
                asked[slot.prompt.uid] += 1

    async def run():
        buffer = Buffer(2, max_lag, batches=12, credit=2, requeue=requeue)
        producer = asyncio.create_task(produce(buffer))
        for _ in range(12):
            trained.extend(group.prompt.uid for group in (await buffer.take()).groups)
            await asyncio.sleep(0.001)  # a step: all that there is room for is sampled meanwhile
            buffer.release()
            await asyncio.sleep(0.001)
        producer.cancel()

    run_virtual(run)
    assert trained == list(range(24)) and max(asked.values()) <= 2


def test_nothing_is_remembered_of_a_surplus_that_is_dropped_when_it_comes_again():
    again, prompts = deque(), [Prompt(uid, 0, "", (0,)) for uid in range(4)]

    async def requeue(slots):
        again.extend(slot.prompt for slot in slots)

    async def fill(buffer, prompt, outcome):
        slot = await buffer.reserve()
        with buffer.filling(slot):
            slot.prompt, slot.outcome = prompt, outcome or Group(prompt, [])

    async def run():
        buffer = Buffer(1, 0, batches=9, credit=1, requeue=requeue)
        for prompt in prompts[:2]:
            await fill(buffer, prompt, None)
        await buffer.take()
        buffer.release()
        assert list(again) == [prompts[1]]
        await fill(buffer, again.popleft(), Drop("filter", ""))
        await fill(buffer, prompts[2], None)
        await buffer.take()
        return buffer

    assert not asyncio.run(run())._overdue
