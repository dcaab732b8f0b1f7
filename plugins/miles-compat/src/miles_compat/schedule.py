"""Rollout functions of a user's own, which decide what is sampled, scored and kept.

The core's slots wait; the first that asks for a rollout calls the function, and each slot takes one of the groups that
it answers with. Its prompts are drawn from the run's own source when it asks its data source for them: what the core
counts as prompts are places in the rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from miles_compat.filters import flat
from miles_compat.generation import drawn, numbered, reward_of
from miles_compat.loading import LOOP
from miles_compat.paths import located, noted
from miles_compat.rollout_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles_compat.sample import labelled
from miles_compat.session import CURRENT, Drawn, Session
from miles_core import rng
from miles_core.errors import HookError
from miles_core.hosts import in_daemon_thread
from miles_core.types import CancelHandle, Prompt, Sample, Status

if TYPE_CHECKING:
    from miles_compat.args import Args
    from miles_core.stages.prompts import PromptSource
    from miles_core.stages.rollout import Generation

WHO, EVAL = "rollout_function_path", "eval_function_path"
Ready = tuple[int, Callable[[Prompt], list[Sample]], Sequence[Any]]  # version of its call, what takes a group, and it


@dataclass
class Places:
    """Places in the rollouts as the core's prompts, and the prompts that fill them.

    Args:
        inner: where prompts come from.
        batch: groups of a rollout.
        held: () -> numbers of the prompts that were drawn and whose groups come later.
    """

    inner: PromptSource
    batch: int
    held: Callable[[], list[int]] = list
    data: str = ""
    _next: int = 0
    _again: deque[int] = field(default_factory=deque)
    _before: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.data = self.inner.data

    def __len__(self) -> int:
        return len(self.inner)

    def next(self) -> Prompt:
        """The next place."""
        if not self._again:
            self._again.append(self._next)
            self._next += 1
        uid = self._again.popleft()
        return Prompt(uid, uid, "", (0,))

    def give_back(self, prompts: list[Prompt]) -> None:
        """Hand these out again before anything else."""
        self._again.extendleft(prompt.uid for prompt in reversed(prompts))

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """The function is called: a run that resumes meanwhile draws the same prompts for it."""
        self._before = self.inner.state_dict()
        try:
            yield
        finally:
            self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Which places come next, and which prompts: those whose groups the run does not have yet come first."""
        inner = self._before or self.inner.state_dict()
        return {"next": self._next, "again": list(self._again), "data": self.data,
                "inner": {**inner, "again": [*self.held(), *inner["again"]]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._next, self._again = state["next"], deque(state["again"])
        self.inner.load_state_dict(state["inner"])


class Together(Session):
    """One session for all that a rollout function asks of the engine; the slots that wait for it are alive."""

    def __init__(self, args: Args, generation: Generation, name: Callable[[Sequence[int]], tuple[str, int]]):
        super().__init__(args, replace(generation, recall=CancelHandle()), name, args.rollout_max_context_len)
        self.waiting: list[Generation] = []

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """See Session; meanwhile no slot counts as idle."""
        for one in (waiting := list(self.waiting)):
            one.recall.begins("its rollout function")
        try:
            return await super().generate(payload)
        finally:
            for one in waiting:
                one.recall.ends("its rollout function", one.timeout)


class Schedule:
    """A rollout function, called once for each rollout, and the slots that take its groups.

    Args:
        source: (args) -> the data source that it is given.
        log: (name, number) -> a metric of the rollout.
    """

    def __init__(self, function: Callable[..., Any], args: Args, places: Places, source: Callable[..., Any],
                 log: Callable[[str, float], None]):
        self._args, self._places, self._log = args, places, log
        self.source, places.held = source(args), self._held
        self._function = _made(function, args, self.source)
        self._ready: deque[Ready] = deque()
        self._waiting: list[int] = []
        self._kept: list[Drawn] = []
        self._buffered: Sequence[Any] | None = None  # as a call that is under way found the buffer
        self._taken: list[tuple[asyncio.Task[Any], Sequence[Any]]] = []  # slots, and groups that they have to score
        self._under_way: tuple[Together, asyncio.Task[None]] | None = None

    async def group(self, place: Prompt, generation: Generation) -> list[Sample]:
        """The samples of the next group that the function answers with.

        Raises:
            HookError: its answer is no list of groups of samples.
        """
        version = generation.engine.version
        self._waiting.append(version)
        try:
            while (found := self._next(version)) is None:
                await self._call(place, generation)
        finally:
            self._waiting.remove(version)
        slot = cast("asyncio.Task[Any]", asyncio.current_task())
        self._taken = [*(one for one in self._taken if not one[0].done()), (slot, found[2])]
        return found[1](place)

    async def _call(self, place: Prompt, generation: Generation) -> None:
        """Wait for the call that is under way, or for a new one."""
        if self._under_way is None:
            session = self._opened(place.uid, generation)
            self._under_way = session, asyncio.ensure_future(self._rollout(place, session))
        session, call = under_way = self._under_way
        session.waiting.append(generation)
        try:
            await asyncio.shield(call)
        finally:
            session.waiting.remove(generation)
            if not session.waiting and not call.done():
                call.cancel()
            if self._under_way is under_way and (call.done() or not session.waiting):
                self._under_way = None

    def _next(self, version: int) -> Ready | None:
        """A group of a call that began with the weights that a slot began with, or newer ones.

        What a call left over is dropped and counted once no slot of its age waits: a younger one may hold its group for
        --max-lag rollouts more.
        """
        ready, oldest = len(self._ready), min(self._waiting)
        self._ready = deque(one for one in self._ready if one[0] >= oldest)
        if ready > len(self._ready):
            self._log("surplus_groups", ready - len(self._ready))
        oldest_fit = next((one for one in self._ready if one[0] >= version), None)
        if oldest_fit is not None:
            self._ready.remove(oldest_fit)
        return oldest_fit

    def _opened(self, place: int, generation: Generation) -> Together:
        """A session whose draws are those of its place: drops may have a rollout call the function twice."""
        asked: Counter[bytes] = Counter()
        seed = self._args.rollout_seed

        def name(ids: Sequence[int]) -> tuple[str, int]:
            digest = hashlib.blake2b(str(list(ids)).encode(), digest_size=8).digest()
            asked[digest] += 1
            where = place, int.from_bytes(digest, "little"), asked[digest]
            return f"place-{place}-{digest.hex()}-{asked[digest]}", rng.key(seed, "train/function", *where)

        session = Together(self._args, generation, name)
        session.drawn += self._kept
        return session

    async def _rollout(self, place: Prompt, session: Together) -> None:
        args, version, number = self._args, session.generation.engine.version, place.uid // self._places.batch
        if not args.debug_rollout_only:  # dropped groups use up places, so these run ahead of the rollouts
            number = min(number, max(version - 1, 0) + args.max_lag)
        token, self._buffered = CURRENT.set(session), list(getattr(self.source, "buffer", ()))
        try:
            given = RolloutFnTrainInput(number, version)
            with self._places.drawing():
                answer = await called(self._function, args, given, self.source)
        finally:
            self._buffered = None
            CURRENT.reset(token)
        self._kept = [answer for group in getattr(self.source, "buffer", ()) for one in flat(group)
                      for answer in _answers(one, session.drawn)]
        groups = getattr(answer, "samples", answer)
        for name, value in (getattr(answer, "metrics", None) or {}).items():
            with contextlib.suppress(TypeError, ValueError):  # what is no number is no metric
                self._log(name, float(value))
        if not isinstance(groups, list) or not groups or not all(isinstance(one, list) and one for one in groups):
            raise HookError("the function should return groups of samples", code="rollout-function-return",
                            got=repr(groups)[:100], who=WHO,
                            fix="a list with a list of samples for each prompt, rollout_batch_size of them")
        self._ready.extend((version, _taker(group, self.source, session), group) for group in groups)

    def _held(self) -> list[int]:
        """Numbers of the prompts of groups that a slot scores or is about to take, and of those in the buffer."""
        oldest = min(self._waiting, default=math.inf)  # without a slot that waits, weights are newer than what is ready
        buffered = getattr(self.source, "buffer", ()) if self._buffered is None else self._buffered
        scored = (group for slot, group in self._taken if not slot.done())
        groups = (*scored, *(one[2] for one in self._ready if one[0] >= oldest), *buffered)
        numbers = dict.fromkeys(one.group_index for group in groups for one in flat(group))
        return [number for number in numbers if number in getattr(self.source, "of_uid", {})]


def _taker(group: Sequence[Any], source: object, session: Session) -> Callable[[Prompt], list[Sample]]:
    """(place) -> the core's samples of a group, whose executions may be lists."""
    def take(place: Prompt) -> list[Sample]:
        index = itertools.count()
        return numbered([[drawn(one, _prompt(one, place, source), next(index), _answers(one, session.drawn), session)
                          for one in (execution if isinstance(execution, list) else [execution])]
                         for execution in group])
    return take


def _prompt(one: Any, place: Prompt, source: object) -> Prompt:
    """The prompt that a sample answers, under the place's number."""
    known: Mapping[int, Prompt] = getattr(source, "of_uid", {})
    found = known.get(one.group_index if one.group_index is not None else -1)
    if found is not None:
        return replace(found, uid=place.uid)
    text = one.prompt if isinstance(one.prompt, str) else ""
    ids = tuple(one.tokens[:len(one.tokens) - one.response_length])
    return replace(place, text=text, token_ids=ids, metadata=dict(one.metadata), **labelled(one.label))


def _answers(one: Any, everything: Sequence[Drawn]) -> list[Drawn]:
    """The engine's answers that a sample's tokens go on with, in their order."""
    tokens = list(one.tokens)
    found = [answer for answer in everything if len(answer.input_ids) < len(tokens)
             and [tokens[len(answer.input_ids)]] == answer.response.output_ids[:1].tolist()
             and tuple(tokens[:len(answer.input_ids)]) == answer.input_ids]
    return sorted(found, key=lambda answer: len(answer.input_ids))


async def called(function: Callable[..., Any], args: Args, given: Any, source: object) -> Any:
    """What a rollout function answers: one of (args, rollout_id, data_buffer, evaluation), or of one input."""
    LOOP.set(asyncio.get_running_loop())
    if len(inspect.signature(function).parameters) < 3:
        def ask() -> Any:
            return function(given)
    else:
        def ask() -> Any:
            return function(args, given.rollout_id, source, evaluation=given.evaluation)
    asynchronous = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    answer = ask() if asynchronous else await in_daemon_thread(ask)
    return await answer if inspect.isawaitable(answer) else answer


def _made(function: Callable[..., Any], args: Args, source: object) -> Callable[..., Any]:
    """The function, or the object that a class of rollout functions makes."""
    if inspect.isclass(function):
        kind: Any = function
        with located(kind):
            made: Callable[..., Any] = kind(RolloutFnConstructorInput(args, source))
        return noted(made)
    return function


class Evaluations:
    """An eval function, called once for each evaluation. Datasets that it says nothing of are sampled by the run.

    Args:
        log: (name, number) -> a metric of the evaluation.
    """

    def __init__(self, function: Callable[..., Any], args: Args, log: Callable[[str, float], None]):
        self._args, self._log = args, log
        self._function = _made(function, args, None)
        self._served: set[tuple[str, int]] = set()
        self._used: dict[str, int] = {}
        self._call: asyncio.Task[Mapping[str, Any]] | None = None
        self._count = 0

    async def group(self, prompt: Prompt, generation: Generation) -> list[Sample] | None:
        """The samples of an eval prompt by the function; None where it says nothing of its dataset.

        Raises:
            HookError: it gives too few samples.
        """
        key = prompt.stream, prompt.uid
        if self._call is None or key in self._served:
            self._check_used()
            self._served = set()
            self._call = asyncio.ensure_future(self._evaluation(generation))
        self._served.add(key)
        data = await asyncio.shield(self._call)
        name = prompt.stream.removeprefix("eval/")
        if name not in data:
            return None
        rows = slice(prompt.uid * generation.samples, (prompt.uid + 1) * generation.samples)
        samples, rewards = (data[name].get(word) or () for word in ("samples", "rewards"))
        found = [_judged(one, prompt, index, self._args) for index, one in enumerate(samples[rows])]
        found = found or [_scored(reward_of(SimpleNamespace(reward=value), self._args), prompt, index)
                          for index, value in enumerate(rewards[rows])]
        if len(found) != generation.samples:
            raise HookError(f"the function gave prompt {prompt.uid} of {name} {len(found)} of {generation.samples} "
                            "samples", who=EVAL, fix="return all of a dataset's in its order, or nothing of it",
                            code="eval-function-sample-count")
        self._used[name] = max(self._used.get(name, 0), rows.stop)
        return found

    def _check_used(self) -> None:
        """Whether the evaluation before this one took all that the function gave: they are matched by their order."""
        if self._call is None:
            return
        for name, data in self._call.result().items():
            count = len(data.get("samples") or data.get("rewards") or ())
            if count > self._used.get(name, count):
                raise HookError(f"the function gave {name} more samples than it has", who=EVAL, got=count,
                                fix=f"return {self._used[name]}, --n-samples-per-eval-prompt of each prompt",
                                code="eval-function-surplus")

    async def _evaluation(self, generation: Generation) -> Mapping[str, Any]:
        asked: Counter[str] = Counter()

        def name(ids: Sequence[int]) -> tuple[str, int]:
            asked[str(list(ids))] += 1
            digest = hashlib.blake2b(str(list(ids)).encode(), digest_size=8).hexdigest()
            number = asked[str(list(ids))]
            return f"eval-{digest}-{number}", rng.key(self._args.rollout_seed, "eval/function", int(digest, 16), number)

        version = generation.engine.version
        token = CURRENT.set(Session(self._args, generation, name, self._args.rollout_max_context_len))
        try:
            answer = await called(self._function, self._args, RolloutFnEvalInput(max(version - 1, 0), version), None)
        finally:
            CURRENT.reset(token)
        for word, value in (getattr(answer, "metrics", None) or {}).items():
            with contextlib.suppress(TypeError, ValueError):  # what is no number is no metric
                self._log(word.removeprefix("eval/"), float(value))
        data = getattr(answer, "data", answer)
        if not isinstance(data, Mapping) or not all(isinstance(one, Mapping) for one in data.values()):
            raise HookError("the function should return figures by dataset", code="eval-function-return",
                            got=repr(data)[:100], who=EVAL,
                            fix='a dict of NAME -> {"rewards": [...], "truncated": [...], "samples": [...]}')
        return data


def _judged(one: Any, prompt: Prompt, index: int, args: Args) -> Sample:
    """An eval sample: nobody trains on it, so its tokens may be anyone's."""
    sample = _scored(reward_of(one, args), prompt, index)
    import numpy as np

    size = int(one.response_length)
    tokens = list(one.tokens) or list(prompt.token_ids)
    sample.columns |= {"tokens": np.array(tokens, np.int32), **_columns(size)}
    sample.response_length, sample.text = size, one.response
    sample.status = Status(getattr(one.status, "value", one.status))
    sample.metadata = dict(one.metadata)
    return sample


def _scored(reward: float | None, prompt: Prompt, index: int) -> Sample:
    """A sample of which only the reward is known."""
    import numpy as np

    columns = {"tokens": np.array(prompt.token_ids, np.int32), **_columns(0)}
    return Sample(prompt, index, columns, status=Status.COMPLETED, reward=reward)


def _columns(size: int) -> dict[str, Any]:
    import numpy as np

    return {"loss_mask": np.zeros(size, np.uint8), "rollout_log_probs": np.zeros(size, np.float32),
            "versions": np.zeros(size, np.int32)}
