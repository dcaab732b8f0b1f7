"""Draws are keyed by (prompt, sample, span): the same again when a prompt is sampled again, others when one goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
from miles_local.engine import LocalEngine

from miles_core import rng
from miles_core.columns import Columns
from miles_core.stages.rollout import Generation, Request, SamplingParams, single_turn
from miles_core.types import Prompt, Status

VOCAB, PROMPT = 96, Prompt(7, 7, "", (5, 6, 7, 8))


def key(index, turn):
    return rng.key(42, "train", PROMPT.uid, index, turn)


def test_what_is_sampled_again_is_what_it_was_and_a_later_span_draws_anew(models):
    folder, _ = models["dense"]

    async def body():
        engine = LocalEngine(folder)
        await engine.start()

        async def sample(tokens, begun=()):
            return await single_turn(PROMPT, Generation(
                engine, SamplingParams(max_new_tokens=tokens), 2, key, lambda ids, skip: "", 20.0, begun=begun,
                columns=Columns()))

        try:
            whole, again, first = await sample(24), await sample(24), await sample(12)
            begun = tuple(replace(s, status=Status.ABORTED, metadata={"spans": 1}) for s in first)
            resumed, resumed_again = await sample(24, begun), await sample(24, begun)
            anew = [await engine.generate(Request(f"x{s.index}", tuple(s.tokens.tolist()),
                                                  SamplingParams(max_new_tokens=12), key(s.index, 0))) for s in begun]
            return whole, again, begun, resumed, resumed_again, anew
        finally:
            await engine.stop()

    whole, again, begun, resumed, resumed_again, anew = asyncio.run(asyncio.wait_for(body(), 60))
    assert same(whole, again) and same(resumed, resumed_again)
    for i, sample in enumerate(begun):
        assert np.array_equal(whole[i].tokens[: sample.length], sample.tokens), "equal weights, equal draws"
        assert np.array_equal(resumed[i].tokens[: sample.length], sample.tokens), "what was drawn stays"
        later = resumed[i].tokens[sample.length :].tolist()
        assert later != anew[i].output_ids.tolist(), "the draws of its first span once more"
        assert not np.array_equal(resumed[i].tokens, whole[i].tokens)
    assert not np.array_equal(whole[0].tokens, whole[1].tokens)


def same(left, right):
    return all(np.array_equal(a.tokens, b.tokens) and a.columns["rollout_log_probs"].tobytes()
               == b.columns["rollout_log_probs"].tobytes() for a, b in zip(left, right, strict=True))
