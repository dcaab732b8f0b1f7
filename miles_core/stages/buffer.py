"""Stage 5, buffer: bounded by max_lag, first started first out.

A slot stands for one prompt group. It is reserved before sampling begins and its room comes back only after the weights
trained on its batch have been synced (`release`), so with capacity batch_size x (max_lag + 1) a group is never trained
on more than max_lag syncs after it was started, and max_lag = 0 *is* synchronous training. Batches are cut in the order
in which slots were started, whatever finished first: at max_lag 0 timing cannot change what is trained on.

Order "window" lets a finished group overtake slower ones for as long as these can still come later: those that no later
batch could hold go first and are waited for, the rest of the batch is what is finished, oldest first. Every group that
was started is trained on in either order, so neither prefers short answers. Where a plugin keeps what was called back,
a window waits for nobody: a batch is what finished first, and the others go on in the next one.

Over-sampling adds credit for slots in flight, not capacity. What a full batch leaves over and could only be trained on
too late is taken back. Its prompts come again first, and what becomes of them is cut before what began later.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from miles_core.errors import StarvedError
from miles_core.types import CancelHandle, Drop, Group, Prompt, Sample

Order = Literal["started", "window"]


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one group.

    Args:
        round: how many syncs there had been when it was reserved.
        begun: samples of the group that were called back before.
        group: what was sampled, finished or not.
        outcome: None while sampling, then the group, or why it was dropped.
        recall: what ends its requests early.
        since: the clock when its sampling began.
    """

    round: int
    prompt: Prompt | None = None
    begun: tuple[Sample, ...] = ()
    group: Group | None = None
    outcome: Group | Drop | None = None
    task: asyncio.Task[Any] | None = None
    recall: CancelHandle = field(default_factory=CancelHandle)
    since: float = 0.0


@dataclass(slots=True)
class Taken:
    """One batch's groups in the order in which they were started, and what was passed over on the way.

    Args:
        drops: groups that are not trained on, by reason.
        kinds: the same by reason/kind, where a drop says one.
        again: groups whose prompt comes again, by reason.
    """

    groups: list[Group]
    drops: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)


def stale_drop(group: Group) -> Drop:
    """A group that is too stale to be trained on, as a drop."""
    return Drop("stale", f"prompt {group.prompt.uid} was sampled from version {group.oldest_version} on")


async def forget(slots: list[Slot]) -> None:
    """Take slots back and keep nothing of them."""


