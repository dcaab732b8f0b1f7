"""Hosts: where a plain object runs. One asynchronous handle for a thread of this process and for a spawned process.

`await handle.method(...)` runs the object's method there; calls are served one after the other, in order. The object
is built by the host from a factory and its arguments, so nothing alive is ever sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import fcntl
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from miles_core.errors import DiedError, MilesError, TrainError, WaitError
from miles_core.messages import Line, Message, answered, portable
from miles_core.types import Rank
from miles_core.waits import within

T = TypeVar("T")

class Handle:
    """The asynchronous face of a hosted object.

    `timeout` bounds every call, in seconds; None waits for ever. What is still running when it expires is abandoned.
    """

    timeout: float | None = None

    def __init__(self, name: str):
        self._name = name

    async def call(self, method: str, *args: object) -> Any:
        """Run one method of the hosted object; its exception is raised here."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the host; bounded."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._bounded(method, *args)

    async def _bounded(self, method: str, *args: object) -> Any:
        """
        Raises:
            WaitError: the call took longer than `timeout`.
        """
        def late() -> WaitError:
            return WaitError(f"the {self._name} did not finish {method}() within {self.timeout:g} s",
                             code="host-call-timeout", fix="see logs/run.log, or raise --trainer-timeout")

        async with within(self.timeout, late):
            return await self.call(method, *args)


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work beside the loop. A daemon thread: work that hangs must not keep the process alive."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    answer: asyncio.Future[T] = loop.create_future()
    threading.Thread(target=_do, args=(partial(context.run, work), answer), daemon=True).start()
    return await answer


class ThreadHost(Handle):
    """The object lives in one daemon thread of this process, so that a producer overlaps it."""

    def __init__(self, name: str, factory: Callable[..., Any], *args: object):
        super().__init__(name)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(factory, args), name=name, daemon=True)
        self._thread.start()

    async def call(self, method: str, *args: object) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._inbox.put((answer, method, args))
        return await answer

    async def close(self) -> None:
        self._inbox.put(None)
        await in_daemon_thread(lambda: self._thread.join(5))

    def _serve(self, factory: Callable[..., Any], args: tuple[Any, ...]) -> None:
        hosted, lives = Instance(factory, args), True
        while lives and (task := self._inbox.get()) is not None:
            answer, method, arguments = task
            lives = _do(partial(hosted.call, method, arguments), answer)
        hosted.close()


class ProcessHost(Handle):
    """The object lives in a spawned process; arguments and results are pickled between the two, both our own code.

    A process that dies ends the call that waits for it with its name and exit code. It never outlives this one: an
    orphan could publish a checkpoint beside a resumed run.

    Args:
        log: file that takes what the process prints, in place of this one's output.
        environment: variables that it gets beside this one's.
    """

    def __init__(self, name: str, factory: Callable[..., Any], *args: object, log: Path | None = None,
                 environment: Mapping[str, str] | None = None):
        super().__init__(name)
        context = multiprocessing.get_context("spawn")
        self._pipe, far = context.Pipe()
        self._log = log
        served = (far, os.getpid(), log, factory, args)
        self._process = context.Process(target=_serve_process, args=served, name=name, daemon=True)
        with _without_interrupts(), _with_environment(environment or {}):
            self._process.start()
        far.close()
        self._line, self._turn = Line(self._pipe), asyncio.Lock()

    def pack(self, args: tuple[object, ...]) -> Message:
        return Message(args)

    async def call(self, method: str, *args: object) -> Any:
        return await self.deliver(method, args)

    async def deliver(self, method: str, args: tuple[Any, ...] | Message) -> Any:
        async with self._turn:
            # Not the loop's executor: it has fewer threads than a trainer may have ranks, which wait for one another.
            return await in_daemon_thread(lambda: self._ask(method, args))

    async def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        await in_daemon_thread(lambda: self._process.join(5))
        self.kill()

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, method: str, args: tuple[Any, ...] | Message) -> Any:
        message = self.pack(args) if isinstance(args, tuple) else args
        try:
            result, error, trace = self._line.ask(self._process.pid, method, message)
        except (EOFError, OSError):
            self._process.join(5)
            output = "its output above" if self._log is None else f"the end of {self._log}"
            raise DiedError(f"the process {self._name!r} died in {method}()", code="host-process-died",
                            got=f"exit code {self._process.exitcode}",
                            fix=f"see {output}; a negative code is a signal, -9 often a lack of memory") from None
        return unpacked(self._name, result, error, trace)


class RankGroup(Handle):
    """The ranks of a trainer behind one handle: a call goes to all of them and is over when all have answered.

    Answers are one: of dicts the first rank that has a key gives its value, of others the first that is not None
    counts. An error of one rank leaves the others waiting in a collective, so it ends them all and every later call.

    Args:
        ranks: their handles, each with `kill()`, and with `pack()`: the arguments of a call as `deliver()` takes them.
        release: called when the group is closed.
    """

    GRACE = 2.0
    """Seconds to wait for the errors of other ranks: the first to be heard of is often a victim, not the culprit."""

    def __init__(self, name: str, ranks: Sequence[Handle], release: Callable[[], object] = lambda: None):
        super().__init__(name)
        self._ranks, self._release, self._packing = ranks, release, asyncio.Lock()
        self._broken: BaseException | None = None

    async def call(self, method: str, *args: object) -> Any:
        if self._broken is not None:
            raise self._broken
        async with self._packing:  # calls keep their order
            packed = await in_daemon_thread(lambda: self._ranks[0].pack(args)) if args else args
            calls = [asyncio.ensure_future(rank.deliver(method, packed)) for rank in self._ranks]
        try:
            done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.exception() for call in done) and pending:
                more, _ = await asyncio.wait(pending, timeout=self.GRACE)
                done |= more
        except asyncio.CancelledError:
            for call in calls:
                call.cancel()
            abandoned = f"the {self._name} was abandoned in {method}()"
            self._end(TrainError(abandoned, code="host-abandoned", fix="see the error before this one"))
            raise
        errors = [error for call in calls if call in done and (error := call.exception())]
        if errors:
            raise self._end(_culprit(errors))
        return _one([call.result() for call in calls])

    async def close(self) -> None:
        if self._broken is None:
            await asyncio.gather(*(rank.close() for rank in self._ranks))
        self._release()

    def _end(self, error: BaseException) -> BaseException:
        self._broken = error
        for rank in self._ranks:
            rank.kill()
        return error


