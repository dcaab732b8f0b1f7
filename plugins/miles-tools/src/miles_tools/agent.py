"""The generator "agent": each sample is what a black-box agent and the policy said in a session of the endpoint."""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from miles_core.errors import ConfigError, RewardError, RolloutError
from miles_core.stages.rollout import Generation
from miles_core.types import CancelHandle, Prompt, Sample, Status
from miles_core.waits import BEAT
from miles_tools.agent_call import AgentFailed, Task, call_function, call_program, find_function, load_function
from miles_tools.foreign import describe, is_unicode
from miles_tools.session import Session
from miles_tools.session_request import same
from miles_tools.session_server import SessionServer
from miles_tools.template import Template, load
from miles_tools.trajectory import CALLED_BACK, Failure

if TYPE_CHECKING:
    from miles_core.config import RunConfig
    from miles_tools.plugin import ToolsOptions

SCORER = "agent"
LOOK = 0.5
"""Seconds between two looks at whether a group was called back."""
HUNG = 64
"""Agents that took too long, with none that has ended before, after which the run ends: all others would, too."""


def check(options: ToolsOptions, config: RunConfig) -> None:
    """What can be known of an agent before the start.

    Raises:
        ConfigError: none is named, or two, one that is not there, or numbers that cannot be.
    """
    if (options.agent is None) == (not options.agent_command):
        raise ConfigError("the generator agent needs exactly one agent", who="tools.agent, tools.agent_command",
                          got="neither" if options.agent is None else "a function and a program", code="agent-count",
                          fix="--agent FILE.py:FUNCTION, or --agent-command PROGRAM ARGUMENT ...")
    if options.agent is not None:
        find_function(options.agent)
    counts = options.agent_concurrency, options.agent_conversations
    if not options.agent_timeout > 0 or min(counts) < 1:
        raise ConfigError("agent_timeout should be above 0, agent_concurrency and agent_conversations at least 1",
                          code="agent-limits-invalid", who="[tools]",
                          got=f"{options.agent_timeout:g}, {counts[0]} and {counts[1]}", fix="leave them out")
    if not config.rollout.rollout_temperature > 0:
        raise ConfigError("an agent's tokens are drawn at the run's temperature, which is 0",
                          code="agent-temperature-zero", who="rollout.rollout_temperature",
                          fix="--rollout-temperature 1")


