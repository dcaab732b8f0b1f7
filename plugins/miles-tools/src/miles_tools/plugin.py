"""The plugin: options and hooks. Turns are in conversation.py, agents in agent.py, the sandbox in sandbox.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_core.stages.rollout import Generation
    from miles_core.types import Prompt, Sample
    from miles_tools.agent import Agents
    from miles_tools.conversation import Conversations
    from miles_tools.sandbox import Sandbox
    from miles_tools.unit_tests import UnitTests

POSITIVE = ("generate_max_turns", "tool_response_tokens", "sandbox_workers", "sandbox_wall_time", "sandbox_cpu_time",
            "sandbox_memory", "sandbox_disk", "sandbox_processes", "sandbox_output", "unit_tests_timeout")


@dataclass(frozen=True, kw_only=True)
class ToolsOptions:
    """Which tools there are, how they are called, and what they may use."""

    tools: list[str] = option([], "Tools: calc or python, files of functions (FILE.py), or one of them (FILE.py:NAME).")
    tool_format: Literal["hermes", "tag", "fenced"] = option(
        "hermes", "How a call is written: <tool_call>{json}</tool_call>, <NAME>text</NAME>, or a fenced block NAME."
    )
    generate_max_turns: int = option(16, "Turns after which a sample is truncated.", flags=("--generate-max-turns",))
    tool_response_tokens: int = option(
        1024, "Maximum number of tokens of a tool's answer; longer ones are cut and marked.")
    tool_role: Literal["tool", "user"] = option("tool", "Role of the messages that hold a tool's answer.")
    ending_tools: list[str] = option([], "Tools whose call ends the conversation; they are not run.")
    allow_rewriting_template: bool = option(
        False, "Allow a chat template that rewrites earlier turns; training uses the tokens that were sampled."
    )
    sandbox_isolation: Literal["auto", "namespaces", "plain"] = option(
        "auto", "Isolation of tools: the strictest that works, namespaces or an error, or only processes with limits."
    )
    sandbox_workers: int = option(2, "Maximum number of concurrent calls.")
    sandbox_wall_time: float = option(5.0, "Seconds allowed for a call.")
    sandbox_cpu_time: float = option(5.0, "CPU seconds allowed for each process of a call.")
    sandbox_memory: int = option(1024, "MiB of address space of each process of a call.")
    sandbox_disk: int = option(16, "MiB that a call may write.")
    sandbox_processes: int = option(16, "Processes and threads of a call.")
    sandbox_output: int = option(65536, "Maximum number of bytes that a call may print or return.")
    unit_tests_key: str = option("tests", "Key of a prompt's metadata that holds its unit tests; else the label does.")
    unit_tests_share: bool = option(
        False, "Scorer unit-tests returns the share of passing tests instead of all or nothing.")
    unit_tests_timeout: float = option(60.0, "Seconds allowed for all tests of one answer.")
    agent: str | None = option(
        None, "Agent of the generator agent: FILE.py:FUNCTION or MODULE:FUNCTION.", flags=("--agent",)
    )
    agent_command: list[str] = option(
        [], "Agent of the generator agent: a program and its arguments; no shell.", flags=("--agent-command",)
    )
    agent_timeout: float = option(600.0, "Seconds allowed for one agent.", flags=("--agent-timeout",))
    agent_concurrency: int = option(64, "Maximum number of concurrent agents.", flags=("--agent-concurrency",))
    agent_conversations: int = option(
        1, "Maximum number of conversations of one agent: branches, summaries, agents that it sends out; each is a "
        "sample of its rollout.", flags=("--agent-conversations",)
    )


class Tools:
    """Conversations of several turns with tools in a sandbox, and a scorer that runs unit tests in it."""

    provides = ("resumes:tools", "resumes:agent", "rows:unit-tests:unit_tests_key")

    def __init__(self, options: ToolsOptions, config: RunConfig):
        self.options, self._config = options, config
        self._agents: Agents | None = None
        self._conversations: Conversations | None = None
        self._sandbox: Sandbox | None = None
        self._unit_tests: UnitTests | None = None
        for name in POSITIVE:
            if not getattr(options, name) > 0:
                raise ConfigError(f"{name} should be positive", got=getattr(options, name), who=f"tools.{name}",
                                  fix="leave it out for its default", code="option-not-positive")
        if config.rollout.generate == "tools":
            from miles_tools.conversation import check as check_tools

            check_tools(options, config)
        if config.rollout.generate == "agent":
            from miles_tools.agent import check

            check(options, config)

    @hookimpl(name="tools")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """Every sample of a group by a conversation of its own."""
        if self._conversations is None:
            from miles_tools.conversation import of

            self._conversations = of(self.options, self._config, self._calls())
        return await self._conversations.group(prompt, generation)

    @hookimpl("reward", name="unit-tests")
    async def unit_tests(self, sample: Sample) -> float:
        """1 when the code of the answer passes the tests of its prompt, or the share that it passes."""
        if self._unit_tests is None:
            from miles_tools.unit_tests import UnitTests

            self._unit_tests = UnitTests(self._calls(), self.options.unit_tests_key,
                                         share=self.options.unit_tests_share, seconds=self.options.unit_tests_timeout)
        return await self._unit_tests.score(sample)

    @hookimpl("generate", name="agent")
    async def agent(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """Every sample of a group by an agent that talks to the session endpoint."""
        if self._agents is None:
            from miles_tools.agent import Agents

            self._agents = Agents(self.options, self._config)
        return await self._agents.generate(prompt, generation)

    @hookimpl("reward", name="agent")
    def agent_reward(self, sample: Sample) -> float:
        """What the sample's agent gave it."""
        from miles_tools.agent import reward_of

        return reward_of(sample)

    @hookimpl
    def finish(self) -> None:
        """End the session endpoint and the sandbox."""
        if self._agents is not None:
            self._agents.stop()
        if self._sandbox is not None:
            self._sandbox.close()

    def _calls(self) -> Sandbox:
        if self._sandbox is None:
            from miles_tools.sandbox import Limits, Sandbox

            options = self.options
            limits = Limits(options.sandbox_wall_time, options.sandbox_cpu_time, options.sandbox_memory << 20,
                            options.sandbox_disk << 20, options.sandbox_processes, output=options.sandbox_output)
            self._sandbox = Sandbox(limits, options.sandbox_workers, options.sandbox_isolation)
        return self._sandbox
