"""How an agent is called: a function of Python in a thread of its own, or a program in a process group of its own.

Either may block, hang or fail without the run noticing more than that. A thread cannot be killed: a function that goes
on after its time is left behind, and its key does not work any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from miles_core.errors import ConfigError
from miles_core.hosts import in_daemon_thread
from miles_core.plugins.load import import_file
from miles_tools.foreign import describe, loads, readable

GRACE = 2.0
"""Seconds between asking a program or a coroutine to end and not waiting for it any longer."""
KEPT = 2**16
"""Bytes of a program's output that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an agent is given.

    Args:
        base_url, api_key: of its session, for any OpenAI client; for Anthropic's the address without /v1.
        messages: the prompt's.
        metadata: what else the row of the dataset holds.
        label: the row's.
    """

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    label: str | None


class AgentFailed(Exception):
    """An agent came to no end that counts; `reason` is a word that can be counted."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, readable(detail)


def load_function(path: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION or MODULE:FUNCTION names.

    Raises:
        ConfigError: it does not exist, its module cannot be imported, or it takes other arguments than a Task has.
    """
    where, _, name = path.rpartition(":")
    who = f"--agent {path}"
    try:
        module = import_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
        function: Callable[..., Any] = getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{where} has no {name!r}", code="agent-function-missing", who=who,
                          fix="name one of its functions") from None
    except (Exception, SystemExit) as error:
        raise ConfigError("the agent cannot be imported", got=f"{type(error).__name__}: {error}", who=who,
                          fix="fix the import, or install what it needs", code="agent-import-failed") from error
    if not callable(function):
        raise ConfigError("the agent is not a function", code="agent-not-a-function", got=type(function).__name__,
                          who=who, fix="name a function")
    known = tuple(Task.__dataclass_fields__)
    parameters = inspect.signature(function).parameters.values()
    strange = [p.name for p in parameters if p.name not in known and p.default is p.empty
               and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if strange:
        raise ConfigError(f"the agent takes {strange[0]!r}, which is not passed to agents", who=who,
                          fix=f"it may take {', '.join(known)}", code="agent-argument-unknown")
    return function


def find_function(path: str) -> None:
    """Whether there is a file or module to load from, without running it.

    Raises:
        ConfigError: not FILE.py:FUNCTION or MODULE:FUNCTION, or no such file or package.
    """
    where, _, name = path.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError("not the name of a function", code="agent-path-malformed", got=path, who="tools.agent",
                          fix="write FILE.py:FUNCTION or MODULE:FUNCTION")
    if where.endswith(".py"):
        exists = Path(where).is_file()
    else:  # the top-level package only: a submodule would import it
        exists = importlib.util.find_spec(where.partition(".")[0]) is not None
    if not exists:
        raise ConfigError("no such file or package", code="agent-file-missing", got=where, who="tools.agent",
                          fix="check --agent")


async def call_function(function: Callable[..., Any], task: Task) -> object:
    """What the function returns; a coroutine function runs in an event loop of its thread.

    Cancelling the call cancels the coroutine and waits for its end for GRACE seconds; a function that blocks is left
    behind.

    Raises:
        AgentFailed: it raised.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = {name: getattr(task, name) for name in Task.__dataclass_fields__ if open_ended or name in parameters}
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    ended = threading.Event()

    async def coroutine() -> object:
        running.append((asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())))
        return await function(**arguments)

    def work() -> object:
        try:
            return asyncio.run(coroutine()) if inspect.iscoroutinefunction(function) else function(**arguments)
        except BaseException as error:  # whatever it is, it is the agent's
            raise AgentFailed("agent_raised", f"the agent raised {describe(error)}{_place(error, function)}") from error
        finally:
            ended.set()

    try:
        return await in_daemon_thread(work)
    except asyncio.CancelledError:
        for loop, inner in running:
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(inner.cancel)
        for _ in range(int(GRACE / 0.05)) if running else ():
            if ended.is_set():
                break
            await asyncio.sleep(0.05)
        raise


def _place(error: BaseException, function: Callable[..., Any]) -> str:
    """In which line of the function's own file something was raised, to be appended."""
    file = getattr(inspect.getmodule(function), "__file__", None)
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f", in {file}:{lines[-1].lineno} {lines[-1].name}" if lines else ""


async def call_program(command: Sequence[str], task: Task) -> object:
    """Run a program: the prompt as JSON on stdin, the session in its environment. What its output says is `result_of`.

    Its process group is killed when it ends, however it ends, and when the call is cancelled.

    Raises:
        AgentFailed: it cannot be started, or ended with another code than 0.
    """
    payload = json.dumps({"messages": task.messages, "metadata": task.metadata, "label": task.label})
    environment = {**os.environ, "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key,
                   "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": task.api_key}
    with tempfile.TemporaryFile() as stdin:  # a file: a program that does not read it blocks nothing
        stdin.write(payload.encode())
        stdin.seek(0)
        try:
            transport, watched = await asyncio.get_running_loop().subprocess_exec(
                _Watched, *command, stdin=stdin, env=environment, start_new_session=True)
        except OSError as error:
            raise AgentFailed("agent_not_started", f"{command[0]}: {error.strerror or error}") from error
    try:
        await watched.exited.wait()
        code = transport.get_returncode()
    finally:
        await _end(transport, watched)
    if code != 0:
        complaint = watched.outputs[2].decode(errors="replace").strip()[-500:] or "nothing on stderr"
        raise AgentFailed("agent_exit", f"the agent ended with code {code}: {complaint}")
    return result_of(watched.outputs[1].decode(errors="replace"))


def result_of(output: str) -> object:
    """What a program tells of itself: the JSON object in the last line of its output, None where there is none."""
    lines = output.strip().splitlines()
    try:
        result = loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return result if isinstance(result, Mapping) else None


class _Watched(asyncio.SubprocessProtocol):
    """Keeps the end of what a program writes, and knows when it has ended and when no process can write any more."""

    def __init__(self) -> None:
        self.outputs = {1: bytearray(), 2: bytearray()}
        self.exited, self.drained = asyncio.Event(), asyncio.Event()
        self._open = 2

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.outputs[fd] += data
        del self.outputs[fd][:-KEPT]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open -= 1
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


async def _end(transport: asyncio.SubprocessTransport, watched: _Watched) -> None:
    """End what is left of the process group; what a process that left the group still writes is not waited for."""
    try:
        if not watched.exited.is_set():
            _signal(transport.get_pid(), signal.SIGTERM)
            await _bounded(watched.exited)
        _signal(transport.get_pid(), signal.SIGKILL)
        await _bounded(watched.exited)
        await _bounded(watched.drained)
    finally:
        transport.close()


async def _bounded(event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), GRACE)


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
