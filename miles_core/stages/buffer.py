"""Stage 5, buffer: bounded by max_lag, first started first out.

A slot stands for one prompt group. It is reserved before sampling begins and its room comes back only after the weights
trained on its batch have been synced (`release`), so with capacity batch_size x (max_lag + 1) a group is never trained
on more than max_lag syncs after it was started, and max_lag = 0 *is* synchronous training. Batches are cut in the order
in which slots were started, whatever finished first: at max_lag 0 timing cannot change what is trained on.

Over-sampling adds credit for slots in flight, not capacity. What a full batch leaves over and could only be trained on
too late is taken back: its prompts return to the source in their old order.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles_core.errors import StarvedError
from miles_core.types import Drop, Group, Prompt


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one group.

    Args:
        round: how many syncs there had been when it was reserved.
        outcome: None while sampling, then the group, or why it was dropped.
    """

    round: int
    prompt: Prompt | None = None
    outcome: Group | Drop | None = None
    task: asyncio.Task | None = None


@dataclass(slots=True)
class Taken:
    """One batch's groups in the order in which they were started, and the drops passed over on the way."""

    groups: list[Group]
    drops: Counter[str] = field(default_factory=Counter)


class Buffer:
    """Slots between the producer and the consumer.

    Args:
        batch_size: groups of a batch (--rollout-batch-size).
        max_lag: syncs that may pass between reserving a slot and training on it.
        credit: slots beyond the capacity that may be in flight (--over-sampling-batch-size less the batch size).
        batches: batches that will be taken in all; nothing is started that none of them could hold.
        most_drops: drops within one batch after which the run ends.
        give_back: takes the prompts of slots that were taken back, oldest first.
    """

    def __init__(self, batch_size: int, max_lag: int, *, batches: int, credit: int = 0, most_drops: int = 1024,
                 give_back: Callable[[list[Prompt]], None] = lambda prompts: None):
        self.batch_size, self.max_lag, self.credit, self.most_drops = batch_size, max_lag, credit, most_drops
        self.batches = batches
        self._give_back = give_back
        self._slots: list[Slot] = []
        self._taken = self._released = 0
        self._failure: BaseException | None = None
        self._changed = asyncio.Condition()
        self._wakers: set[asyncio.Task] = set()

    async def reserve(self) -> Slot:
        """A slot, once there is room. Waits for: the consumer's `release`, or a drop.

        Raises:
            StarvedError: the filters drop nearly everything.
            whatever ended a slot's sampling.
        """
        await self._until(self._has_room)
        dropped = [slot.outcome for slot in self._slots if isinstance(slot.outcome, Drop)]
        if len(dropped) >= self.most_drops:
            raise self._starved(dropped)
        slot = Slot(round=self._released)
        self._slots.append(slot)
        return slot

    @contextmanager
    def filling(self, slot: Slot) -> Iterator[None]:
        """Around the sampling of a slot: any error ends the whole run with that very error."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the run: `take` and `reserve` raise it
            self.fail(error)
        finally:
            self._wake()

    async def take(self) -> Taken:
        """The oldest full batch. Waits for: the producer.

        Raises:
            whatever ended a slot's sampling.
        """
        await self._until(lambda: self._oldest_batch() is not None)
        taken, rest = self._oldest_batch()
        self._taken += 1
        stale = [slot for slot in rest if self._taken - slot.round > self.max_lag]
        for slot in stale:
            if slot.task is not None:
                slot.task.cancel()
        self._slots = [slot for slot in rest if slot not in stale]
        self._give_back([slot.prompt for slot in stale if slot.prompt is not None])
        return taken

    def release(self) -> None:
        """The taken batch's weights are in the engine: its room comes back."""
        self._released += 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End both sides with this error; the first one wins."""
        self._failure = self._failure or error
        self._wake()

    def untrained(self) -> list[Prompt]:
        """Prompts that were handed out and not taken yet, oldest first: what a resumed run has to sample again."""
        return [slot.prompt for slot in self._slots if slot.prompt is not None]

    def _has_room(self) -> bool:
        if self._taken - self._released > self.max_lag:
            return False  # started now, it could only be trained on after one sync too many
        unsettled = self._taken - self._released
        room = min(self.max_lag + 1 - unsettled, self.batches - self._taken) * self.batch_size
        occupied = sum(not isinstance(slot.outcome, Drop) for slot in self._slots)
        return occupied < room + self.credit * (room > 0)

    def _oldest_batch(self) -> tuple[Taken, list[Slot]] | None:
        taken = Taken([])
        for i, slot in enumerate(self._slots):
            if slot.outcome is None:
                return None  # an older slot may still be kept: waiting for it is what makes the order exact
            if isinstance(slot.outcome, Drop):
                taken.drops[slot.outcome.reason] += 1
            else:
                taken.groups.append(slot.outcome)
            if len(taken.groups) == self.batch_size:
                return taken, self._slots[i + 1 :]
        return None

    def _starved(self, dropped: list[Drop]) -> StarvedError:
        reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(d.reason for d in dropped).most_common())
        kept = sum(isinstance(slot.outcome, Group) for slot in self._slots)
        detail = next((d.detail for d in reversed(dropped) if d.detail), "")
        return StarvedError(
            f"filters dropped {len(dropped)} groups ({reasons}) and kept {kept} of the {self.batch_size} that a "
            f"rollout needs{'; last: ' + detail if detail else ''}",
            fix="look at the reward first: when every answer of a group scores the same there is nothing to learn from "
            "(wrong --label-key, a scorer that never matches, or a task that is too hard or too easy)",
        )

    async def _until(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or ready())
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.get_running_loop().create_task(notify())
        self._wakers.add(task)
        task.add_done_callback(self._wakers.discard)
