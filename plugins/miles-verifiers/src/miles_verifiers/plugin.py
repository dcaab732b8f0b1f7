"""The plugin: options and hooks."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.config import RunConfig, option
from miles_core.errors import ConfigError
from miles_core.hookspecs import hookimpl
from miles_core.reading import format_of
from miles_verifiers.names import environment_of, is_installed

if TYPE_CHECKING:
    from miles_tools.agent import Agents
    from miles_tools.agent_call import Task

    from miles_core.stages.prompts import Records
    from miles_core.stages.rollout import Generation
    from miles_core.types import Prompt, Sample
    from miles_verifiers.environments import Environments
    from miles_verifiers.rows import TaskRows

NAME = "verifiers"


@dataclass(frozen=True, kw_only=True)
class VerifiersOptions:
    """Which environments there are, and what their episodes may take."""

    envs: dict[str, dict[str, object]] | None = option(
        None, "Environments by name, each as verifiers' own [env] table has it; as a flag, JSON.")
    timeout: float = option(600.0, "Seconds allowed for one episode.", within=(0.01,))
    concurrency: int = option(64, "Maximum number of concurrent episodes.", within=(1,))
    conversations: int = option(
        1, "Maximum number of conversations of one episode: branches, summaries, agents that a harness sends out.",
        within=(1,))


class Verifiers:
    """Environments of the library verifiers: their tasks as prompts, their episodes as samples, their rewards."""

    provides = ("resumes:verifiers", "made:verifiers")

    def __init__(self, options: VerifiersOptions, config: RunConfig):
        self._options, self._config, self._rows = options, config, dict[str, "TaskRows"]()
        self._tables = dict(options.envs or {})
        self._agents: Agents | None = None
        self._reading = asyncio.Lock()
        self._refuse(config)

    @functools.cached_property
    def _environments(self) -> Environments:
        from miles_verifiers.environments import Environments

        return Environments(self._tables)

    @hookimpl("read_rows", name="verifiers")
    def rows(self, path: str, most: int | None) -> Records:
        """The tasks of an environment, gsm8k.verifiers, or some of them, gsm8k.verifiers@[0:256]."""
        if path not in self._rows:
            from miles_core.stages.prompts import rows_of
            from miles_verifiers.rows import TaskRows

            config, name = self._config, environment_of(path)
            every = [rows_of(config, one) for one in (None, *config.eval.every)]
            keys = sorted({one.input_key for one in every}), sorted({one.label_key for one in every if one.label_key})
            self._rows[path] = TaskRows(path, self._environments.load(name), self._tables.get(name, {}), keys,
                                        config.rollout.apply_chat_template)
        return self._rows[path]

    @hookimpl(name="verifiers")
    async def generate(self, prompt: Prompt, generation: Generation) -> list[Sample]:
        """Every sample of a group by an episode of its own, in which the session endpoint is the policy."""
        if self._agents is None:
            from miles_tools.agent import Agents
            from miles_tools.plugin import ToolsOptions

            options = self._options
            limits = ToolsOptions(agent_timeout=options.timeout, agent_concurrency=options.concurrency,
                                  agent_conversations=options.conversations)
            self._agents = Agents(limits, self._config, self._play)
        return await self._agents.generate(prompt, generation)

    async def _play(self, asked: Task, address: str) -> dict[str, float]:
        meant = asked.metadata[NAME]
        if meant["path"] not in self._rows:  # read once more: who reads prompts is another instance of this plugin
            async with self._reading:
                await asyncio.to_thread(self.rows, meant["path"], None)
        task = self._rows[meant["path"]].tasks[meant["row"]]
        return await self._environments.play(meant["env"], task, f"{address}/v1")

    @hookimpl
    def finish(self) -> None:
        """End the session endpoint and the environments."""
        if self._agents is not None:
            self._agents.stop()
        if "_environments" in vars(self):
            self._environments.close()

    def _refuse(self, config: RunConfig) -> None:
        """
        Raises:
            ConfigError: tasks of what is not installed, prompts that are no tasks, or no chat template, by which a
                conversation goes on.
        """
        paths = [path for path in (config.rollout.prompt_data, *(one["path"] for one in config.eval.every)) if path]
        for name in {environment_of(path) for path in paths if format_of(path) == NAME}:
            taskset: Any = self._tables.get(name, {}).get("taskset") or {"id": name}
            if isinstance(taskset, dict) and not is_installed(str(taskset.get("id"))):
                raise ConfigError("there is no such taskset", code="verifiers-taskset-missing", got=taskset.get("id"),
                                  who=f"{name}.verifiers", fix="install its package, or have its module on PYTHONPATH")
        if config.rollout.generate != NAME:
            return
        if other := [path for path in paths if format_of(path) != NAME]:
            raise ConfigError("an episode begins with a task of an environment", code="verifiers-no-task",
                              got=other[0], who="rollout.generate = 'verifiers'",
                              fix="name the tasks of an environment: NAME.verifiers, or NAME.verifiers@[0:64]")
        if not config.rollout.apply_chat_template:
            raise ConfigError("episodes are conversations, and the chat template writes them",
                              code="verifiers-without-chat-template", who="rollout.generate = 'verifiers'",
                              got="apply_chat_template is off", fix="--apply-chat-template")
