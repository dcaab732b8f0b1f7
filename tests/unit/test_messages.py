"""Messages: arrays are written once and mapped by every receiver, and an answer does not send them back."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from miles_core.hosts import ProcessHost, process_group
from miles_core.messages import Message, answered, unpickled

MANY = 3_000_000  # bytes, many pages


class Holder:
    """Keeps what it is sent, and tells what it holds of the memory."""

    def __init__(self, rank=None):
        self.rank = rank

    def keep(self, columns):
        self.columns = columns
        return {"writable": any(column.flags.writeable for column in columns.values())}

    def held(self, name):
        """Bytes of this process's mapping that are resident, after reading one column."""
        total = int(self.columns[name].sum())
        inside, held = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = "memfd:miles" in line
            elif inside and line.startswith("Rss:"):
                held += 1024 * int(line.split()[1])
        return {self.rank.index: (total, held)}

    def give_back(self):
        self.columns["new"] = np.arange(3)
        return self.columns if self.rank is None or self.rank.index == 0 else None


def columns():
    draw = np.random.default_rng(0)
    heavy = {name: draw.integers(0, 9, MANY, np.uint8) for name in ("first", "second")}
    return {"light": np.arange(100), "none": np.zeros((0, 4)), "turned": np.asfortranarray(np.ones((3, 2))), **heavy}


def with_host(host, work):
    async def main():
        try:
            return await work(host)
        finally:
            await host.close()

    host.timeout = 120
    return asyncio.run(main())


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="asks the kernel of Linux")
def test_a_process_holds_what_it_reads_and_no_more():
    sent = columns()

    async def work(ranks):
        assert await ranks.keep(sent) == {"writable": False}
        return await ranks.held("second")

    held = with_host(process_group("holder", 2, Holder), work)
    assert {rank: total for rank, (total, _) in held.items()} == dict.fromkeys((0, 1), int(sent["second"].sum()))
    assert all(MANY <= bytes_ < 1.2 * MANY for _, bytes_ in held.values()), held


@pytest.mark.parametrize("make", [lambda: ProcessHost("holder", Holder), lambda: process_group("holder", 2, Holder)])
def test_what_comes_back_is_what_was_sent_and_what_was_added(make):
    sent = columns()

    async def work(host):
        await host.keep(sent)
        return [await host.give_back() for _ in range(2)]

    for back in with_host(make(), work):
        assert back.keys() == {*sent, "new"} and back["new"].tolist() == [0, 1, 2]
        for name, column in sent.items():
            assert np.array_equal(back[name], column) and back[name].dtype == column.dtype, name


def test_an_answer_sends_only_what_did_not_come_with_the_message():
    sent = Message(columns())
    arrived = unpickled(sent.body, sent.spans, sent.memory)
    body, spans = answered({**arrived, "new": np.full(1000, 7)}, sent.memory)
    assert len(body) < 10_000 and len(spans) >= 3
    back = unpickled(body, spans, sent.memory)
    assert np.shares_memory(back["first"], arrived["first"]) and back["new"].sum() == 7000


def test_arrays_that_everybody_reads_lie_apart_from_large_ones():
    sent = Message([{"light": np.arange(10), "heavy": np.zeros(MANY, np.uint8)} for _ in range(4)])
    light, heavy = sent.spans[::2], sent.spans[1::2]
    assert max(end for _, end in light) <= min(begin for begin, _ in heavy)


def test_two_messages_one_after_the_other_each_have_their_own_memory():
    async def work(host):
        await host.keep({"a": np.full(MANY, 1, np.uint8)})
        first = await host.give_back()
        await host.keep({"a": np.full(MANY, 2, np.uint8)})
        return first, await host.give_back()

    first, second = with_host(ProcessHost("holder", Holder), work)
    assert (first["a"] == 1).all() and (second["a"] == 2).all()
