"""A trajectory: one conversation with the policy, whose ids are only ever appended to.

Each request brings the whole conversation as messages. What follows the messages of the request before and the answer
that was given to it is rendered and appended, and nothing is ever tokenised again.

A branch goes on from an earlier answer, with the very ids that there were up to there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from miles_core.errors import EngineError
from miles_core.stages.rollout import Generation, Request, Response, call_engine
from miles_core.types import Drop, Prompt, Sample, Status, images_of
from miles_tools.calls import Call, parse
from miles_tools.images import behind, closed, shown, shows
from miles_tools.session_request import Asked, Message, Refused
from miles_tools.transcript import Transcript

if TYPE_CHECKING:
    from miles_tools.template import Template


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer.

    Args:
        message: the assistant's, as the agent has to send it back.
        finish_reason: "stop", "length" or "tool_calls".
        stopped_by: which of the request's own stop texts ended it.
        prompt_tokens, completion_tokens: of this turn.
        number: of the session's answers, from 0; with several at once not in the order in which they are given.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    number: int
    stopped_by: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample is not trained on: a word that can be counted, and what a person wants to know."""

    reason: str
    detail: str


CALLED_BACK = Failure("aborted", "the group was called back")
"""Not the agent's doing: its prompt may come again."""


class Over(Exception):
    """The session has come to no end that counts."""

    def __init__(self, failure: Failure):
        super().__init__(failure.detail)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request adds: ids behind those that are there, or all that a conversation begins with, and images."""

    ids: Sequence[int] = ()
    images: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """Where an answer stands.

    Args:
        order: among the session's answers, from 0, as they were given.
        before: how many of them there were when it was asked for.
        request: a hash of the ids that it answers.
        messages: how many there were with it.
        begin, end: its first id, and the first behind it.
    """

    order: int
    before: int
    request: int
    messages: int
    begin: int
    end: int


class Trajectory:
    """One conversation of a session.

    Args:
        name: of the sample, in messages.
        template: how its messages become ids, its tools among them.
        tools: those of its first request.
        context: tokens that it may have in all; those after its prompt are bounded by the run's
            rollout_max_response_len as well.
        matches: (a message that was there, the one that came back) -> whether it is the same.
    """

    def __init__(self, prompt: Prompt, name: str, generation: Generation, template: Template,
                 tools: Sequence[Mapping[str, object]], *, context: int, matches: Callable[[Message, Message], bool]):
        self._prompt, self._name, self._generation, self._template = prompt, name, generation, template
        self._tools, self._context, self._matches = tools, context, matches
        self._transcript: Transcript | None = None
        self._last: Response | None = None
        self._opening = ""
        """What its first request was rendered to."""
        self._closed = False
        """Whether the last answer ended with a token that would stand for an image."""
        self.messages: list[Message] = []
        self.answers: list[Answer] = []
        self.busy = False
        self.full = False
        """Whether a request found no room in the context, or an answer behind which nothing may stand."""

    @property
    def answered(self) -> bool:
        """Whether an answer was drawn here; a branch begins with those of what it goes on from."""
        return self._last is not None

    @property
    def ids(self) -> Sequence[int]:
        """All that there are."""
        return () if self._transcript is None else self._transcript.ids

    def problem(self, chat: Asked) -> str | None:
        """Why a request does not go on with this conversation; None where it does."""
        size, agreeing = len(self.messages), self._agreeing(chat)
        if not self.ids:
            return "it has just begun"
        if chat.tools != self._tools:
            return "the tools are not those of the first request"
        if agreeing < min(size, len(chat.messages)):
            own = self.messages[agreeing]["role"] == "assistant"
            return f"messages[{agreeing}] is not {'the answer that was given' if own else 'what it was'}"
        if agreeing < size:
            return f"there were {size} messages, the last answer included, and {len(chat.messages)} came back"
        if _assistants(chat.messages[size:]):
            return "a new message is the assistant's, and the model did not write it"
        return None

    def shared(self, chat: Asked) -> Answer | None:
        """The last answer that a request has in common with this conversation and goes on from."""
        most = min(self._agreeing(chat), len(chat.messages) - 1) if chat.tools == self._tools else 0
        return next((answer for answer in reversed(self.answers)
                     if answer.messages <= most and not _assistants(chat.messages[answer.messages:])), None)

    def branch(self, answer: Answer) -> Trajectory:
        """A conversation that has all of this one up to an answer."""
        branch = Trajectory(self._prompt, self._name, self._generation, self._template, self._tools,
                            context=self._context, matches=self._matches)
        branch._opening = self._opening
        branch.messages, branch.answers = self.messages[:answer.messages], self.answers[:self.answers.index(answer) + 1]
        branch._transcript = cast("Transcript", self._transcript).until(answer.end)  # there is one, with the answer
        branch._closed = self._closed and answer == self.answers[-1]
        return branch

    def turn(self, chat: Asked) -> Turn:
        """What a request adds, if there is room for an answer.

        Raises:
            DataError, Over: as `rendered`.
            Refused: 400, also for lack of room.
        """
        turn = self.rendered(chat)
        size = len(self.ids) + len(turn.ids)
        if self._closed or self._room(size) < 1:
            self.full = True
            raise Refused(400, "the last answer ended with a token that would stand for an image, and nothing may "
                               "follow it" if self._closed else
                               f"{size} tokens leave no room for an answer: the context is {self._context}, and after "
                               f"the prompt there may be {self._generation.sampling.max_new_tokens}",
                          "context_length_exceeded")
        return turn

    def rendered(self, chat: Asked) -> Turn:
        """What a request adds.

        Raises:
            DataError: it cannot be rendered.
            Refused: 400, nothing is new, or it has images that nobody shows.
            Over: an image is damaged or too large.
        """
        new, begun = chat.messages[len(self.messages):], self.ids
        if not new:
            raise Refused(400, "nothing follows the last answer: add a message, or end")
        images = [chat.images[name] for name in _images(new)]
        if images and not shows(self._generation):
            raise Refused(400, "a message has an image, and no plugin of this run shows images to the model; that "
                               "is --plugin vision")
        messages = [self._harmless(message) for message in new]
        text = self._template.suffix_text(messages) if begun else self._template.text(messages, self._name)
        if not begun:
            self._opening = text
        turn, stops = self._shown(text, images), self._generation.sampling.stop
        return replace(turn, ids=self._template.joining(turn.ids, begun[-1], stops)) if begun else turn

    async def draw(self, chat: Asked, turn: Turn, index: int, number: int) -> Completion:
        """Answer a request; a call that is cancelled, or that the engine did not answer, changes nothing.

        Args:
            index, number: of the session in its group, and of the answer in the session; they name the draw.

        Raises:
            Over: the group was called back.
            EngineError: the engine failed, or drew nothing.
        """
        generation, sampling = self._generation, self._generation.sampling
        ids = [*self.ids, *turn.ids]
        room = self._room(len(ids))
        bound = min(room, chat.max_tokens or room)
        request = generation.on_request(Request(
            id=f"{self._prompt.stream}-{self._prompt.uid}-{index}-{number}", input_ids=tuple(ids),
            sampling=replace(sampling, max_new_tokens=bound, min_new_tokens=min(sampling.min_new_tokens, bound),
                             stop=tuple(dict.fromkeys((*sampling.stop, *chat.stop)))),
            key=generation.key(index, number)), self._seen(turn))
        response = await call_engine(generation, request)
        if response.finish_reason not in ("stop", "length"):
            raise Over(CALLED_BACK)
        if not len(response.output_ids):
            raise EngineError(f"the engine drew nothing for request {request.id}", code="engine-drew-nothing",
                              fix="look at the engine's log")
        self._closed = closed(int(response.output_ids[-1]), request, sampling)
        return self._commit(chat, turn, number, response)

    def to_sample(self, index: int, trained: Collection[int] = ()) -> Sample:
        """The conversation as a sample, truncated when its last answer is, or when the agent asked for more than the
        context holds.

        Args:
            trained: answers that another sample trains on, by their order.
        """
        last, transcript = cast("Response", self._last), cast("Transcript", self._transcript)  # it has an answer
        truncated = self.full or last.finish_reason == "length"
        text = self._generation.decode(last.output_ids.tolist(), self._generation.sampling.skip_special_tokens)
        sample = transcript.to_sample(self._prompt, index, text=text,
                                      status=Status.TRUNCATED if truncated else Status.COMPLETED)
        for answer in self.answers:
            if answer.order in trained:
                begin, end = (place - transcript.prompt_length for place in (answer.begin, answer.end))
                sample.columns["loss_mask"][begin:end] = 0
        sample.metadata |= {"messages": self.messages, "shown": {"prompt": self._opening, "response": text}}
        sample.metadata["figures"]["agent/turns"] = float(len(self.answers))
        return self._generation.on_response(sample, last)

    def _agreeing(self, chat: Asked) -> int:
        """How many messages a request and this conversation begin with in common."""
        return next((i for i, (old, came) in enumerate(zip(self.messages, chat.messages))
                     if not self._matches(old, came)), min(len(self.messages), len(chat.messages)))

    def _room(self, size: int) -> int:
        """Tokens that are left for an answer to so many."""
        begun = 0 if self._transcript is None else size - self._transcript.prompt_length
        return min(self._context - size, self._generation.sampling.max_new_tokens - begun)

    def _harmless(self, message: Message) -> Message:
        """A message as the template takes it; a special token in its text ends no turn, and is no image."""
        harmless, content = self._template.harmless, message["content"]
        return {**message, "content": harmless(content) if isinstance(content, str) else [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": harmless(part["text"])}
            for part in content]}

    def _shown(self, text: str, images: Sequence[bytes]) -> Turn:
        """A rendered text as ids, in which images have their tokens."""
        ids = tuple(self._template.encode(text))
        turn = shown(replace(self._prompt, text=text, token_ids=ids, messages=None, metadata={}), images,
                     self._generation)
        if isinstance(turn, Drop):
            raise Over(Failure(turn.reason, turn.detail))
        names = images_of(turn)
        if not self.ids:
            own = images_of(self._prompt)
            if list(names[: len(own)]) != list(own):
                raise Refused(400, f"the first request should begin with the {len(own)} images of the prompt, in their "
                                   "order")
            names = names[len(own):]
        return Turn(turn.token_ids, names)

    def _seen(self, turn: Turn) -> Prompt:
        """The prompt with the images of all turns so far, this one's among them."""
        before = [] if self._transcript is None else [name for _, name in self._transcript.images]
        return behind(self._prompt, [*before, *turn.images])

    def _commit(self, chat: Asked, turn: Turn, number: int, response: Response) -> Completion:
        prompt_tokens = len(self.ids) + len(turn.ids)
        if self._transcript is None:
            self._transcript = Transcript.begin(turn.ids, turn.images)
        else:
            self._transcript.append_suffix(turn.ids, turn.images)
        self._transcript.append_drawn(response)
        message, called, stopped_by = self._message(chat, response, number)
        self.messages = [*chat.messages, message]
        self._last = response
        reason = "tool_calls" if called and response.finish_reason == "stop" else response.finish_reason
        return Completion(message, reason, prompt_tokens, len(response.output_ids), number, stopped_by)

    def _message(self, chat: Asked, response: Response, number: int) -> tuple[Message, bool, str | None]:
        """The answer as a message, without its end token and the stop text; whether it calls tools, and that text."""
        text = self._generation.decode(response.output_ids.tolist(), True)
        stops = {at: stop for stop in reversed(chat.stop) if (at := text.find(stop)) >= 0}
        text, stopped_by = text[: min(stops, default=None)], stops[min(stops)] if stops else None
        calls: Sequence[Call] = ()
        if chat.tools and chat.calls:
            content, parsed = parse(text)
            if not any(call.error for call in parsed):  # else the agent gets to see what the model wrote
                text, calls = content, parsed
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{number}_{i}", "type": "function",
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for i, call in enumerate(calls)]
        return message, bool(calls), stopped_by


def _assistants(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _images(messages: Sequence[Message]) -> list[str]:
    """Names of their images, in order."""
    return [part["image"] for message in messages if isinstance(message["content"], list)
            for part in message["content"] if part["type"] == "image"]
