"""Generate functions of Miles: they ask the engine as if it were a server, and leave what they drew in a sample.

The address in `args` is nobody's: `post` knows it and hands the request to the run's engine, whichever that is. So the
draws have their keys, the calls their bounds, and every token its weight version.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from miles_compat import sample as samples
from miles_compat.args import HOST
from miles_compat.paths import arguments
from miles_core.errors import HookError
from miles_core.types import Prompt, Sample, Status

if TYPE_CHECKING:
    import numpy as np

    from miles_compat.args import Args
    from miles_core.stages.rollout import Generation, Response

WHO = "custom_generate_function_path"
TAKEN = frozenset({"temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "skip_special_tokens",
                   "ignore_eos", "min_new_tokens"})
LEFT = frozenset({"no_stop_trim", "spaces_between_special_tokens", "sampling_seed", "n"})
"""Sampling parameters that are what the core does anyway, or its own business."""


@dataclass
class GenerateState:
    """What a generate function finds beside its sample.

    Args:
        args: the run's options.
        tokenizer: the checkpoint's; loaded when it is first asked for.
    """

    args: Args
    aborted: bool = False
    processor: None = None

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's."""
        return self.args.tokenizer


@dataclass
class GenerateFnInput:
    """What a generate function is called with in Miles's newer form."""

    state: GenerateState
    sample: samples.Sample
    sampling_params: dict[str, Any]
    evaluation: bool = False

    @property
    def args(self) -> Args:
        """The run's options."""
        return self.state.args


@dataclass
class GenerateFnOutput:
    """What it answers: one sample, or those that one execution split into."""

    samples: samples.Sample | list[samples.Sample]


@dataclass
class Session:
    """One execution of a generate function.

    Args:
        context: tokens that the model can hold.
        drawn: the engine's answers, in the order in which they came.
    """

    args: Args
    prompt: Prompt
    index: int
    generation: Generation
    context: int
    turns: int = 0
    drawn: list[Response] = field(default_factory=list)

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """SGLang's /generate: token ids, or text, to an answer of SGLang's form.

        Raises:
            HookError: neither, or a sampling parameter that is not known.
            EngineError: the engine failed.
        """
        from miles_core.stages.rollout import Request, call_engine

        ids = payload.get("input_ids")
        if ids is None:
            text = payload.get("text")
            if not isinstance(text, str):
                raise HookError("a request needs input_ids or text", got=", ".join(payload), who=WHO,
                                fix="pass the token ids so far as input_ids")
            ids = self.args.tokenizer(text, add_special_tokens=False)["input_ids"]
        turn, self.turns = self.turns, self.turns + 1
        sampling = replace(self.generation.sampling, **_sampling(payload.get("sampling_params") or {}))
        room = min(sampling.max_new_tokens, self.context - len(ids))
        if room <= 0:
            return _answer("", [], [], "length", len(ids), self.generation.engine.version)
        request = Request(f"{self.prompt.stream}-{self.prompt.uid}-{self.index}-{turn}", tuple(map(int, ids)),
                          replace(sampling, max_new_tokens=room), self.generation.key(self.index, turn))
        request = self.generation.on_request(request)
        response = await call_engine(self.generation, request)
        self.drawn.append(response)
        return _answer(response.text, response.output_ids.tolist(), response.log_probs.tolist(),
                       response.finish_reason, len(ids), int(response.versions[-1]) if len(response.versions) else 0)


CURRENT: ContextVar[Session] = ContextVar("the execution of a generate function that is under way")


async def post(url: str, payload: Mapping[str, Any], max_retries: int = 1, **kwargs: object) -> Any:
    """Miles's `post`: JSON to a URL, JSON back. The engine's address leads to the engine, any other to that server.

    Raises:
        HookError: a request to the engine outside of a generate function, or another than /generate.
    """
    where, session = urlsplit(url), CURRENT.get(None)
    if where.hostname != HOST:
        return await _elsewhere(url, payload)
    if session is None or where.path != "/generate":
        raise HookError("the engine answers /generate, to a generate function", got=where.path or url, who="post",
                        fix="name the function with --custom-generate-function-path; everything else is the core's")
    return await session.generate(payload)


async def group(function: Callable[..., Any], args: Args, prompt: Prompt, generation: Generation) -> list[Sample]:
    """The samples of a group, each by an execution of its own, all of them at once.

    Raises:
        HookError: the function answers with no sample, or trains on tokens that the engine did not draw.
    """
    calls = [asyncio.ensure_future(_one(function, args, prompt, index, generation))
             for index in range(generation.samples)]
    try:
        found = [execution for execution in await asyncio.gather(*calls)]
    finally:
        for call in calls:
            call.cancel()  # the others, when one failed
    split = any(len(execution) > 1 for execution in found)
    flat = [(number, sample) for number, execution in enumerate(found) for sample in execution]
    for index, (number, sample) in enumerate(flat):
        sample.index, sample.rollout = index, number if split else None
    return [sample for _, sample in flat]


async def _one(function: Callable[..., Any], args: Args, prompt: Prompt, index: int,
               generation: Generation) -> list[Sample]:
    session = Session(args, prompt, index, generation, args.rollout_max_context_len)
    token = CURRENT.set(session)  # of this task alone
    try:
        sample = samples.asked(prompt, index, generation.samples)
        answer = await _called(function, args, sample, generation, prompt.stream != "train")
    finally:
        CURRENT.reset(token)
    answer = answer.samples if hasattr(answer, "samples") else answer
    found: list[Any] = answer if isinstance(answer, list) else [answer]
    if not found or not all(hasattr(one, "tokens") and hasattr(one, "response_length") for one in found):
        raise HookError("the function should return a sample, or a list of samples", got=repr(answer)[:100], who=WHO,
                        fix="return the sample that it was given, with tokens, response, response_length and status")
    return [_drawn(one, prompt, session) for one in found]


