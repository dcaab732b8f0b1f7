"""Hand-over: both sides over every sequence of purposes, as a state machine and against a model of the memory."""

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from miles_testing.clock import run_virtual

from miles_core.errors import SyncError, WaitError
from miles_core.handover import ENGINE, TABLE, TRAINER, HandOver


class Memory:
    """Both sides as one: what each holds, every call in order, and the most that was ever held within a move."""

    def __init__(self):
        self.trainer, self.engine = set(TRAINER), set(ENGINE)
        self.filled, self.calls, self.slow, self.broken = False, [], 0.0, False
        self.most = 0

    async def offload(self, tags):
        await self._go("offload", tags)
        assert set(tags) <= self.trainer, "what is off is put off again"
        self.trainer -= set(tags)

    async def onload(self, tags):
        await self._go("onload", tags)
        assert not self.trainer & set(tags)
        self.trainer |= set(tags)
        self.most = max(self.most, len(self.trainer) + len(self.engine))

    async def release(self, tags):
        await self._go("release", tags)
        assert set(tags) <= self.engine
        self.engine -= set(tags)
        self.filled &= "weights" not in tags

    async def occupy(self, tags):
        await self._go("occupy", tags)
        assert not self.engine & set(tags)
        self.engine |= set(tags)
        self.most = max(self.most, len(self.trainer) + len(self.engine))

    async def _go(self, method, tags):
        self.calls.append((method, tuple(tags)))
        await asyncio.sleep(self.slow)
        if self.broken:
            raise RuntimeError("out of memory")


def row(purpose):
    return tuple(set(held) for held in TABLE[purpose])


def follow(purposes, memory=None, **flags):
    """Take the leases one after the other; the memory afterwards."""
    memory = memory or Memory()
    hand_over = HandOver(memory, memory, **flags)

    async def main():
        for purpose in purposes:
            async with hand_over.at(purpose):
                if purpose == "sync":
                    memory.filled = True

    asyncio.run(main())
    return memory


def test_a_run_s_calls_in_miles_s_order():
    """Start, first sync, rollouts, a step, its sync, rollouts again, a checkpoint, rollouts."""
    memory = follow(["start", "sync", "rollout", "train", "sync", "rollout", "rollout", "save", "rollout"])
    assert memory.calls == [
        ("offload", TRAINER),
        ("release", ("kv_cache", "cuda_graph")), ("onload", ("weights",)),
        ("offload", ("weights",)), ("occupy", ("kv_cache", "cuda_graph")),
        ("release", ("kv_cache", "weights", "cuda_graph")), ("onload", TRAINER),
        ("offload", ("gradients", "optimizer")), ("occupy", ("weights",)),
        ("offload", ("weights",)), ("occupy", ("kv_cache", "cuda_graph")),
        ("release", ("kv_cache", "cuda_graph")), ("onload", TRAINER),
        ("offload", TRAINER), ("occupy", ("kv_cache", "cuda_graph")),
    ]  # fmt: skip


PURPOSES = st.lists(st.sampled_from([*TABLE, "recover"]), max_size=30).map(lambda rest: ["start", *rest])


@settings(max_examples=300, deadline=None)
@given(PURPOSES)
def test_any_sequence_holds_what_the_table_says_and_never_serves_empty_weights(purposes):
    memory, last = Memory(), "start"
    hand_over = HandOver(memory, memory)

    async def main():
        nonlocal last
        for purpose in purposes:
            memory.most = 0
            before = memory.trainer | {"engine " + part for part in memory.engine}
            if purpose == "rollout" and not memory.filled:
                with pytest.raises(SyncError, match=r"\[engine-weights-released\]"):
                    async with hand_over.at(purpose):
                        pytest.fail("an empty engine served")
                assert memory.trainer | {"engine " + part for part in memory.engine} == before
                continue
            async with hand_over.at(purpose):
                if purpose == "recover":
                    assert memory.trainer == row(last)[0] | {"weights"}
                    continue
                assert (memory.trainer, memory.engine) == row(purpose)
                larger = max(sum(map(len, row(one))) for one in (purpose, last))
                assert memory.most <= larger, "more was held on the way than before or after"
                if purpose == "sync":
                    memory.filled = True
            last = purpose
        assert (memory.trainer, memory.engine) == row(last), "a recovery leaves things as they were"

    asyncio.run(main())