def process_group(name: str, ranks: int, factory: Callable[..., Any], *args: object, logs: Path | None = None,
                  environment: Mapping[str, str] | None = None) -> Handle:
    """A spawned process for each rank; `factory(*args, rank)` is made in each. They find each other by a file.

    Args:
        logs: folder of NAME-rank-I.log, which take what the processes print.
        environment: variables that they get beside this one's.
    """
    def host(called: str, rank: Rank) -> ProcessHost:
        log = logs and logs / f"{name}-rank-{rank.index}.log"
        return ProcessHost(called, factory, *args, rank, log=log, environment=environment)

    if ranks == 1:
        return host(name, Rank())
    folder = meeting_folder()
    at = f"file://{folder.name}/ranks"
    return RankGroup(name, [host(f"{name} rank {i}", Rank(i, ranks, i, at)) for i in range(ranks)], folder.cleanup)


def meeting_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in which ranks find each other, locked while this process lives; what killed ones left is removed."""
    for left in Path(tempfile.gettempdir()).glob("miles-ranks-*/lock"):
        with contextlib.suppress(OSError), open(left, "r+") as lock:  # no waiting for a pipe's writer
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    folder = tempfile.TemporaryDirectory(prefix="miles-ranks-")
    fcntl.flock(os.open(f"{folder.name}/new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), fcntl.LOCK_EX)
    os.rename(f"{folder.name}/new", f"{folder.name}/lock")  # no other process finds it before it is locked
    return folder


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _culprit(errors: Sequence[BaseException]) -> BaseException:
    """An error of ours before one of a collective that lost its peer; a death before both."""
    def weight(error: BaseException) -> tuple[bool, bool]:
        return not isinstance(error, DiedError), not isinstance(error, MilesError)

    first, *others = sorted(errors, key=weight)
    if others:
        first.add_note(f"{len(others)} other rank(s) ended with it, the first by: {str(others[0])[:200]}")
    return first


def _one(answers: Sequence[Any]) -> Any:
    known = [answer for answer in answers if answer is not None]
    if known and isinstance(known[0], dict):
        return {key: value for answer in reversed(known) for key, value in answer.items()}
    return known[0] if known else None


class Instance:
    """An object, made where it runs; if that failed, each call raises the error."""

    def __init__(self, factory: Callable[..., Any], args: Sequence[Any]):
        self._object: Any = None
        self._failure: BaseException | None = None
        try:
            self._object = factory(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it is, every call raises it
            self._failure = error

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self._failure is not None:
            raise self._failure
        return getattr(self._object, method)(*args)

    def answer(self, method: str, args: tuple[Any, ...]) -> tuple[Any, Any, str | None]:
        """What comes of a call, (result, error, traceback), in a form that survives pickling. See `unpacked`."""
        try:
            result = self.call(method, args)
            return (list(result) if hasattr(result, "__next__") else result), None, None
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is sent to the caller and raised there
            return None, portable(error), traceback.format_exc()

    def close(self) -> None:
        """Let the object leave groups and connections; it ends anyway, whatever comes of that."""
        with contextlib.suppress(Exception):
            if hasattr(self._object, "close"):
                self._object.close()


def write_to(log: Path) -> None:
    """Let a file take what this process prints from here on, and its log records from INFO up."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, descriptor)
    os.close(file)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def unpacked(name: str, result: Any, error: BaseException | None, trace: str | None) -> Any:
    """The result of an `Instance.answer`, or its error with a note of where it happened."""
    if error is None:
        return result
    if not isinstance(error, MilesError):
        error.add_note(f"in process {name}:\n{trace}")
    raise error


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however it ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started inside ignores Ctrl-C, which a terminal sends to all: the driver alone decides what ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _with_environment(more: Mapping[str, str]) -> Iterator[None]:
    """A process started inside has these variables from its first instruction on: some libraries read them early."""
    before = {name: os.environ[name] for name in more if name in os.environ}
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _serve_process(pipe: Any, parent: int, log: Path | None, factory: Callable[..., Any],
                   args: tuple[Any, ...]) -> None:
    _die_with(parent)
    if log is not None:
        write_to(log)
    hosted, line = Instance(factory, args), Line(pipe)
    while (task := line.asked()) is not None:
        pipe.send(answered(hosted.answer(*task), line.memory))
    hosted.close()


def _do(work: Callable[[], T], answer: asyncio.Future[T]) -> bool:
    """Let who awaits the answer have what comes of work in this thread; False if nobody does: the run has ended."""
    try:
        result, error = work(), None
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it is raised where the answer is awaited
        result, error = None, caught
    try:
        answer.get_loop().call_soon_threadsafe(_settle, answer, result, error)
    except RuntimeError:
        return False
    return True


def _settle(answer: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if answer.done():
        return
    if isinstance(error, SystemExit | StopIteration):  # a future refuses the one, and the loop would end by the other
        cause, error = error, RuntimeError(f"{type(error).__name__}: {error}")
        error.__cause__, error.__notes__ = cause, getattr(cause, "__notes__", [])
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
