"""Generate functions of Miles: they ask the engine through a session, and leave what they drew in a sample."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from miles_compat import sample as samples
from miles_compat.paths import arguments, ready
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
        return numbered(await asyncio.gather(*calls))
    finally:
        for call in calls:
            call.cancel()  # the others, when one failed


def numbered(executions: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of a group. Those of an execution are one rollout, and those that a function gave one rollout_id."""
    keys = [("execution", number) if len(execution) > 1 or one.rollout is None else ("id", one.rollout)
            for number, execution in enumerate(executions) for one in execution]
    numbers, found = {key: number for number, key in enumerate(dict.fromkeys(keys))}, [*itertools.chain(*executions)]
    for index, (sample, key) in enumerate(zip(found, keys, strict=True)):
        sample.index, sample.rollout = index, numbers[key] if len(numbers) < len(keys) else None
    return found


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
    return [drawn(one, prompt, index, session.drawn, session) for one in found]


async def _called(function: Callable[..., Any], args: Args, sample: samples.Sample, generation: Generation,
                  evaluation: bool) -> object:
    params = asked_with(generation)
    names = [one.name for one in arguments(function)]
    function = ready(function)
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
    name, generation = f"prompt {prompt.uid}, sample {index}", session.generation
    status = _status(one.status)
    if status is None or status is Status.PENDING:
        raise HookError(f"{name} was left pending", code="generate-function-left-pending", who=WHO, got=one.status,
                        fix="set sample.status: completed, truncated or aborted")
    tokens, mask = _parts(one, name, generation.vocabulary, prompt=int(status.finished))
    if one.remove_sample:
        mask[:] = 0
    if session.args.debug_train_only:
        log_probs, versions = _written(one, len(mask), generation)
    else:
        log_probs, versions = _origin(tokens, mask, answers, generation, name, trains=prompt.stream == "train")
    columns: dict[str, np.ndarray] = {
        "tokens": tokens, "loss_mask": mask, "rollout_log_probs": log_probs, "versions": versions,
    }
    metadata = samples.added(one.metadata, prompt.metadata)
    return _read(Sample(prompt, index, columns, len(mask), one.response, status, metadata=metadata,
                        reward=reward_of(one, session.args), rollout=getattr(one, "rollout_id", None)),
                 answers, generation)


def _read(sample: Sample, answers: Sequence[Drawn], generation: Generation) -> Sample:
    """With what plugins read from the answer that a sample ends with; of tokens behind it no answer could tell."""
    tokens = tuple(sample.tokens.tolist())
    for answer in reversed(answers if sample.status.finished else ()):
        if tokens == (*answer.input_ids, *answer.response.output_ids.tolist()):
            if answer.columns is None:
                return generation.on_response(sample, answer.response)
            sample.columns |= answer.columns
            break
    return sample


def _parts(one: Any, name: str, vocabulary: int | None, *, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, loss mask) of a sample whose prompt has at least so many tokens."""
    import numpy as np

    size, values = one.response_length, one.loss_mask
    try:
        tokens = np.array(one.tokens, np.int32)
        mask = np.ones(size, np.uint8) if values is None else samples.mask_of(values, size)
        fits = mask is not None and tokens.ndim == 1 and 0 <= size <= len(tokens) - prompt
        known = tokens.min(initial=0) >= 0 and (vocabulary is None or tokens.max(initial=0) < vocabulary)
    except (TypeError, ValueError, OverflowError):
        fits = known = False
    if not fits:
        raise HookError(f"{name} has parts that do not fit", code="generate-function-parts", who=WHO,
                        got=f"{_count(one.tokens)} tokens, response_length {size}, "
                        f"{_count(values)} entries in loss_mask {repr(values)[:60]}",
                        fix="tokens are the prompt's and the response's ids; loss_mask has a 0 or a 1 for each "
                        "response token")
    if not known:
        raise HookError(f"{name} has token ids outside the vocabulary", code="generate-function-vocabulary", who=WHO,
                        got=f"{tokens.min()} to {tokens.max()}, of {vocabulary}",
                        fix="tokenise observations with the checkpoint's tokenizer, args.tokenizer")
    return tokens, cast("np.ndarray", mask)


def _count(values: Any) -> object:
    return len(values) if hasattr(values, "__len__") else values


def _status(value: Any) -> Status | None:
    try:
        return Status(getattr(value, "value", value))
    except ValueError:
        return None


def reward_of(one: Any, args: Args) -> float | None:
    """The reward that a function gave a sample; of a dict what --reward-key names. None: the scorers give it."""
    value = one.reward
    if isinstance(value, Mapping):
        key = args.reward_key
        if key not in value:
            raise HookError(f"a reward is a dict without {key!r}", got=", ".join(map(str, value)), who=WHO,
                            fix="name its reward with --reward-key", code="generate-function-reward-key")
        value = value[key]
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise HookError("a reward is no number", got=repr(value)[:100], who=WHO, code="generate-function-reward",
                        fix="set sample.reward to a float, or to a dict that has one") from None


def _written(one: Any, size: int, generation: Generation) -> tuple[np.ndarray, np.ndarray]:
    """[R] log-probs and [R] versions of a response that the function itself has: of a run without an engine. Log-probs
    that it does not give are 0, which no metric takes for an engine's."""
    import numpy as np

    log_probs = np.zeros(size) if one.rollout_log_probs is None else one.rollout_log_probs
    return np.array(log_probs, np.float32), np.full(size, generation.engine.version, np.int32)