@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_side_that_stays_is_never_asked(side):
    memory = follow(["start", "sync", "rollout", "train", "sync", "rollout", "save", "rollout"],
                    **{f"offload_{side}": False})
    stays = {"train": {"offload", "onload"}, "rollout": {"release", "occupy"}}[side]
    assert memory.calls and not stays & {method for method, _ in memory.calls}


def test_a_failed_sync_leaves_the_weights_empty():
    memory = Memory()
    hand_over = HandOver(memory, memory)

    async def main():
        for purpose in ("start", "sync", "rollout", "train"):
            async with hand_over.at(purpose):
                pass
        with pytest.raises(ZeroDivisionError):
            async with hand_over.at("sync"):
                raise ZeroDivisionError
        with pytest.raises(SyncError, match="got sync before it"):
            async with hand_over.at("rollout"):
                pytest.fail("half-updated weights served")

    asyncio.run(main())


def test_a_cancelled_rollout_lets_the_hand_over_finish():
    """Rollouts are cancelled when they are surplus; half of a hand-over would leave nobody knowing who holds what."""
    memory = Memory()
    hand_over = HandOver(memory, memory)

    async def rollout():
        async with hand_over.at("rollout"):
            await asyncio.sleep(10)

    async def main():
        for purpose in ("start", "sync"):
            async with hand_over.at(purpose):
                pass
        memory.slow = 0.02
        first, second = asyncio.create_task(rollout()), asyncio.create_task(rollout())
        await asyncio.sleep(0.03)  # amid the engine's part
        first.cancel()
        await asyncio.wait([first])
        assert memory.engine == set(ENGINE)
        await asyncio.sleep(0.01)
        assert not second.done()
        second.cancel()
        await asyncio.wait([second])
        assert memory.calls[-2:] == [("offload", ("weights",)), ("occupy", ("kv_cache", "cuda_graph"))]

    run_virtual(main)


def test_after_a_failed_move_nothing_moves_any_more():
    memory = Memory()
    hand_over = HandOver(memory, memory)

    @asynccontextmanager
    async def broken():
        memory.broken = True
        with pytest.raises(RuntimeError, match="out of memory"):
            yield

    async def main():
        async with broken(), hand_over.at("start"):
            pass
        memory.broken, calls = False, len(memory.calls)
        for purpose in ("sync", "recover"):
            with pytest.raises(RuntimeError, match="out of memory"):
                async with hand_over.at(purpose):
                    pytest.fail("it went on")
        assert len(memory.calls) == calls

    asyncio.run(main())


def test_an_engine_that_does_not_release_is_bounded_and_named():
    memory = Memory()
    hand_over = HandOver(memory, memory, timeout=0.05)

    async def main():
        async with hand_over.at("start"):
            memory.slow = 10
        with pytest.raises(WaitError, match="the engine did not release kv_cache, cuda_graph within 0.05 s"):
            async with hand_over.at("sync"):
                pass

    run_virtual(main)


def test_seconds_are_reported_once(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: asyncio.get_running_loop().time())
    memory = Memory()
    memory.slow = 0.01
    hand_over = HandOver(memory, memory)

    async def main():
        for purpose in ("start", "sync", "rollout"):
            async with hand_over.at(purpose):
                pass

    run_virtual(main)
    names = {"offload": "trainer", "onload": "trainer", "release": "engine", "occupy": "engine"}
    took = Counter(f"perf/{names[method]}_{method}_time" for method, _ in memory.calls)
    assert len(took) == 4
    assert hand_over.figures() == {name: pytest.approx(0.01 * calls) for name, calls in took.items()}
    assert hand_over.figures() == {}