async def _called(function: Callable[..., Any], args: Args, sample: samples.Sample, generation: Generation,
                  evaluation: bool) -> object:
    sampling = generation.sampling
    params = {name: getattr(sampling, name) for name in sorted(TAKEN)}
    params |= {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids), "no_stop_trim": True,
               "spaces_between_special_tokens": False}
    names = [one.name for one in arguments(function)]
    if inspect.isclass(function):
        function = cast("Callable[..., Any]", function())
    if len(names) < 3 or names[0] == "input":
        return await function(GenerateFnInput(GenerateState(args), sample, params, evaluation))
    return await function(args, sample, params, **({"evaluation": evaluation} if "evaluation" in names else {}))


def _drawn(one: samples.Sample, prompt: Prompt, session: Session) -> Sample:
    """The core's sample of what a function left in Miles's."""
    import numpy as np

    size, name = int(one.response_length), f"prompt {prompt.uid}, sample {session.index}"
    tokens = np.array(one.tokens, np.int32)
    mask = np.ones(size, np.uint8) if one.loss_mask is None else np.array(one.loss_mask, np.uint8)
    status = Status(getattr(one.status, "value", one.status))
    if not 0 <= size <= len(tokens) or len(mask) != size:
        raise HookError(f"{name} has parts that do not fit", who=WHO,
                        got=f"{len(tokens)} tokens, response_length {size}, {len(mask)} entries in loss_mask",
                        fix="tokens are prompt and response; loss_mask has one entry per response token")
    if status is Status.PENDING:
        raise HookError(f"{name} was left pending", who=WHO, fix="set sample.status: completed, truncated or aborted")
    if one.remove_sample:
        mask[:] = 0
    log_probs, versions = _origin(tokens[len(tokens) - size:], mask, session, name)
    columns: dict[str, np.ndarray] = {
        "tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs, "versions": versions,
    }
    metadata = {key: value for key, value in one.metadata.items()
                if key not in prompt.metadata or prompt.metadata[key] is not value}
    found = Sample(prompt, session.index, columns, size, one.response, status, metadata=metadata,
                   reward=cast("float | None", one.reward))  # of a dict the scorers make a number
    if len(session.drawn) == 1 and status.finished and size == len(session.drawn[0].output_ids):
        found = session.generation.on_response(found, session.drawn[0])  # of more turns than one it could not tell
    return found


def _origin(response: np.ndarray, mask: np.ndarray, session: Session, name: str) -> tuple[np.ndarray, np.ndarray]:
    """[R] log-probs and [R] versions: of the engine's answers for tokens that are trained on; others are the function's
    own, and have the version of the token before them.

    Raises:
        HookError: a run of trained tokens that is not part of what the engine drew, in its order.
    """
    import numpy as np

    drawn = session.drawn
    empty = np.zeros(0, np.int32)
    ids = np.concatenate([empty, *(one.output_ids for one in drawn)])
    from_engine = np.concatenate([empty.astype(np.float32), *(one.log_probs for one in drawn)])
    version_of = np.concatenate([empty, *(one.versions for one in drawn)])
    first = int(version_of[0]) if len(version_of) else session.generation.engine.version
    log_probs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int))).reshape(-1, 2)
    at = 0
    for start, stop in edges:
        run = response[start:stop]
        there = next((i for i in range(at, len(ids) - len(run) + 1) if np.array_equal(ids[i:i + len(run)], run)), None)
        if there is None:
            raise HookError(f"{name} trains on tokens that the engine did not draw", who=WHO,
                            got=f"response tokens {start} to {stop - 1}",
                            fix="append output_ids as they come, do not tokenise text again, and give tokens of others "
                            "the loss mask 0")
        at = there + len(run)
        log_probs[start:stop], versions[start:stop] = (x[there:at] for x in (from_engine, version_of))
    before = first
    for place, version in enumerate(versions):
        versions[place] = before = before if version < 0 else int(version)
    return log_probs, versions


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        HookError: a parameter that nothing here stands for.
    """
    if unknown := given.keys() - TAKEN - LEFT:
        raise HookError("a request has a sampling parameter that is not known here", got=", ".join(sorted(unknown)),
                        who=WHO, fix=f"leave it out; there are {', '.join(sorted(TAKEN))}")
    found = {name: value for name, value in given.items() if name in TAKEN and value is not None}
    for name in ("stop", "stop_token_ids"):
        if name in found:
            found[name] = (found[name],) if isinstance(found[name], str | int) else tuple(found[name])
    return found


def _answer(text: str, ids: Sequence[int], log_probs: Sequence[float], reason: str, prompt: int,
            version: int) -> dict[str, Any]:
    pairs = [[value, token, None] for value, token in zip(log_probs, ids, strict=True)]
    return {"text": text, "output_ids": list(ids),
            "meta_info": {"finish_reason": {"type": reason}, "prompt_tokens": prompt, "completion_tokens": len(ids),
                          "cached_tokens": 0, "weight_version": str(version), "output_token_logprobs": pairs}}


async def _elsewhere(url: str, payload: Mapping[str, Any]) -> Any:
    import json
    from urllib.request import Request, urlopen

    from miles_core.hosts import in_daemon_thread

    def ask() -> Any:
        request = Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            return json.load(answer)

    return await in_daemon_thread(ask)
