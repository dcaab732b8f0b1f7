"""A sandbox of processes: Python functions by source, run with limits, each in a process of its own.

What happens in there is sandbox_supervisor.py; this is the driver's side. A supervisor serves one call at a time and is
replaced when it does not answer. Which isolation the kernel allows is found out once, by trying.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import queue
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from miles_core.errors import ConfigError, RolloutError

START = 30.0
"""Seconds that a supervisor may take to start."""
GRACE = 15.0
"""Seconds beyond a call's wall time after which its supervisor is given up."""
PROGRAM = """\
import sys
sys.path.insert(0, sys.argv.pop(1))
from miles_tools.sandbox_supervisor import main
del sys.path[0]
main()"""
"""The driver's own copy of the supervisor: -I reads no PYTHONPATH, and both sides have to be of one version."""
USERS = range(61184, 65520)
"""Numbers that systemd reserves for users of a moment (systemd.io/UIDS-GIDS)."""


class SandboxError(RolloutError):
    """The sandbox itself failed: nothing is known about the code that it was given."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use.

    Args:
        wall, cpu: seconds; CPU seconds are counted per process, in whole ones.
        memory: bytes of address space of each process.
        disk: bytes in the working directory, and of a single file.
        processes: processes and threads at once.
        files: descriptors of each process.
        output: bytes that it may print, and of its JSON result.
    """

    wall: float = 5.0
    cpu: float = 5.0
    memory: int = 1 << 30
    disk: int = 16 << 20
    processes: int = 16
    files: int = 64
    output: int = 1 << 16


@dataclass(frozen=True, slots=True)
class Isolation:
    """How a supervisor confines.

    Args:
        namespaces: process, mount, network and IPC namespaces of its own; needs user namespaces.
        unprivileged: another user than the driver's; needs root.
    """

    namespaces: bool
    unprivileged: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended.

    Args:
        kind: "ok"; "raised"; or the limit that ended it: "time", "cpu", "memory", "disk", "processes", "output"; or
            "ended", without an answer.
        value: what the function returned, through JSON.
        output: what was printed, to stdout or stderr.
        detail: the exception, signal or exit status.
        seconds: wall time.
    """

    kind: str
    value: Any = None
    output: str = ""
    detail: str = ""
    seconds: float = 0.0


def explain(outcome: Outcome, limits: Limits) -> str:
    """One sentence on a call that did not end well."""
    what = {
        "raised": outcome.detail,
        "time": f"it took longer than {limits.wall:g} s",
        "cpu": f"it used more than {limits.cpu:g} CPU seconds",
        "memory": f"it needed more than {limits.memory >> 20} MiB of memory",
        "disk": f"it wrote more than {limits.disk >> 20} MiB",
        "processes": f"it started more than {limits.processes} processes",
        "output": f"it printed or returned more than {limits.output} bytes",
        "ended": f"it ended without an answer ({outcome.detail})",
    }[outcome.kind]
    beside = outcome.detail if outcome.detail and outcome.kind in ("memory", "disk", "processes") else ""
    return f"error: {what}{f': {beside}' if beside else ''}"


def candidates(wanted: str) -> list[Isolation]:
    """What to try, the strictest first. Tools are root's without namespaces only if "plain" is asked for by name.

    Args:
        wanted: "auto", "namespaces" or "plain".
    """
    root = os.getuid() == 0
    kinds = {"auto": (True, False), "namespaces": (True,), "plain": (False,)}[wanted]
    kinds_tried = [Isolation(namespaces, unprivileged) for namespaces in kinds for unprivileged in (True, False)]
    return [one for one in kinds_tried if one.unprivileged <= root
            and not (root and wanted == "auto" and one == Isolation(namespaces=False, unprivileged=False))]


def weakness(isolation: Isolation) -> str | None:
    """What a tool can do that it should not, in words; None where it cannot."""
    root = os.getuid() == 0 and not isolation.unprivileged
    if isolation.namespaces:
        return "as root, so that they can read every file, secrets among them" if root else None
    if root:
        return "as root and without namespaces: they can read and write every file and end every process"
    reach = "the network and all that other users may read or write" if isolation.unprivileged else (
        "the network, all that their user may read or write, and all of its processes")
    return f"without namespaces, so that they reach {reach}"


class Sandbox:
    """Runs functions; safe to call from several threads at once.

    Args:
        workers: how many calls may run side by side; a supervisor is started when it is first needed.
        isolation: "auto" takes the strictest that the kernel allows, "namespaces" insists, "plain" goes without.
    """

    def __init__(self, limits: Limits = Limits(), workers: int = 2, isolation: str = "auto"):
        self.limits, self._wanted = limits, isolation
        self._chosen: Isolation | None = None
        self._choosing = threading.Lock()
        self._idle: queue.LifoQueue[_Supervisor | None] = queue.LifoQueue()
        for _ in range(workers):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(workers, "sandbox")

    @property
    def isolation(self) -> Isolation:
        """The one in use; the first look tries.

        Raises:
            ConfigError: the kernel allows none that is wanted.
        """
        with self._choosing:
            if self._chosen is None:
                self._chosen = self._probe()
            return self._chosen

    async def call(self, source: str, file: str, function: str, arguments: dict[str, Any]) -> Outcome:
        """`run` beside the loop, as many at once as there are workers."""
        work = self._threads.submit(self.run, source, file, function, arguments)
        return await asyncio.wrap_future(work)

    def run(self, source: str, file: str, function: str, arguments: dict[str, Any]) -> Outcome:
        """Execute `source` in a fresh process and call one of its functions there.

        Args:
            file: the name that tracebacks show.
            arguments: by keyword; have to fit into JSON, as what the function returns.

        Raises:
            SandboxError: the sandbox failed, not the code.
        """
        isolation, supervisor = self.isolation, self._idle.get()
        try:
            supervisor = supervisor or _Supervisor(self.limits, isolation)
            return supervisor.ask({"source": source, "file": file, "function": function, "arguments": arguments})
        except BaseException as error:
            if supervisor is not None:
                supervisor.close()
            supervisor = None
            if isinstance(error, _UnderWay) and not (isolation.namespaces or isolation.unprivileged):
                return Outcome("ended", detail=str(error))  # a tool of the same user can end or stop it
            raise
        finally:
            self._idle.put(supervisor)

    def close(self) -> None:
        """End the supervisors that are idle; those at work end when their call does, or with this process."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for supervisor in [self._idle.get() for _ in range(self._idle.qsize())]:
            if supervisor is not None:
                supervisor.close()
            self._idle.put(None)

    def _probe(self) -> Isolation:
        reasons: list[str] = []
        for isolation in candidates(self._wanted):
            supervisor = None
            try:
                supervisor = _Supervisor(dataclasses.replace(self.limits, wall=10.0), isolation)
                call = {"source": "def two():\n    import decimal, fractions\n    return 2", "file": "probe",
                        "function": "two", "arguments": {}}
                if (outcome := supervisor.ask(call)).value == 2:
                    weak = weakness(isolation)
                    if weak and (self._wanted != "plain" or "as root" in weak):
                        logging.getLogger("miles_tools").warning("tools run %s (%s)", weak, "; ".join(reasons))
                    return isolation
                reasons.append(f"{isolation}: {outcome.kind} {outcome.detail}")
            except SandboxError as error:
                reasons.append(f"{isolation}: {error.got}")
            finally:
                if supervisor is not None:
                    supervisor.close()
        raise ConfigError("the sandbox cannot be set up here",
                          code="sandbox-unavailable", got="; ".join(reasons), who="tools.sandbox_isolation",
                          fix="allow unprivileged user namespaces, raise tools.sandbox_memory, or run as another user "
                          "than root; --tools.sandbox-isolation plain works without namespaces")


