"""What every generator has to satisfy: one prompt and an engine become the samples of a group.

    from miles_testing import generator_contract

    def test_contract():
        generator_contract(MyGenerator().generate)

The engine here draws tokens that depend on a request's key and position alone, after a wait of its own choosing, as
real engines do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np

from miles_core import rng
from miles_core.columns import Column, Columns
from miles_core.errors import MilesError
from miles_core.stages.rollout import Engine, Generation, Request, Response, SamplingParams, attended
from miles_core.types import CancelHandle, Prompt, Sample, Status
from miles_testing import sample_inputs
from miles_testing.sample_inputs import canned_samples, grouped

Generate = Callable[[Prompt, Generation], Awaitable[list[Sample]]]

PATIENCE = 30.0
"""Seconds that a group may take."""


class KeyedEngine:
    """Draws bytes; which ones depends on the key and the position alone, when depends on `order`.

    Args:
        order: seed of the waits, so that answers come in another order.
        fails: every call raises.
        hangs: no call answers before it is aborted.
    """

    version = 7

    def __init__(self, order: int = 0, *, fails: bool = False, hangs: bool = False):
        self.order, self.fails, self.hangs = order, fails, hangs
        self.requests: list[Request] = []
        self.waiting: dict[str, asyncio.Event] = {}

    async def generate(self, request: Request) -> Response:
        self.requests.append(request)
        if self.fails:
            raise sample_inputs.Planted("planted by the conformance kit")
        if self.hangs:
            event = self.waiting[request.id] = asyncio.Event()
            await event.wait()
            return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
        await asyncio.sleep(rng.key(self.order, request.id) % 5 / 1000)
        draw = np.random.default_rng(request.key)
        size = min(request.sampling.max_new_tokens, int(draw.integers(1, 9)))
        ids = draw.integers(97, 122, size).astype(np.int32)
        return Response(ids, -draw.uniform(0.1, 2, size).astype(np.float32), np.full(size, self.version, np.int32),
                        "length" if size == request.sampling.max_new_tokens else "stop", bytes(ids.tolist()).decode())

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        for id in list(self.waiting) if ids is None else ids:
            self.waiting[id].set()


def generator_contract(generate: Generate, *, prompts: Callable[[], Sequence[Prompt]] | None = None, samples: int = 3,
                       columns: Sequence[Column] = (), max_new_tokens: int = 12, asks: bool = True,
                       tokenizer: Any = None) -> None:
    """Every property that a generator has to have.

    Args:
        prompts: by default the two of the canned samples.
        samples: how many a group has.
        columns: that its plugin declares.
        asks: False for one that takes its answers from elsewhere than the engine.
        tokenizer: what it finds in `generation.tokenizer`.

    Raises:
        AssertionError, MilesError: names what is wrong.
    """
    make_prompts = prompts or (lambda: [group.prompt for group in grouped(canned_samples())])
    carried = Columns(columns)

    def group(prompt: Prompt, engine: KeyedEngine, recall: CancelHandle | None = None) -> list[Sample]:
        return asyncio.run(_group(generate, prompt, engine, samples, max_new_tokens, carried, recall,
                                  tokenizer))

    for prompt in make_prompts():
        before = sample_inputs.frozen(prompt)
        group_samples = group(prompt, KeyedEngine())
        for sample in group_samples:
            _whole(sample, prompt, carried)
        assert sample_inputs.frozen(prompt) == before, "it changes its prompt"
        indices = {sample.index for sample in group_samples}
        assert len(indices) == len(group_samples), "two samples of a group have one index"
        other = group(prompt, KeyedEngine(order=1))
        assert _frozen(group_samples) == _frozen(other), (
            "samples depend on when the engine answers; take keys from generation.key")
        if asks:
            _recalled(group, prompt)
            _blames_the_engine(group, prompt)


async def _group(generate: Generate, prompt: Prompt, engine: KeyedEngine, samples: int, most: int, columns: Columns,
                 recall: CancelHandle | None, tokenizer: Any) -> list[Sample]:
    recall = recall or CancelHandle()
    generation = Generation(
        engine=cast("Engine", engine), sampling=SamplingParams(max_new_tokens=most), samples=samples,
        key=lambda index, turn: rng.key(0, "contract", prompt.uid, index, turn),
        decode=lambda ids, skip: bytes(token for token in ids if token < 128).decode(), timeout=PATIENCE,
        columns=columns, recall=recall, tokenizer=tokenizer)
    work = asyncio.ensure_future(attended(generate(prompt, generation), generation, "the generator"))
    if engine.hangs:
        while not engine.waiting and not work.done():
            await asyncio.sleep(0.001)
        recall.cancelled = True
        await engine.abort(list(recall.ids))
    try:
        async with asyncio.timeout(PATIENCE):
            answered = await work
    except TimeoutError:
        raise AssertionError(f"a group takes more than {PATIENCE:g} s") from None
    assert isinstance(answered, list) and answered and all(isinstance(sample, Sample) for sample in answered), (
        f"a list of samples comes back, at least one, not {answered!r}")
    return answered


def _whole(sample: Sample, prompt: Prompt, columns: Columns) -> None:
    assert sample.prompt == prompt, f"{sample.name} is of another prompt"
    columns.check(sample)
    start = len(prompt.token_ids)
    assert sample.tokens[:start].tolist() == list(prompt.token_ids), f"{sample.name} does not begin with its prompt"
    assert len(sample.tokens) == start + sample.response_length, f"{sample.name}: response_length is not what it has"
    assert sample.status.finished, f"{sample.name} ended as {sample.status}, and it was not called back"
    assert set(np.unique(sample.columns["loss_mask"])) <= {0, 1}, f"{sample.name} has masks other than 0 and 1"


def _frozen(answered: Sequence[Sample]) -> list[object]:
    return [sample_inputs.frozen((sample.index, sample.columns, sample.text, sample.status)) for sample in answered]


def _recalled(group: Callable[..., Any], prompt: Prompt) -> None:
    """A group that is called back ends at once, its samples aborted; the engine is not asked any more."""
    engine, recall = KeyedEngine(hangs=True), CancelHandle()
    group_samples = group(prompt, engine, recall)
    assert any(sample.status is Status.ABORTED for sample in group_samples), "called back, no sample of it is aborted"
    assert not recall.ids, f"requests are left under way: {recall.ids}; ask by `call_engine`"


def _blames_the_engine(group: Callable[..., Any], prompt: Prompt) -> None:
    """The engine's error is the group's: no sample is made of a failure."""
    try:
        group(prompt, KeyedEngine(fails=True))
    except (sample_inputs.Planted, MilesError, ExceptionGroup):
        return
    raise AssertionError("the engine failed, and samples came back; let its error out")
