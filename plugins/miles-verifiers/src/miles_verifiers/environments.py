"""Environments by name. Each is loaded once, and plays its episodes in a thread with an event loop of its own.

An environment's code is somebody else's: what blocks there, a scorer above all, must not stop the run's own loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_tools.agent_call import AgentFailed

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    import verifiers.v1 as vf

HARNESS = "miles-verifiers"
PATIENCE = 5.0
"""Seconds that environments have to end what they have started."""


class Environments:
    """The environments of a run.

    Args:
        tables: by name, each as verifiers' own [env] table has it; any other name is the id of a taskset.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Any]]):
        self._tables = tables
        self._loaded: dict[str, vf.Env] = {}
        self._serving: dict[str, tuple[asyncio.Future[None], asyncio.Task[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()

    def load(self, name: str) -> vf.Env:
        """The environment of that name.

        Raises:
            ConfigError: it is not installed, refuses its table, or has not one role for the policy.
        """
        if name not in self._loaded:
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.utils.loaders import load_environment

            who = f"verifiers.envs.{name}"
            try:
                config = self._config(name)
                env = load_environment(config)
            except (Exception, SystemExit) as error:
                raise ConfigError("the environment cannot be loaded", got=f"{type(error).__name__}: {error}", who=who,
                                  code="verifiers-env-unloadable",
                                  fix="install its package, or correct what is named above") from error
            policy = [role for role, agent in agent_config_fields(config).items() if agent.client is None]
            if len(policy) != 1:
                raise ConfigError("the policy plays one role of an environment", got=", ".join(policy) or "none",
                                  code="verifiers-roles", who=who,
                                  fix=f"give each other role a client of its own: [{who}.ROLE.client]")
            self._loaded[name] = env
        return self._loaded[name]

    async def play(self, name: str, task: vf.Task, address: str) -> dict[str, float]:
        """One episode of a task, its policy at an address of OpenAI's protocol: the reward, and what was measured.

        Raises:
            AgentFailed: the episode failed.
            ConfigError: the environment cannot be started.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_turn, args=(self._loop,), name="verifiers", daemon=True)
            self._thread.start()
        episode = asyncio.run_coroutine_threadsafe(self._episode(name, task, address), self._loop)
        return figures_of(await asyncio.wrap_future(episode))

    def close(self) -> None:
        """End what environments have started; bounded."""
        if self._loop is None or self._thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(PATIENCE)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(PATIENCE)

    def _config(self, name: str) -> vf.EnvConfig:
        """As verifiers resolves it; a role "agent" that leaves them out has the loop and the processes of this host."""
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import default_harness_id, environment_class, resolve_env_config

        table: dict[str, Any] = {"taskset": {"id": name}, **self._tables.get(name, {})}
        taskset = table["taskset"]["id"]
        if environment_class(taskset, table.get("id", "")) is vf.SingleAgentEnv:
            own = {} if default_harness_id(taskset) == taskset else {"harness": {"id": HARNESS}}
            table["agent"] = {**own, "runtime": {"type": "subprocess"}, **table.get("agent", {})}
        return resolve_env_config(table)

    async def _episode(self, name: str, task: vf.Task, address: str) -> vf.Episode:
        import verifiers.v1 as vf

        env = self._loaded[name]
        if name not in self._serving:
            ready = asyncio.get_running_loop().create_future()
            self._serving[name] = ready, asyncio.ensure_future(self._serve(name, ready))
        await asyncio.shield(self._serving[name][0])
        client = vf.EvalClientConfig(base_url=address, api_key_var="MILES_SESSION_KEY")  # the address has it already
        return await env.run_episode(task, vf.ModelContext(model="miles", client=client))

    async def _serve(self, name: str, ready: asyncio.Future[None]) -> None:
        """Hold what all episodes share; begun and ended in one task, as its parts ask for."""
        try:
            async with self._loaded[name].serving():
                ready.set_result(None)
                await self._ended.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(ConfigError("the environment cannot be started", code="verifiers-env-not-started",
                                            got=f"{type(error).__name__}: {error}", who=f"verifiers.envs.{name}",
                                            fix="try it by itself: vf-eval"))

    async def _end(self) -> None:
        self._ended.set()
        await asyncio.gather(*(keeper for _, keeper in self._serving.values()), return_exceptions=True)


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def figures_of(episode: vf.Episode) -> dict[str, float]:
    """The weighted sum of an episode's rewards as "reward", each by its name, its metrics, and whether it was cut.

    Raises:
        AgentFailed: it has no end that counts.
    """
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        detail = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
        raise AgentFailed("verifiers_failed", detail)
    trace = next(trace for trace in episode.traces if trace.agent.trainable)
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    cut = {"truncated": 1.0} if trace.is_truncated else {}
    return metrics | rewards | cut | ({"reward": trace.reward} if rewards else {})
