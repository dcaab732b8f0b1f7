"""Several conversations of one agent: what goes on with what, and which answers are trained on where."""

import asyncio

import numpy as np
import pytest
from endpoint import TOOLED, USER, Scripted, conversing, prompt, tokenizer
from miles_tools.agent import numbered
from miles_tools.template import Template

from miles_core.columns import Columns
from miles_core.types import Sample, Status

SURE, AGAIN = {"role": "user", "content": "sure?"}, {"role": "user", "content": "again"}
OTHER = {"role": "system", "content": "be another"}


async def at_once(client, engine, *conversations):
    """Calls that are under way, and wait at the engine's gate."""
    before = len(engine.requests)
    engine.gate.clear()
    calls = [asyncio.create_task(say(client, *messages)) for messages in conversations]
    async with asyncio.timeout(10):
        while len(engine.requests) < before + len(calls):
            await asyncio.sleep(0.01)
    return calls


async def say(client, *messages, **more):
    """The messages with the answer to them."""
    return [*messages, (await client.ask(list(messages), **more))["choices"][0]["message"]]


def drawn(sample):
    """The texts that a sample is trained on."""
    start, texts, run = sample.length - sample.response_length, [], []
    for token, mask in zip(sample.tokens[start:].tolist(), [*sample.columns["loss_mask"], 0]):
        if mask:
            run.append(token)
        elif run:
            texts.append(tokenizer().decode(run, skip_special_tokens=True))
            run = []
    return [*texts, *([tokenizer().decode(run, skip_special_tokens=True)] if run else [])]


def texts(session):
    samples = session.samples(None)
    for sample in samples:
        Columns().check(sample)
        assert sample.status is Status.COMPLETED
    return [drawn(sample) for sample in samples]


def test_a_branch_has_the_ids_of_what_it_goes_on_from():
    """They are not rendered or tokenised again, and the answer that both have is trained on in the first alone."""
    async def talk(client, session, engine):
        begun = await say(client, USER)
        one = await say(client, *begun, SURE)
        await say(client, *one, AGAIN)
        other = await say(client, *begun, AGAIN)
        asked = [list(request.input_ids) for request in engine.requests]
        assert asked[3][: len(asked[1]) - 10] == asked[1][: len(asked[1]) - 10]
        assert texts(session) == [["A", "B", "C"], ["D"]]
        first, second = session.samples(None)
        shared = len(asked[0]) + len(tokenizer()("A<|im_end|>", add_special_tokens=False)["input_ids"])
        assert second.tokens[:shared].tolist() == first.tokens[:shared].tolist()
        assert second.columns["loss_mask"][: shared - len(asked[0])].sum() == 0
        assert second.metadata["conversation"] == other and first.metadata["messages"] == other
        assert first.text == second.text == "D<|im_end|>"  # the agent is judged by what was answered last
        assert [one.metadata["figures"]["agent/turns"] for one in (first, second)] == [3, 2]
        assert [one.metadata["shown"]["response"] for one in (first, second)] == ["C<|im_end|>", "D<|im_end|>"]
        assert first.metadata["shown"]["prompt"] == Template(tokenizer(), {}).text([USER], "test")
        assert first.metadata["figures"]["agent/conversations"] == 2

    conversing(talk, Scripted(*"ABCD"), conversations=2)


def test_what_is_asked_for_again_is_superseded():
    """An answer that the agent did not go on from counts for nothing; what came before it is trained on elsewhere."""
    async def talk(client, session, engine):
        begun = await say(client, USER)
        await say(client, *begun, SURE)
        await say(client, *begun, SURE)
        assert engine.requests[1].input_ids == engine.requests[2].input_ids
        assert engine.requests[1].key != engine.requests[2].key  # else it would be the same answer
        assert texts(session) == [["A", "C"]]
        assert session.samples(None)[0].metadata["figures"]["agent/superseded"] == 1

    conversing(talk, Scripted(*"ABC"), conversations=2)