class Buffer:
    """Slots between the producer and the consumer.

    Args:
        batch_size: groups of a batch (--rollout-batch-size).
        max_lag: syncs that may pass between reserving a slot and training on it.
        credit: slots beyond the capacity that may be in flight (--over-sampling-batch-size less the batch size).
        most_in_flight: groups that may be sampled at once; None for as many as there is room for.
        order: how batches are cut.
        batches: batches that will be taken in all; nothing is started that none of them could hold.
        most_drops: drops within one batch after which the run ends.
        too_stale: whether a group is too old to be trained on now.
        again: reasons ("aborted", "stale") for which a group is taken back in place of being dropped.
        resumes: what is taken back goes on later, so a window need not wait for anybody.
        requeue: what becomes of slots that no batch can hold any more, oldest first.
    """

    def __init__(self, batch_size: int, max_lag: int, *, batches: int, credit: int = 0,
                 most_in_flight: int | None = None, order: Order = "started", most_drops: int = 1024,
                 too_stale: Callable[[Group], bool] = lambda group: False, again: frozenset[str] = frozenset(),
                 resumes: bool = False,
                 requeue: Callable[[list[Slot]], Awaitable[None]] = forget):
        self.batch_size, self.max_lag, self.credit, self.most_drops = batch_size, max_lag, credit, most_drops
        self.batches, self.most_in_flight, self.order = batches, most_in_flight, order
        self.too_stale, self.again, self.resumes, self.requeue = too_stale, again, resumes, requeue
        self._slots, self._leaving, self._restored = list[Slot](), list[Slot](), deque[Slot]()
        self._retried, self._overdue = Counter[str](), set[int]()
        self._taken = self._released = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def reserve(self) -> Slot:
        """A slot, once there is room; one with a prompt goes on from a checkpoint.

        Waits for: the consumer's `release`, a drop, or an answer where --async-max-concurrent-samples bounds them.

        Raises:
            StarvedError: the filters drop nearly everything.
            whatever ended a slot's sampling.
        """
        while True:
            await self._until(lambda: not self._leaving and self._may_begin() and (self._restored or self._has_room()))
            if not await self._return_again():  # so that they go on before anything new begins
                break
        if self._restored:
            return self._restored.popleft()
        dropped = [slot.outcome for slot in self._slots if isinstance(slot.outcome, Drop)]
        passed = sum(isinstance(slot.outcome, Group) for slot in self._slots)  # full batches among them wait as well
        if len(dropped) + self._retried.total() >= self.most_drops * (1 + passed // self.batch_size):
            raise self._starved(dropped, passed % self.batch_size)
        slot = Slot(round=self._released)
        self._slots.append(slot)
        return slot

    @contextmanager
    def filling(self, slot: Slot) -> Iterator[None]:
        """Around the sampling of a slot: any error ends the whole run with that very error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run: `take` and `reserve` raise it
            self._failure = self._failure or error  # the first one wins
        finally:
            self._changed.set()

    async def take(self) -> Taken:
        """The next full batch. Waits for: the producer.

        Raises:
            whatever ended a slot's sampling.
        """
        while True:
            await self._until(lambda: self._cut() is not None)
            if not await self._set_aside():
                break
        slots, (taken, self._slots) = set(self._slots), cast("tuple[Taken, list[Slot]]", self._cut())
        self._taken += 1
        surplus = [slot for slot in self._slots if self._taken - slot.round > self.max_lag]
        self._overdue -= {slot.prompt.uid for slot in slots.difference(self._slots) if slot.prompt}
        self._overdue.update(slot.prompt.uid for slot in surplus if slot.prompt)
        self._restored = deque(slot for slot in self._restored if slot not in surplus)
        await self._give_back(surplus)
        self._retried.clear()
        return taken

    def release(self) -> None:
        """The taken batch's weights are in the engine: its room comes back."""
        self._released += 1
        self._changed.set()

    def slots(self) -> list[tuple[int, Slot]]:
        """What is reserved and not taken yet, oldest first, each with how many batches were taken since: <= 0.

        Asked for between a sync and its `release`; `restore` of a new buffer takes it.
        """
        return [(slot.round - self._taken, slot) for slot in (*self._leaving, *self._slots)]

    def restore(self, slots: Iterable[Slot]) -> list[Slot]:
        """Begin with these slots, oldest first; those without an outcome are sampled before any other.

        Returns:
            Slots that are too old for this run's max_lag, or more than it has room for.
        """
        slots = list(slots)
        room = min(self.max_lag + 1, self.batches) * self.batch_size + self.credit
        fit = [slot for slot in slots if -slot.round <= self.max_lag]
        drops = [slot for slot in fit if isinstance(slot.outcome, Drop)]
        keep = {*drops, *[slot for slot in fit if slot not in drops][:room]}
        self._slots = [slot for slot in slots if slot in keep]
        self._restored = deque(slot for slot in self._slots if slot.outcome is None)
        return [slot for slot in slots if slot not in keep]

    def figures(self, now: float) -> dict[str, float]:
        """Of this moment: groups being sampled, finished and dropped, room in all, age of the oldest one in seconds."""
        under_way = [slot for slot in self._slots if slot.task is not None and slot.outcome is None]
        kinds = Counter(type(slot.outcome) for slot in self._slots)
        return {"sampling": len(under_way), "finished": kinds[Group], "dropped": kinds[Drop],
                "capacity": self.batch_size * (self.max_lag + 1),
                "oldest_s": max((now - slot.since for slot in under_way), default=0.0)}

    def _may_begin(self) -> bool:
        return self.most_in_flight is None or (
            sum(slot.outcome is None for slot in self._slots) - len(self._restored) < self.most_in_flight)

    def _has_room(self) -> bool:
        unsettled = self._taken - self._released  # beyond max_lag, all could only be trained on after a sync too many
        room = min(self.max_lag + 1 - unsettled, self.batches - self._taken) * self.batch_size
        occupied = len(self._slots) - sum([isinstance(slot.outcome, Drop) for slot in self._slots])
        return occupied < room + self.credit * (room > 0)

    def _cut(self) -> tuple[Taken, list[Slot]] | None:
        """The next batch and the slots that stay, oldest first, or None when it is not full yet."""
        slots = self._slots if not (self.resumes or self._overdue) else sorted(self._slots, key=lambda one: (
            not one.begun, not one.prompt or one.prompt.uid not in self._overdue))  # or they age, or never come
        if self.order == "started" and any(slot.outcome is None for slot in slots[self.batch_size - 1::-1]):
            return None  # looked at from the end, where one is found soon: this is asked whenever a group is finished
        taken, chosen = Taken([], again=Counter(self._retried)), set()
        for slot in slots:
            last_chance = self._taken + 1 - slot.round > self.max_lag
            if slot.outcome is None:
                if self.order == "started" or (last_chance and not self.resumes):
                    return None  # an older slot may still be kept: waiting for it is what makes the order exact
                continue
            chosen.add(slot)
            if isinstance(slot.outcome, Drop):
                taken.drops[slot.outcome.reason] += 1
                taken.kinds.update([f"{slot.outcome.reason}/{slot.outcome.kind}"] if slot.outcome.kind else ())
            else:
                taken.groups.append(slot.outcome)
            if len(taken.groups) == self.batch_size:
                return taken, [slot for slot in slots if slot not in chosen]
        return None

    async def _set_aside(self) -> bool:
        """Drop what has become too stale while it waited, or has its prompt come again; whether there was any."""
        stale = [(slot, slot.outcome) for slot in self._slots
                 if isinstance(slot.outcome, Group) and self.too_stale(slot.outcome)]
        for slot, group in stale:
            slot.outcome = stale_drop(group)
        again = await self._return_again()
        self._changed.set()
        return bool(stale) or again

    async def _return_again(self) -> bool:
        """Take back the groups that shall come again; whether there was any. Without one it does not suspend."""
        again = [slot for slot in self._slots if isinstance(slot.outcome, Drop) and slot.outcome.reason in self.again]
        if not again:
            return False
        self._retried.update(slot.outcome.reason for slot in again if isinstance(slot.outcome, Drop))
        await self._give_back(again)
        return True

    async def _give_back(self, slots: list[Slot]) -> None:
        """Have slots taken back. Meanwhile a checkpoint still keeps them, and nothing else begins before they can."""
        self._slots = [slot for slot in self._slots if slot not in slots]
        self._leaving += slots
        await self.requeue(slots)
        self._leaving = [slot for slot in self._leaving if slot not in slots]
        self._changed.set()

    def _starved(self, dropped: list[Drop], passed: int) -> StarvedError:
        counts = Counter(drop.reason for drop in dropped) + self._retried
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
        detail = next((d.detail for d in reversed(dropped) if d.detail), "")
        return StarvedError(f"filters dropped {counts.total()} groups ({reasons}) and kept {passed} of the "
                            f"{self.batch_size} that a rollout needs{'; last: ' + detail if detail else ''}",
                            code="batch-starved",
                            fix="see to the reason; equal rewards of a group teach nothing: a wrong --label-key, "
                                "a scorer that never matches, a task that is too hard or too easy")

    async def _until(self, ready: Callable[[], object]) -> None:
        while self._failure is None and not ready():
            self._changed.clear()  # whoever else waits was woken by the same change
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
