"""A session: what one agent says to the policy, in one conversation or in several.

A request goes on with the conversation whose messages it begins with. An agent that goes back to an earlier answer,
edits, drops or invents a message, changes its tools, or begins anew, as those do that summarise what they have or send
out another agent, has a conversation more, up to as many as the run allows. Each is a sample of the session's rollout;
an answer that several have in common is trained on in the first. Beyond that a request is refused, and nothing of the
session is trained on.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_core.errors import DataError
from miles_core.stages.rollout import Generation, SamplingParams
from miles_core.types import Prompt, Sample, Status
from miles_tools.images import filled
from miles_tools.session_request import Asked, Message, Refused, same
from miles_tools.trajectory import CALLED_BACK, Answer, Completion, Failure, Over, Trajectory, Turn

if TYPE_CHECKING:
    from miles_tools.template import Template


class Session:
    """The conversations of one agent.

    Args:
        template: tools -> how messages become ids.
        context: tokens that a conversation may have in all; those after its prompt are bounded by the run's
            rollout_max_response_len as well.
        matches: (a message that was there, the one that came back) -> whether it is the same.
        conversations: how many there may be.
    """

    def __init__(self, prompt: Prompt, index: int, generation: Generation, *, context: int,
                 template: Callable[[Sequence[Mapping[str, object]]], Template],
                 matches: Callable[[Message, Message], bool] = same, conversations: int = 1):
        self._prompt, self._index, self._generation = prompt, index, generation
        self._context, self._make_template, self._matches = context, template, matches
        self._most = conversations
        self._trajectories: list[Trajectory] = []
        self._numbers: set[int] = set()
        """Of answers that were given, or are under way."""
        self.turns = 0
        """Answers in all conversations."""
        self.ignored = 0
        """Requests with sampling parameters that are not the run's."""
        self.engine_seconds = 0.0
        self.full = False
        """Whether a request found no room for an answer."""
        self.failure: Failure | None = None
        self.error: Exception | None = None
        """What ends the run: the engine failed."""
        self._broken = asyncio.Event()

    @property
    def name(self) -> str:
        """How messages refer to it."""
        return f"{self._prompt.stream} prompt {self._prompt.uid} (row {self._prompt.row}), sample {self._index}"

    @property
    def sampling(self) -> SamplingParams:
        """The run's, which every answer is drawn with."""
        return self._generation.sampling

    @property
    def messages(self) -> list[Message]:
        """The conversation that was answered last."""
        return max(self._trajectories, key=_newest).messages if self._trajectories else []

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return any(one.busy for one in self._trajectories)

    async def broken(self) -> None:
        """Wait for `error`; whoever calls bounds it."""
        await self._broken.wait()

    async def complete(self, chat: Asked) -> Completion:
        """Answer one request.

        A call that is cancelled, or that the engine did not answer, leaves the conversation as it was.

        Raises:
            Refused: 400, it cannot be rendered or has no room; 409, another call is under way, or it goes on with none
                of as many conversations as there may be; 503, the group was called back.
            EngineError: the engine failed, or drew nothing; kept in `error`, like any other error.
        """
        try:
            trajectory = self._trajectory(chat)
            return await self._answered(trajectory, chat, self._turn(trajectory, chat))
        except Over as over:
            raise self._over(over.failure) from None
        except Exception as error:
            if not isinstance(error, Refused):
                self.error = error
                self._broken.set()
            raise

    def samples(self, failure: Failure | None) -> list[Sample]:
        """The conversations as samples; with a failure, or without an answer, one that is not trained on.

        Where there are several, all of them have the text and the messages of the one that was answered last, by which
        an agent is judged, and their own messages as metadata["conversation"].
        """
        failure = self.failure or failure
        if not self.turns:
            failure = failure or (Failure("agent_out_of_context", "its first request left no room for an answer")
                                  if self.full else
                                  Failure("agent_never_called", "the agent ended without an answer of the model"))
        if failure is not None:
            return [self._unfinished(failure)]
        samples, trained = [], set[int]()
        for one in sorted(_kept(self._trajectories), key=_newest):
            samples.append(one.to_sample(self._index, trained))
            trained.update(answer.order for answer in one.answers)
        figures = {"agent/ignored_parameters": float(self.ignored)}
        if self._most > 1:
            figures |= {"agent/conversations": float(len(samples)),
                        "agent/superseded": float(self.turns - len(trained))}
        for sample in samples:
            sample.metadata["figures"] |= figures
            if len(samples) > 1:
                sample.metadata["conversation"] = sample.metadata["messages"]
                sample.text, sample.metadata["messages"] = samples[-1].text, self.messages
        return samples

    def task_messages(self) -> list[Message]:
        """The prompt for the agent, its images as data."""
        messages = self._prompt.messages or ({"role": "user", "content": self._prompt.text},)
        return filled(copy.deepcopy([dict(one) for one in messages]), self._prompt, self._generation)

    def count(self, chat: Asked) -> int:
        """How many tokens a request's messages and tools have, rendered by themselves.

        Raises:
            Refused: 400, they cannot be rendered.
        """
        try:
            return len(self._new(chat).rendered(chat).ids)
        except (DataError, Over) as error:
            raise _not_rendered(error) from error

    def _trajectory(self, chat: Asked) -> Trajectory:
        """What a request goes on with: a conversation that is there, a branch of one, or a new one.

        Raises:
            Refused: 409, that one is being answered.
            Over: it is one conversation too many.
        """
        if self.failure is not None:
            raise self._over(self.failure)
        if self._most == 1 and self.busy:
            raise Refused(409, "another request of this session is under way; a session is one conversation",
                          "conflict", again=True)
        problems = {one: one.problem(chat) for one in self._trajectories}
        continued = next((one for one, problem in problems.items() if problem is None), None)
        if continued is not None and not continued.busy:
            return continued
        if len(problems) < self._most:
            shared = {one: answer for one in problems if (answer := one.shared(chat)) is not None}
            if not shared:
                return self._new(chat)
            origin = max(shared, key=lambda one: shared[one].end)
            return origin.branch(shared[origin])
        if continued is not None:
            raise Refused(409, "another request of this conversation is under way", "conflict", again=True)
        if self._most == 1:
            raise Over(Failure("agent_rewrote_history", str(next(iter(problems.values())))))
        raise Over(Failure("agent_conversations", f"it is another conversation than the {self._most} that there are"))

    def _new(self, chat: Asked) -> Trajectory:
        try:
            template = self._make_template(chat.tools)
        except DataError as error:
            raise _not_rendered(error) from error
        return Trajectory(self._prompt, self.name, self._generation, template, chat.tools, context=self._context,
                          matches=self._matches)

    def _turn(self, trajectory: Trajectory, chat: Asked) -> Turn:
        try:
            return trajectory.turn(chat)
        except DataError as error:
            raise _not_rendered(error) from error
        except Refused as refused:
            self.full |= refused.code == "context_length_exceeded"
            raise

    async def _answered(self, trajectory: Trajectory, chat: Asked, turn: Turn) -> Completion:
        number = next(number for number in itertools.count() if number not in self._numbers)
        self._numbers.add(number)
        if new := trajectory not in self._trajectories:
            self._trajectories.append(trajectory)
        trajectory.busy, before, started = True, self.turns, time.monotonic()
        try:
            completion = await trajectory.draw(chat, turn, self._index, number)
        except BaseException:
            self._numbers.discard(number)
            if new:
                self._trajectories.remove(trajectory)
            raise
        finally:
            trajectory.busy = False
        self.engine_seconds += time.monotonic() - started
        ids, begin = trajectory.ids, completion.prompt_tokens
        trajectory.answers.append(Answer(self.turns, before, hash(tuple(ids[:begin])), len(trajectory.messages),
                                         begin, len(ids)))
        self.turns += 1
        self.ignored += bool(chat.ignored)
        return completion

    def _over(self, failure: Failure) -> Refused:
        """End the session; what an agent that goes on is told."""
        self.failure = failure
        if failure is CALLED_BACK:
            return Refused(503, "the run has aborted this conversation; it will start over", "aborted")
        return Refused(409, f"{failure.detail}. A conversation is only ever appended to here; this one has ended and "
                            "will not be trained on", "conflict")

    def _unfinished(self, failure: Failure) -> Sample:
        """A sample of no response tokens: nothing of it can be trained on by mistake, and nothing goes on from it."""
        status, metadata = Status.ABORTED, {}
        if failure is not CALLED_BACK:
            status = Status.FAILED
            metadata = {"messages": self.messages,
                        "drop": {"reason": failure.reason, "detail": f"{self.name}: {failure.detail}"}}
        return Sample(
            prompt=self._prompt, index=self._index, status=status, metadata=metadata,
            columns={"tokens": np.array(self._prompt.token_ids, np.int32), "loss_mask": np.zeros(0, np.uint8),
                     "rollout_log_probs": np.zeros(0, np.float32), "versions": np.zeros(0, np.int32)})  # fmt: skip


def _newest(trajectory: Trajectory) -> int:
    """The order of its last answer; -1 where there is none yet."""
    return trajectory.answers[-1].order if trajectory.answers else -1


def _kept(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those that are trained on: not what is a part of another one, nor what ends with an answer in whose place the
    agent asked for another by the same request (as Miles's `drop_retries`)."""
    followed = {answer.order for one in trajectories for answer in one.answers[:-1]}
    latest: dict[int, int] = {}
    for answer in (answer for one in trajectories for answer in one.answers):
        latest[answer.request] = max(answer.before, latest.get(answer.request, 0))
    return [one for one in trajectories if one.answered and _newest(one) not in followed
            and latest[one.answers[-1].request] <= _newest(one)]


def _not_rendered(error: Exception) -> Refused:
    return Refused(400, f"the messages cannot be rendered: {error}")