class Agents:
    """The agents of a run and the endpoint that they talk to.

    Args:
        call: (task, address of the session) -> what the agent tells of itself; instead of what the options name.
        matches: whether a message that came back is the one that was there; see Session.
    """

    def __init__(self, options: ToolsOptions, config: RunConfig,
                 call: Callable[[Task, str], Awaitable[object]] | None = None,
                 matches: Callable[[Any, Any], bool] = same):
        self._options, self._config, self._given, self._matches = options, config, call, matches
        self._function: Callable[..., Any] | None = None
        self._tokenizer = None
        self._turns = asyncio.Semaphore(options.agent_concurrency)
        self._hung, self._ended = 0, False
        self._server = SessionServer()

    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """The samples of a group, each by an agent of its own, all of them at once.

        Raises:
            ConfigError: the agent cannot be loaded, or prompts are not rendered by a chat template.
            DataError: the chat template rewrites earlier turns.
            EngineError: the engine failed under an agent.
            RewardError: an agent rewards itself in a run whose scorers do not ask for that.
            RolloutError: the first HUNG agents all took too long.
        """
        done: dict[int, list[Sample]] = {}
        for sample in generation.begun:
            if sample.status is not Status.ABORTED:
                done.setdefault(sample.index if sample.rollout is None else sample.rollout, []).append(sample)
        calls = {index: asyncio.ensure_future(self.samples(prompt, index, generation))
                 for index in range(generation.samples) if index not in done}
        try:
            done |= dict(zip(calls, await asyncio.gather(*calls.values()), strict=True))
        finally:
            for call in calls.values():
                call.cancel()  # the others, when one failed
            await asyncio.gather(*calls.values(), return_exceptions=True)  # bounded: they end their agents
        return numbered([done[index] for index in sorted(done)])

    def stop(self) -> None:
        """End the endpoint."""
        self._server.stop()

    async def _begin(self) -> None:
        if self._tokenizer is None:
            if self._options.agent is not None:
                self._function = load_function(self._options.agent)
            self._tokenizer = load(self._config)
            if self._given is None and not self._options.allow_rewriting_template:
                self._template(()).check("user")
        await self._server.start()

    def _template(self, tools: Sequence[Mapping[str, Any]]) -> Template:
        return Template(self._tokenizer, self._config.rollout.apply_chat_template_kwargs or {}, list(tools))

    async def samples(self, prompt: Prompt, index: int, generation: Generation) -> list[Sample]:
        """One rollout, by an agent of its own: a sample of each conversation. Raises as `generate` does."""
        await self._begin()
        session = Session(prompt, index, generation, context=cast("int", self._config.rollout.rollout_max_context_len),
                          template=self._template, matches=self._matches,
                          conversations=self._options.agent_conversations)
        async with self._turns:
            begin = time.monotonic()
            result, failure = await self._in_session(prompt, session, generation.recall)
            seconds = time.monotonic() - begin
        samples = session.samples(failure)
        if samples[0].status.finished:
            own = max(seconds - session.engine_seconds, 0.0)  # conversations may be answered side by side
            for sample in samples:
                sample.metadata["figures"] |= {"agent/time": seconds, "agent/own_time": own}
            samples = self._rewarded(samples, session, result)
        return samples

    async def _in_session(self, prompt: Prompt, session: Session,
                          recall: CancelHandle) -> tuple[dict[str, Any], Failure | None]:
        """(what the agent returned, why it failed). An agent that fails for lack of context keeps its answers."""
        key = self._server.open(session)
        agent = asyncio.ensure_future(self._call(prompt, session.task_messages(), key))
        broken = asyncio.ensure_future(session.broken())
        try:
            left = self._options.agent_timeout
            while left > 0 and not (agent.done() or broken.done()):
                begin, look = time.monotonic(), min(left, LOOK)
                await asyncio.wait((agent, broken), timeout=look, return_when=asyncio.FIRST_COMPLETED)
                blocked = time.monotonic() - begin > look + 2 * BEAT  # this loop, in which an answer may lie unread
                left = max(left - look, 2 * BEAT if blocked else 0)
                if recall.cancelled and not agent.done():
                    return {}, CALLED_BACK
            if session.error is not None:
                raise session.error
            self._ended |= agent.done()
            self._hung += not agent.done()
            if self._hung >= HUNG and not self._ended:
                raise RolloutError(f"none of {self._hung} agents has ended in its time", code="agents-hang",
                                   got=f"{self._options.agent_timeout:g} s each", who=self._who,
                                   fix="try the agent on one prompt by itself, or raise --agent-timeout")
            if not agent.done():
                return {}, Failure("agent_timeout", f"the agent took longer than {self._options.agent_timeout:g} s")
            return figures_of(agent.result()), None
        except AgentFailed as failed:
            return {}, None if session.full and session.turns else Failure(failed.reason, failed.detail)
        finally:
            agent.cancel()
            broken.cancel()
            await asyncio.gather(agent, broken, return_exceptions=True)  # bounded: see agent_call
            await self._server.close(key)

    async def _call(self, prompt: Prompt, messages: list[dict[str, Any]], key: str) -> object:
        # A copy: an agent may change it, and its group shares the prompt.
        task = Task(self._server.base_url, key, messages, copy.deepcopy(dict(prompt.metadata)), prompt.label)
        if self._given is not None:
            return await self._given(task, self._server.session_url(key))
        if self._function is not None:
            return await call_function(self._function, task)
        return await call_program(self._options.agent_command, task)

    def _rewarded(self, samples: list[Sample], session: Session, result: dict[str, float]) -> list[Sample]:
        """
        Raises:
            RewardError: the agent's reward would be thrown away.
        """
        scorers = self._config.rollout.rm_type
        figures = {f"agent/{name}": value for name, value in result.items() if name not in ("reward", "truncated")}
        for sample in samples:
            sample.metadata["figures"] |= figures
            if result.get("truncated"):
                sample.status = Status.TRUNCATED
        if "reward" in result:
            if scorers and SCORER not in scorers:
                raise RewardError(f"the agent gave {session.name} a reward that no scorer uses", who=self._who,
                                  got=f"rm_type {', '.join(scorers)}", code="agent-reward-unused",
                                  fix=f"add {SCORER} to --rm-type, or let the agent return none")
            for sample in samples:
                sample.rewards[SCORER] = sample.reward = result["reward"]
        elif session.full and not set(scorers) - {SCORER}:
            return session.samples(Failure("agent_out_of_context", "the agent gave no reward after that"))
        return samples

    @property
    def _who(self) -> str:
        return f"agent {self._options.agent or ' '.join(self._options.agent_command)}".strip()


def numbered(rollouts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of a group in their order. Where one rollout has several, each says of which rollout it is."""
    several = any(len(samples) > 1 for samples in rollouts)
    flat = [(number, sample) for number, samples in enumerate(rollouts) for sample in samples]
    for index, (number, sample) in enumerate(flat):
        sample.index, sample.rollout = index, number if several else None
    return [sample for _, sample in flat]


def reward_of(sample: Sample) -> float:
    """The scorer "agent": what the sample's agent gave it.

    Raises:
        RewardError: it gave none.
    """
    if SCORER not in sample.rewards:
        raise RewardError(f"the agent gave {sample.name} no reward", code="agent-reward-missing", who="--rm-type agent",
                          fix="let the agent return one, or leave the scorer agent out")
    return sample.rewards[SCORER]


def figures_of(result: object) -> dict[str, float]:
    """What an agent returned, as numbers by name: nothing, its reward, or a dict with "reward" and other figures.

    Raises:
        AgentFailed: anything else, or a number that is not finite.
    """
    figures = result if isinstance(result, Mapping) else {"reward": result}
    if result is None:
        figures = {}
    try:
        numbers = {str(name): float(value) for name, value in figures.items() if hasattr(value, "__float__")}
        finite = len(numbers) == len(figures) and all(map(math.isfinite, numbers.values()))
        fine = finite and is_unicode("".join(numbers))
    except Exception:  # noqa: BLE001 - a number beyond all floats, or whatever an object of the agent's does
        fine = False
    if not fine:
        raise AgentFailed("agent_bad_result", f"the agent returned {describe(result)}; a reward and figures are finite "
                                              "numbers")
    return numbers