class _UnderWay(SandboxError):
    """The supervisor ended or hung during a call."""


class _Supervisor:
    """One supervisor process: a line of JSON in, a line of JSON out."""

    def __init__(self, limits: Limits, isolation: Isolation):
        self._wall, self._rest = limits.wall, b""
        self._work = None if isolation.namespaces else tempfile.mkdtemp(prefix="miles-tools-")
        user = USERS[secrets.randbelow(len(USERS))] if isolation.unprivileged else None
        settings = {**dataclasses.asdict(limits), "namespaces": isolation.namespaces, "user": user,
                    "work": self._work or _private()}
        root = str(Path(__file__).parents[1])
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-c", PROGRAM, root, json.dumps(settings)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
            env={"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self._asked, self._told = cast("IO[bytes]", self._popen.stdin), cast("IO[bytes]", self._popen.stdout)
        try:
            if not (answer := self._read(START)).get("ready"):
                raise SandboxError("the sandbox did not start", code="sandbox-not-started", got=answer.get("detail"))
        except SandboxError:
            self.close()
            raise

    def ask(self, call: dict[str, Any]) -> Outcome:
        """
        Raises:
            SandboxError: no answer, or one that says so.
        """
        try:
            self._asked.write(json.dumps(call).encode() + b"\n")
            self._asked.flush()
        except OSError as error:
            raise SandboxError("a sandbox process ended", code="sandbox-process-gone", got=error.strerror) from None
        answer = self._read(self._wall + GRACE)
        if answer.get("kind") in (None, "ours", "given up"):
            raise SandboxError("the sandbox failed", code="sandbox-failed", got=answer.get("detail"))
        return Outcome(**answer)

    def close(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(OSError):
            self._asked.close()
        try:
            self._popen.wait(3)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._told.close()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    def _read(self, seconds: float) -> dict[str, Any]:
        deadline, pipe = time.monotonic() + seconds, self._told.fileno()
        ready = select.poll()  # select() knows no descriptor above 1023, and a driver has many
        ready.register(pipe, select.POLLIN)
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not ready.poll(1000 * left):
                raise _UnderWay(f"a sandbox process did not answer within {seconds:g} s", code="sandbox-timeout")
            data = os.read(pipe, 1 << 16)
            if not data:
                raise _UnderWay("a sandbox process ended", code="sandbox-process-ended",
                                got=f"exit status {self._popen.wait()}",
                                fix=f"run {sys.executable} -I -c 'import miles_tools.sandbox_supervisor' to see why")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
            return answer
        except ValueError:
            raise SandboxError("a sandbox process answered with something other than JSON",
                               got=repr(line[:100]), code="sandbox-answer-not-json") from None


def _private() -> str:
    """The directory over which a tool's own is mounted: /tmp, unless Python lies in it."""
    inside = any(os.path.realpath(path).startswith("/tmp/") for path in (sys.prefix, sys.base_prefix, *sys.path))
    return "/mnt" if inside else "/tmp"