def _origin(tokens: np.ndarray, mask: np.ndarray, answers: Sequence[Drawn], generation: Generation, name: str, *,
            trains: bool) -> tuple[np.ndarray, np.ndarray]:
    """[R] log-probs and [R] versions: of the engine's answers for tokens that are trained on; others are the function's
    own, and have the version of the token before them.

    Args:
        trains: log-probs have to be those that the trainer computes, at the run's temperature.

    Raises:
        HookError: a run of trained tokens that is not part of what the engine drew, in its order.
    """
    import numpy as np

    responses, prompt = [one.response for one in answers], len(tokens) - len(mask)
    empty = np.zeros(0, np.int32)
    ids = np.concatenate([empty, *(one.output_ids for one in responses)])
    from_engine = np.concatenate([empty.astype(np.float32), *(one.log_probs for one in responses)])
    version_of = np.concatenate([empty, *(one.versions for one in responses)])
    hot = np.concatenate([np.zeros(0), *(np.full(len(one.response.output_ids), one.temperature or 1.0)
                                         for one in answers)])
    first = int(version_of[0]) if len(version_of) else generation.engine.version
    log_probs, versions = np.zeros(len(mask), np.float32), np.full(len(mask), -1, np.int32)
    continued = _continued(tokens, answers)
    at = 0
    for opening, stop in samples.runs_of(mask):
        start = opening
        while start < stop:
            places = range(at, len(ids) if start == opening else at + 1)
            begin, size = _piece(tokens, prompt + start, prompt + stop, continued, ids, places)
            if not size:
                raise HookError(f"{name} trains on tokens that the engine did not draw", who=WHO,
                                got=f"response tokens {start} to {stop - 1}", code="generate-function-trains-prompt",
                                fix="append output_ids as they come, do not tokenise text again, and give tokens of "
                                "others the loss mask 0")
            at = begin + size
            if trains and (other := set(hot[begin:at].tolist()) - {expected := generation.sampling.temperature or 1.0}):
                raise HookError(f"{name} trains on tokens of another temperature than the run's", who=WHO,
                                got=f"{other.pop():g}, response tokens {start} to {start + size - 1}",
                                code="generate-function-temperature",
                                fix=f"sample them at {expected:g}, write --rollout-temperature, or give them the loss "
                                "mask 0: the trainer's log-probs are those of the run's temperature")
            log_probs[start:start + size], versions[start:start + size] = from_engine[begin:at], version_of[begin:at]
            start += size
    newest = first
    for place, version in enumerate(versions):
        versions[place] = newest = newest if version < 0 else int(version)
    return log_probs, versions


def _continued(tokens: np.ndarray, answers: Sequence[Drawn]) -> list[tuple[int, int, int]]:
    """(where in the sample, where in all that was drawn, how many tokens) of answers that the sample goes on with."""
    import numpy as np

    pieces, begin = [], 0
    for one in answers:
        drawn, place = one.response.output_ids, len(one.input_ids)
        if place < len(tokens) and tuple(tokens[:place].tolist()) == one.input_ids:
            most = min(len(drawn), len(tokens) - place)
            differs = np.flatnonzero(drawn[:most] != tokens[place:place + most])
            pieces.append((place, begin, int(differs[0]) if len(differs) else most))
        begin += len(drawn)
    return pieces


def _piece(tokens: np.ndarray, start: int, stop: int, continued: Sequence[tuple[int, int, int]], ids: np.ndarray,
           places: range) -> tuple[int, int]:
    """(where in all that was drawn, how many of them) the tokens from `start` on are; how many is 0 where they are not.

    They are where the engine was asked with just the tokens before them. Of contexts that were sent as text, which may
    have other ids, it is the first of `places` that holds them all, after the most tokens that agree as well.
    """
    import numpy as np

    contexts = [(min(place + size, stop) - start, begin + start - place) for place, begin, size in continued
                if place <= start < place + size]
    if contexts:
        size, begin = max(contexts, key=lambda one: one[0])
        return begin, size
    run, best = tokens[start:stop], (0, -1)
    for begin in (places.start + np.flatnonzero(ids[places.start:places.stop] == run[0])).tolist():
        if np.array_equal(ids[begin:begin + len(run)], run):
            most = min(begin, start)
            differs = np.flatnonzero(ids[begin - most:begin] != tokens[start - most:start])
            agree = most - 1 - int(differs[-1]) if len(differs) else most
            best = max(best, (begin, agree), key=lambda one: one[1])
    return best[0], len(run) if best[1] >= 0 else 0
