"""Stage 2, rollout: a prompt and an engine become samples.

An engine turns token ids into token ids (Engine). A generator turns one prompt into the samples of its group with as
many engine calls as it likes; `single_turn` is the default.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from miles_core.columns import Columns, joined
from miles_core.errors import EngineError, RolloutError
from miles_core.types import CancelHandle, Prompt, Sample, Status
from miles_core.waits import within

if TYPE_CHECKING:
    import torch

PauseMode = Literal["abort", "retract", "in_place"]

ROUNDING = 1e-3
"""A log-prob of a certain token may come out this much above 0."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Log-probs are always those of the temperature-scaled distribution before top-p and top-k cut it.

    Args:
        temperature: 0 means greedy; greedy log-probs are those at temperature 1.
        top_k: -1 means off, which 0 and less become.
        max_new_tokens: upper bound on response tokens.
        stop: strings that end a response once they appear in its text; they stay in it.
        stop_token_ids: ids that end a response, beside the tokenizer's end-of-sequence id; they stay in it.
        ignore_eos: go on after the end-of-sequence id and `stop_token_ids` (benchmarks with forced lengths).
        min_new_tokens: stop ids are not drawn before this many tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = False
    ignore_eos: bool = False
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "top_k", self.top_k if self.top_k > 0 else -1)


@dataclass(frozen=True, slots=True)
class Request:
    """One call of an engine.

    Args:
        id: unique among the requests in flight; abort takes it.
        input_ids: the whole context; a resumed generation passes its response so far as well.
        resumed: that response, the end of `input_ids`: a stop string may have begun in it.
        key: 64-bit key of this request's random draws. Draw i depends on (key, i) alone, so neither timing nor
            batching changes a token.
        want: further data to return, such as "routed_experts".
        adapter: name of an adapter that the engine has been given and applies to this request.
        images: files, in the order of their placeholders in `input_ids`, which are expanded already.
        unexpanded: with images, `input_ids` with one placeholder for each, for an engine that expands them itself.
    """

    id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    key: int
    want: frozenset[str] = frozenset()
    adapter: str | None = None
    images: tuple[bytes, ...] = ()
    unexpanded: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()


@dataclass(slots=True)
class Response:
    """What an engine answers; N new tokens.

    Args:
        output_ids: [N] int32, final: never tokenised again.
        log_probs: [N] float32 of each drawn token.
        versions: [N] int32, weight version that each token was drawn from.
        finish_reason: "stop" where its end is one, at the limit too; "length"; "abort" with what was drawn until then.
        extra: what `want` asked for, e.g. "routed_experts": [P+N-1, layers, topk], integers; where a server computed
            some of it again after the token was drawn, "computed_again": [P+N-1] int8, 1, or 2 by newer weights.
        figures: numbers about the call by metric name, e.g. "spec_accept_rate"; the rollout reports their means.
    """

    output_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    text: str = ""
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


def check_request(request: Request, vocabulary: int, experts: bool, engine: str) -> None:
    """What no engine can answer.

    Args:
        vocabulary: token ids are below it.
        experts: the model has any.
        engine: who asks, for the error.

    Raises:
        EngineError: token ids outside the vocabulary, or an output that the engine does not have.
    """
    who = f"request {request.id}"
    if not 0 <= min(request.input_ids) <= max(request.input_ids) < vocabulary:
        raise EngineError(f"{who} has token ids outside the vocabulary of {vocabulary}", code="token-ids-out-of-range",
                          got=f"{min(request.input_ids)} to {max(request.input_ids)}",
                          fix="use the checkpoint's tokenizer")
    if unknown := request.want - {"routed_experts"}:
        raise EngineError(f"{who} asks for outputs that {engine} does not have", code="engine-feature-missing",
                          got=sorted(unknown), fix="ask only for routed_experts")
    if request.want and not experts:
        raise EngineError(f"{who} asks for routed_experts, which {engine} does not return for this model",
                          code="routed-experts-unavailable", fix="use a mixture-of-experts model with --engine sglang")