def test_answers_that_are_asked_for_at_once_supersede_nothing():
    async def talk(client, session, engine):
        begun = await say(client, USER)
        both = await at_once(client, engine, [*begun, SURE], [*begun, AGAIN])
        engine.gate.set()
        await asyncio.gather(*both)
        assert texts(session) == [["A", "B"], ["C"]]
        assert len({request.key for request in engine.requests}) == len({one.id for one in engine.requests}) == 3

    conversing(talk, Scripted(*"ABC"), conversations=2)


def test_a_branch_that_waits_for_its_answer_is_no_sample():
    async def talk(client, session, engine):
        begun = await say(client, USER)
        both = await at_once(client, engine, [*begun, SURE], [*begun, AGAIN])
        assert texts(session) == [["A"]]
        engine.gate.set()
        await asyncio.gather(*both)

    conversing(talk, Scripted(*"ABC"), conversations=2)


@pytest.mark.parametrize("anew", [
    lambda begun: ([OTHER, USER], []),  # an agent that it sends out
    lambda begun: ([{"role": "user", "content": "so far: 3+4 is A"}], []),  # a summary
    lambda begun: ([*begun, SURE], [{"type": "function", "function": {"name": "add"}}]),  # other tools
    lambda begun: ([USER, {"role": "assistant", "content": "seven"}, SURE], []),  # an answer that was not given
])
def test_what_goes_on_with_nothing_begins_anew(anew):
    async def talk(client, session, engine):
        begun = await say(client, USER)
        messages, tools = anew(begun)
        await say(client, *messages, tools=tools)
        await say(client, *begun, SURE)  # and the first one goes on
        assert texts(session) == [["B"], ["A", "C"]]
        second = session.samples(None)[0]
        assert second.length - second.response_length == len(engine.requests[1].input_ids)

    conversing(talk, Scripted(*"ABC"), template=TOOLED, conversations=2)


def test_one_conversation_too_many_ends_the_session():
    async def talk(client, session, _engine):
        await say(client, USER)
        await say(client, OTHER, USER)
        await client.refused({"messages": [SURE]}, 409, "another conversation than the 2")
        (sample,) = session.samples(None)
        assert sample.status is Status.FAILED and sample.metadata["drop"]["reason"] == "agent_conversations"

    conversing(talk, Scripted(*"AB"), conversations=2)


def test_a_conversation_that_is_full_goes_on_as_its_summary():
    async def talk(client, session, _engine):
        begun = await say(client, USER)
        await client.refused({"messages": [*begun, {"role": "user", "content": "9" * 200}]}, 400, "leave no room")
        await say(client, {"role": "user", "content": "so far: A"})
        one, other = session.samples(None)
        assert (one.status, other.status) == (Status.TRUNCATED, Status.COMPLETED) and other.text == "B<|im_end|>"

    conversing(talk, Scripted(*"AB"), context=128, conversations=2)


def test_a_branch_whose_client_goes_away_leaves_nothing():
    async def talk(client, session, engine):
        begun = await say(client, USER)
        await say(client, *begun, SURE)
        engine.gate.clear()
        await client.leave([*begun, AGAIN], session, engine)
        engine.gate.set()
        assert texts(session) == [["A", "B"]]
        await say(client, *begun, AGAIN)
        assert texts(session) == [["A", "B"], ["C"]]
        assert engine.requests[2] == engine.requests[3]

    conversing(talk, Scripted(*"ABC"), conversations=3)


def test_the_samples_of_a_group_say_of_which_rollout_they_are():
    def sample():
        return Sample(prompt(), 0, {"tokens": np.zeros(1, np.int32)})

    alone = numbered([[sample()], [sample()]])
    assert [(one.index, one.rollout) for one in alone] == [(0, None), (1, None)]
    several = numbered([[sample(), sample()], [sample()]])
    assert [(one.index, one.rollout) for one in several] == [(0, 0), (1, 0), (2, 1)]
