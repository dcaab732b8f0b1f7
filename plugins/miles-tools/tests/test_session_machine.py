"""Agents that do anything: whatever they ask, every drawn token that counts is trained on once, as it was drawn."""

import asyncio
import copy
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from endpoint import TOOLED, TOOLS, calls, new_session, tokenizer
from miles_tools.session_request import Asked, Refused

from miles_core.columns import Columns
from miles_core.stages.rollout import Response

NEW = [{"role": role, "content": content} for role, content in (
    ("user", "3+4="), ("user", "sure?"), ("tool", "7"), ("system", "be another"), ("user", "9" * 120),
    ("assistant", "zz"))]  # the last one is invented
EXACT = 2.0**-12
"""Log-probs are multiples of it, so that float32 tells all apart."""


@dataclass
class Drawn:
    """An answer that was given, and how many there were when it was asked for."""

    ids: list[int]
    response: Response
    asked: int
    key: int

    @property
    def all_ids(self):
        return [*self.ids, *self.response.output_ids.tolist()]


class Gated:
    """Draws what it is told, when it is told; no two of its tokens have one log-prob."""

    def __init__(self):
        self.waiting, self.version, self.drawn = {}, 0, 0

    async def generate(self, request):
        assert request.id not in self.waiting
        self.waiting[request.id] = request, asyncio.get_running_loop().create_future()
        try:
            return await self.waiting[request.id][1]
        finally:
            del self.waiting[request.id]

    def draw(self, name, text, ended):
        request, answer = self.waiting[name]
        ids = tokenizer()(text + "<|im_end|>" * ended, add_special_tokens=False)["input_ids"]
        cut = ids[: request.sampling.max_new_tokens]
        log_probs = -EXACT * np.arange(self.drawn + 1, self.drawn + 1 + len(cut), dtype=np.float32)
        versions = np.full(len(cut), self.version, np.int32)
        versions[len(cut) // 2:] = self.version = self.version + 1
        self.drawn += len(cut)
        answer.set_result(Response(np.array(cut, np.int32), log_probs, versions,
                                   "stop" if ended and cut == ids else "length", text))


class Agent:
    """Continues, branches, repeats, edits, goes away, asks at once, changes tools, asks for more than there is room."""

    def __init__(self, seed, loop):
        self.pick, self.loop, self.engine = random.Random(seed), loop, Gated()
        self.talks, self.asked, self.given, self.calls = [[]], [], [], {}
        self.most, self.toolful = self.pick.choice([1, 4, 12, 24]), self.pick.random() < 0.5
        self.session = new_session(self.engine, template=TOOLED, context=self.pick.choice([200, 400, 3000]),
                                   max_new_tokens=1000, conversations=self.most)

    def step(self):
        if self.calls and (len(self.calls) > 3 or self.pick.random() < 0.6):
            self.answer() if self.pick.random() < 0.8 else self.go_away()
        elif self.asked and self.pick.random() < 0.15:
            self.send(self.pick.choice(self.asked[-3:]))
        else:
            before = self.talks[-1] if self.pick.random() < 0.6 else self.pick.choice(self.talks)
            back = self.pick.choice([0, 0, 0, 0, 0, 0, 1, 2, 3])
            new = self.pick.choices(NEW, [9, 9, 9, 3, 3, 1], k=self.pick.choice([1, 1, 2]))
            tools = tuple(TOOLS) if self.toolful != (self.pick.random() < 0.05) else ()
            self.send(Asked((*before[: max(len(before) - back, 0)], *new), tools))

    def answer(self):
        name = self.pick.choice([*self.calls])
        task, chat, asked = self.calls.pop(name)
        request, draw = self.engine.waiting[name]
        self.engine.draw(name, self.pick.choice(["A", "B", "A B", calls()]), ended=self.pick.random() < 0.8)
        completion = self.loop.run_until_complete(task)
        self.talks.append([*chat.messages, completion.message])
        self.given.append(Drawn(list(request.input_ids), draw.result(), asked, request.key))

    def go_away(self):
        task, _, _ = self.calls.pop(self.pick.choice([*self.calls]))
        task.cancel()
        self.loop.run_until_complete(asyncio.wait([task]))

    def send(self, chat):
        self.asked.append(chat)
        before, over = set(self.engine.waiting), self.session.failure is not None
        task = self.loop.create_task(self.session.complete(copy.deepcopy(chat)))
        self.loop.run_until_complete(asyncio.wait([task], timeout=0))
        while not (task.done() or set(self.engine.waiting) - before):
            self.loop.run_until_complete(asyncio.sleep(0))
        if task.done():
            assert isinstance(task.exception(), Refused) and self.session.error is None
        else:
            assert not over
            (name,) = set(self.engine.waiting) - before
            self.calls[name] = task, chat, len(self.given)
            text = tokenizer().decode(self.engine.waiting[name][0].input_ids)
            assert ('"parameters"' in text) == bool(chat.tools)
            for message in chat.messages:  # all of them are there, in their order
                _, begin, text = text.partition(f"<|im_start|>{message['role']}\n{message['content']}")
                assert begin
            assert text.endswith("<|im_start|>assistant\n")
        live = [self.engine.waiting[name][0].key for name in self.calls] + [one.key for one in self.given]
        assert len(set(live)) == len(live)

    def end(self):
        while self.calls:
            self.go_away()
        self.check(self.session.samples(None))

    def check(self, samples):
        if self.session.failure is not None or not self.given:
            assert [one.response_length for one in samples] == [0]
            return
        assert len(samples) <= self.most
        places = {value: (number, i) for number, one in enumerate(self.given)
                  for i, value in enumerate(one.response.log_probs.tolist())}
        trained = Counter()
        for sample in samples:
            Columns().check(sample)
            tokens, start = sample.tokens.tolist(), sample.length - sample.response_length
            columns = (sample.columns[name].tolist() for name in ("loss_mask", "rollout_log_probs", "versions"))
            for at, (mask, value, version) in enumerate(zip(*columns, strict=True), start):
                if mask:
                    number, i = places[value]
                    own = self.given[number]
                    assert tokens[: at + 1] == own.all_ids[: len(own.ids) + i + 1]
                    assert version == own.response.versions[i]
                    trained[number, i] += 1
        assert set(trained.values()) <= {1}
        for number, one in enumerate(self.given):
            counts = {trained[number, i] for i in range(len(one.response.output_ids))}
            assert counts in self.fates(number), (number, counts)

    def fates(self, number):
        """Whether an answer is trained on: {1}, {0}, or either where the agent went on from it or from its twin."""
        own = self.given[number]
        following = [i for i, one in enumerate(self.given) if one.ids[: len(own.all_ids)] == own.all_ids
                     and tokenizer().decode(one.ids[len(own.all_ids):]).count("<|im_start|>assistant") == 1]
        again = any(one.ids == own.ids and one.asked > number for one in self.given)
        if not following:
            return [{0}] if again else [{1}]
        twins = sum(one.ids == own.ids and all(a == b for a, b in zip(one.all_ids, own.all_ids))
                    for one in self.given) > 1  # to the agent they are one
        sure = not twins and any(self.fates(i) == [{1}] for i in following)
        return [{1}] if sure else [{0}, {1}]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_drawn_is_trained_on_once(seed):
    with asyncio.Runner() as runner:
        agent = Agent(seed, runner.get_loop())
        for _ in range(agent.pick.choice([10, 20, 40])):
            agent.step()
        agent.end()