class Engine(Protocol):
    """What every engine can do. All waits inside are bounded by the caller.

    Args:
        version: of the weights that serve; 0 before the first update.
        path: what it runs on, in a few words for the log.
    """

    @property
    def version(self) -> int: ...

    @property
    def path(self) -> str: ...

    async def start(self) -> None:
        """Get ready to serve; weights may be anything until the first update."""

    async def generate(self, request: Request) -> Response:
        """Sample one continuation. Many calls may be in flight.

        Raises:
            EngineError: the context leaves no room, or the engine failed.
        """

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """End these requests (all when None); their generate calls return with finish_reason "abort"."""

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Draw no further token until `resume`. abort: end all; retract: recompute caches on resume; in_place: keep."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace all weights by this complete stream of Hugging Face names; atomic: all of them or none.

        Raises:
            EngineError: unknown, missing or misshapen tensors, or a version that is not newer.
        """

    async def release(self, tags: Sequence[str]) -> None:
        """Give the device memory of these ("weights", "kv_cache", "cuda_graph") to others; no request may be in flight.

        Released weights come back empty: an update has to follow. Engines without device memory do nothing.
        """

    async def occupy(self, tags: Sequence[str]) -> None:
        """Take released memory again."""

    async def stop(self) -> None:
        """End everything; requests in flight return as aborted."""


@runtime_checkable
class ServerEngine(Engine, Protocol):
    """An engine whose servers may be lost and come back; who builds the run sets `recover` and `event`.

    Args:
        recover: to be called while a live server lags behind the others; the run's weight sync brings it up to date.
        event: to be called with a kind and fields, for the record: what became of servers and requests.
        servers: all of them, alive or not; what one has is between the engine and its weight syncs.
    """

    recover: Callable[[], Awaitable[None]]
    event: Callable[..., None]
    servers: Sequence[Any]

    def stale(self, version: int) -> Sequence[Any]:
        """Servers that live and do not serve this version."""

    async def confirm(self, servers: Sequence[Any], version: int) -> None:
        """Take these servers into use with these weights, once they say that they have them.

        Raises:
            SyncError: a server has another version, or cannot be asked; it is not used.
        """


@dataclass(frozen=True, slots=True)
class Generation:
    """What a generator may use.

    Args:
        engine: where tokens come from.
        sampling: parameters of this dataset or run.
        samples: how many samples a group has.
        key: (sample index, turn) -> key of its draws, already bound to run seed, stream and prompt.
        decode: token ids -> text.
        tokenizer: the checkpoint's, of transformers: chat templates, token ids of text.
        timeout: seconds that one engine call may take, and all else between two of them.
        begun: samples of this group that were called back before; a generator that resumes goes on from them.
        recall: what ends the group's requests early; `call_engine` sees to it.
        columns: of the run.
        vocabulary: token ids are below it; None if it is unknown.
        on_request, on_response: the chains of generate_request, for this prompt or one in its place, generate_response.
        hooks: all that are bound; a generator may call those that plugins declare. None outside of a run.
    """

    engine: Engine
    sampling: SamplingParams
    samples: int
    key: Callable[[int, int], int]
    decode: Callable[[Iterable[int], bool], str]
    timeout: float
    begun: Sequence[Sample] = ()
    recall: CancelHandle = field(default_factory=CancelHandle)
    columns: Columns = field(default_factory=Columns)
    vocabulary: int | None = None
    tokenizer: Any = None
    on_request: Callable[..., Request] = lambda request, prompt=None: request
    on_response: Callable[[Sample, Response], Sample] = lambda sample, response: sample
    hooks: Any = None


async def single_turn(prompt: Prompt, generation: Generation) -> list[Sample]:
    """Sample every answer with one engine call, all of them in flight at once.

    Answers that were called back before go on with the tokens that they have; finished ones stay as they are.

    Raises:
        EngineError: a call failed, or took longer than `generation.timeout` seconds.
    """
    calls = [asyncio.ensure_future(_one_turn(prompt, index, generation)) for index in range(generation.samples)]
    try:
        return list(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()  # the others, when one failed


async def _one_turn(prompt: Prompt, index: int, generation: Generation) -> Sample:
    partial = next((sample for sample in generation.begun if sample.index == index), None)
    if partial is not None and partial.status is not Status.ABORTED:
        return partial
    begun = () if partial is None else tuple(partial.tokens[len(prompt.token_ids):].tolist())
    drawn, sampling = len(begun), generation.sampling
    if partial is not None and drawn and drawn >= sampling.max_new_tokens:
        return replace(partial, status=Status.TRUNCATED)
    request = generation.on_request(Request(
        id=f"{prompt.stream}-{prompt.uid}-{index}", input_ids=prompt.token_ids + begun, resumed=begun,
        sampling=replace(sampling, max_new_tokens=sampling.max_new_tokens - drawn,
                         min_new_tokens=max(0, sampling.min_new_tokens - drawn)),
        key=generation.key(index, 0 if partial is None else partial.metadata["spans"])))
    response = await call_engine(generation, request)
    sample = to_sample(prompt, index, request, response)
    if sample.response_length or sample.status is not Status.ABORTED:  # else there is nothing to read from it
        sample = generation.on_response(sample, response)
    if partial is not None:
        sample = joined(partial, sample, generation.columns)
        sample.text = generation.decode(sample.tokens[len(prompt.token_ids):].tolist(), sampling.skip_special_tokens)
    if sample.status is Status.ABORTED:
        sample.metadata["spans"] = 1 + (0 if partial is None else partial.metadata["spans"])
    return sample


async def attended(work: Awaitable[list[Sample]], generation: Generation, who: str) -> list[Sample]:
    """What a generator makes, with a bound on each stretch in which it waits for something else than the engine.

    Raises:
        RolloutError: nothing came of it, and no engine call, for `generation.timeout` seconds.
    """
    def late() -> RolloutError:
        return RolloutError(f"the generator neither finished nor called the engine for {generation.timeout:g} s",
                            code="generator-stalled", who=who,
                            fix="check what it waits for (a tool, another server), or raise --rollout-timeout")

    async with within(generation.timeout, late) as generation.recall.idle:
        try:
            return await work
        finally:
            generation.recall.idle = None


async def call_engine(generation: Generation, request: Request) -> Response:
    """`engine.generate` with the bounded wait and the checks that every answer has to pass.

    A group that was called back gets an empty answer, finish_reason "abort", without the engine being asked.

    Raises:
        EngineError: too slow, or an answer that `check_response` refuses.
    """
    def late() -> EngineError:
        return EngineError(f"the engine did not answer request {request.id} within {generation.timeout:g} s",
                           code="engine-request-timeout", fix="look at the engine's log, or raise --rollout-timeout")

    engine, recall, oldest = generation.engine, generation.recall, generation.engine.version
    if recall.cancelled:
        return Response(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
    try:
        recall.begins(request.id)
        async with within(generation.timeout, late):
            response = await engine.generate(request)
    finally:
        recall.ends(request.id, generation.timeout)
    check_response(request, response, generation.vocabulary, oldest, engine.version)
    return response


def check_response(request: Request, response: Response, vocabulary: int | None, oldest: int, newest: int) -> None:
    """Whether an answer can be trained on.

    Args:
        vocabulary: token ids are below it; None if it is unknown.
        oldest, newest: weight versions that the engine had when it was asked and when it answered.

    Raises:
        EngineError: parts of different lengths, an empty answer that was not aborted, ids outside the vocabulary,
            invalid log-probs, versions that the engine did not have meanwhile or that go backwards.
    """
    if problem := _unfit(response, vocabulary, oldest, newest):
        raise EngineError(f"the engine's answer to request {request.id} {problem[0]}", code="engine-answer-invalid",
                          got=problem[1], fix="look at the engine's log; such an answer must not be trained on")


def _unfit(response: Response, vocabulary: int | None, oldest: int, newest: int) -> tuple[str, object] | None:
    """What is wrong with an answer, and what was got."""
    count, reason = len(response.output_ids), response.finish_reason
    if not count == len(response.log_probs) == len(response.versions):
        return "has parts of different lengths", (f"{count} tokens, {len(response.log_probs)} log-probs, "
                                                  f"{len(response.versions)} versions")
    if reason not in ("stop", "length", "abort"):
        return "has an unknown finish reason", repr(reason)
    if not count:  # a stop token alone is one
        return None if reason == "abort" else (f"ended by {reason!r} and is empty", "no token")
    ids, log_probs, versions = (np.asarray(x) for x in (response.output_ids, response.log_probs, response.versions))
    if ids.min() < 0 or vocabulary is not None and ids.max() >= vocabulary:
        return f"has token ids outside the vocabulary of {vocabulary}", f"{ids.min()} to {ids.max()}"
    if not np.isfinite(log_probs).all():
        return "has log-probs that are not finite", log_probs[~np.isfinite(log_probs)][0]
    if log_probs.max() > ROUNDING:
        return "has log-probs above 0", log_probs.max()
    if (np.diff(versions) < 0).any():
        return "has weight versions that go backwards", versions.tolist()
    if versions[0] < oldest or versions[-1] > newest:
        expected = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        return f"is of weight versions that the engine did not have, but {expected}", f"{versions[0]} to {versions[-1]}"
    return None


def to_sample(prompt: Prompt, index: int, request: Request, response: Response) -> Sample:
    """The sample that one engine answer makes; its columns are the core's."""
    status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(response.finish_reason, Status.ABORTED)
    return Sample(
        prompt=prompt, index=index, response_length=len(response.output_ids), text=response.text, status=status,
        metadata={"figures": response.figures} if response.figures else {}, columns={
            "tokens": np.concatenate([np.asarray(ids, np.int32) for ids in (request.input_ids, response.output_ids)]),
            "loss_mask": np.ones(len(response.output_ids), np.uint8),
            "rollout_log_probs": np.asarray(response.log_probs, np.float32),
            "versions": np.asarray(response.versions, np.int32),
        })
