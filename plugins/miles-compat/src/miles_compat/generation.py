"""Generate functions of Miles: they ask the engine through a session, and leave what they drew in a sample."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from miles_compat import sample as samples
from miles_compat.paths import arguments
from miles_compat.rollout_types import GenerateFnInput, GenerateState
from miles_compat.session import CURRENT, TAKEN, WHO, Drawn, Session
from miles_core.errors import HookError
from miles_core.types import Prompt, Sample, Status

if TYPE_CHECKING:
    import numpy as np

    from miles_compat.args import Args
    from miles_core.stages.rollout import Generation


async def _as_it_is(sample: Any) -> Any:
    return sample


async def group(function: Callable[..., Any], args: Args, prompt: Prompt, generation: Generation,
                hooks: Callable[[Any], Awaitable[Any]] = _as_it_is) -> list[Sample]:
    """The samples of a group, each by an execution of its own, all of them at once.

    Args:
        hooks: what becomes of each sample before it is scored.

    Raises:
        HookError: the function answers with no sample, or trains on tokens that the engine did not draw.
    """
    calls = [asyncio.ensure_future(_one(function, args, prompt, index, generation, hooks))
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
               generation: Generation, hooks: Callable[[Any], Awaitable[Any]]) -> list[Sample]:
    turns = itertools.count()

    def name(ids: Sequence[int]) -> tuple[str, int]:
        turn = next(turns)
        return f"{prompt.stream}-{prompt.uid}-{index}-{turn}", generation.key(index, turn)

    session = Session(args, generation, name, args.rollout_max_context_len, prompt, index)
    token = CURRENT.set(session)  # of this task alone
    try:
        sample = samples.asked(prompt, index, generation.samples)
        answer = await _called(function, copy.copy(args), sample, generation, prompt.stream != "train")
    finally:
        CURRENT.reset(token)
    answer = answer.samples if hasattr(answer, "samples") else answer
    found: list[Any] = answer if isinstance(answer, list) else [answer]
    if not found or not all(hasattr(one, "tokens") and hasattr(one, "response_length") for one in found):
        raise HookError("the function should return a sample, or a list of samples", code="generate-function-return",
                        got=repr(answer)[:100], who=WHO,
                        fix="return the sample that it was given, with tokens, response, response_length and status")
    found = [await hooks(one) for one in found]
    made = [drawn(one, prompt, index, session.drawn, session) for one in found]
    answers = [one.response for one in session.drawn]
    if len(answers) == len(made) == 1 and made[0].status.finished:
        whole = made[0].response_length == len(answers[0].output_ids)
        made = [generation.on_response(made[0], answers[0])] if whole else made  # of more it could not tell
    return made


async def _called(function: Callable[..., Any], args: Args, sample: samples.Sample, generation: Generation,
                  evaluation: bool) -> object:
    params = asked_with(generation)
    names = [one.name for one in arguments(function)]
    if inspect.isclass(function):
        function = cast("Callable[..., Any]", function())
    if len(names) < 3 or names[0] == "input":
        return await function(GenerateFnInput(GenerateState(args), sample, params, evaluation))
    return await function(args, sample, params, **({"evaluation": evaluation} if "evaluation" in names else {}))


def asked_with(generation: Generation) -> dict[str, Any]:
    """A run's sampling parameters by SGLang's names."""
    sampling = generation.sampling
    params = {name: getattr(sampling, name) for name in sorted(TAKEN)}
    return params | {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids),
                     "no_stop_trim": True, "spaces_between_special_tokens": False}


def drawn(one: Any, prompt: Prompt, index: int, answers: Sequence[Drawn], session: Session) -> Sample:
    """The core's sample of what a function left in Miles's.

    Args:
        answers: of the engine, one after the other.

    Raises:
        HookError: parts that do not fit, or tokens that are trained on and that the engine did not draw.
    """
    import numpy as np

    size, name = int(one.response_length), f"prompt {prompt.uid}, sample {index}"
    tokens = np.array(one.tokens, np.int32)
    mask = np.ones(size, np.uint8) if one.loss_mask is None else np.array(one.loss_mask, np.uint8)
    status = Status(getattr(one.status, "value", one.status))
    if not 0 <= size <= len(tokens) or len(mask) != size:
        raise HookError(f"{name} has parts that do not fit", code="generate-function-parts", who=WHO,
                        got=f"{len(tokens)} tokens, response_length {size}, {len(mask)} entries in loss_mask",
                        fix="tokens are prompt and response; loss_mask has one entry per response token")
    if status is Status.PENDING:
        raise HookError(f"{name} was left pending", code="generate-function-left-pending", who=WHO,
                        fix="set sample.status: completed, truncated or aborted")
    if one.remove_sample:
        mask[:] = 0
    log_probs, versions = _origin(tokens, mask, answers, session, name)
    columns: dict[str, np.ndarray] = {
        "tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs, "versions": versions,
    }
    metadata = {key: value for key, value in one.metadata.items()
                if key not in prompt.metadata or prompt.metadata[key] is not value}
    return Sample(prompt, index, columns, size, one.response, status, metadata=metadata,
                  reward=reward_of(one, session.args))


def reward_of(one: Any, args: Args) -> float | None:
    """The reward that a function gave a sample; of a dict what --reward-key names. None: the scorers give it."""
    value = one.reward
    if isinstance(value, Mapping):
        key = args.reward_key
        if key not in value:
            raise HookError(f"a reward is a dict without {key!r}", got=", ".join(map(str, value)), who=WHO,
                            fix="name its reward with --reward-key", code="generate-function-reward-key")
        value = value[key]
    return None if value is None else float(value)


def _origin(tokens: np.ndarray, mask: np.ndarray, answers: Sequence[Drawn], session: Session,
            name: str) -> tuple[np.ndarray, np.ndarray]:
    """[R] log-probs and [R] versions: of the engine's answers for tokens that are trained on; others are the function's
    own, and have the version of the token before them.

    Raises:
        HookError: a run of trained tokens that is not part of what the engine drew, in its order.
    """
    import numpy as np

    responses, prompt = [one.response for one in answers], len(tokens) - len(mask)
    empty = np.zeros(0, np.int32)
    ids = np.concatenate([empty, *(one.output_ids for one in responses)])
    from_engine = np.concatenate([empty.astype(np.float32), *(one.log_probs for one in responses)])
    version_of = np.concatenate([empty, *(one.versions for one in responses)])
    begins = np.cumsum([0, *(len(one.output_ids) for one in responses)])
    first = int(version_of[0]) if len(version_of) else session.generation.engine.version
    log_probs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int))).reshape(-1, 2)
    at = 0
    for start, stop in edges:
        run, before = tokens[prompt + start:prompt + stop], tuple(tokens[:prompt + start].tolist())
        of_context = (int(begin) for begin, one in zip(begins, answers) if one.input_ids == before)
        places = itertools.chain(of_context, range(at, len(ids) - len(run) + 1))
        there = next((i for i in places if np.array_equal(ids[i:i + len(run)], run)), None)
        if there is None:
            raise HookError(f"{name} trains on tokens that the engine did not draw", who=WHO,
                            got=f"response tokens {start} to {stop - 1}", code="generate-function-trains-prompt",
                            fix="append output_ids as they come, do not tokenise text again, and give tokens of others "
                            "the loss mask 0")
        at = there + len(run)
        log_probs[start:stop], versions[start:stop] = (x[there:at] for x in (from_engine, version_of))
    newest = first
    for place, version in enumerate(versions):
        versions[place] = newest = newest if version < 0 else int(version)
    return log_probs, versions
