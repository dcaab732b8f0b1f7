"""ServerProcess: one node's share of an engine server, hosted where the placement puts it.

SGLang's server is a tree of processes. It gets a process group of its own, and the kernel kills it when whoever hosts
it ends; its children ask the kernel for the same. What is left all the same, when the server itself is killed, is found
by the group and by the children seen while it lived.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from miles_core.errors import EngineError
from miles_core.stages.placement import visible_gpus
from miles_core.types import NodeSlot

STOP_SECONDS = 5.0
"""Seconds between asking a server to end and making it."""

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""
"""Runs first in the new process: code of ours between fork and exec would not be safe in a process with threads."""

CAUSES = (
    (r"unrecognized arguments|error: argument|invalid choice", "it does not take these flags",
     "correct the --sglang-* flag that it names"),
    (r"address already in use", "its port is in use",
     "end what listens there, or leave the choice of the port to Miles"),
    (r"(?i)out ?of ?memory|not enough memory|leave no GPU memory|memory pool size is too small",
     "there is too little memory for it",
     "change --sglang-mem-fraction-static (larger: room for tokens; smaller: room for the rest), shorten "
     "--sglang-context-length, or give the engine more GPUs"),
    (r"(?i)not supported for now|cannot find model module|does not recognize this architecture|no model architectures|"
     r"unrecognized model|SafetensorError|cannot find any model weights", "it cannot load this model",
     "use a checkpoint that is whole and that the installed SGLang serves"),
    (r"No module named ['\"]?(sglang|smg|sglang_router)", "it is not installed", "pip install 'miles-sglang[server]'"),
    (r"cannot start |can't open file", "its command cannot be run", "correct --sglang-server-command"),
)
"""What a log says -> what that means -> what to do."""


COMPILERS = frozenset(("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "hipcc", "clang", "cc1", "cc1plus", "gcc", "g++"))
"""Names of processes of a server that builds a kernel at its first use: FlashInfer, DeepGEMM and Triton do that."""


class ServerProcess:
    """Runs one server, and ends it with everything that it started.

    Args:
        seat: where in an engine it is; its GPUs are set by the environment that `start` is given.
    """

    def __init__(self, seat: NodeSlot):
        self.seat = seat
        self._process: subprocess.Popen | None = None
        self._log: Path | None = None
        self._begin = 0  # of its last start, in the log
        self._children: dict[int, float] = {}  # id -> when it was made: ids are used again

    def where(self) -> NodeSlot:
        """The seat, for the driver, which only has a handle."""
        return self.seat

    def free_ports(self, count: int) -> list[int]:
        """Ports of this machine that no process listens on."""
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
            for each in sockets:
                each.bind((self.seat.host, 0))
            return [each.getsockname()[1] for each in sockets]

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start it and return its process id. Its output is appended to `log`.

        Raises:
            EngineError: it is already running, a GPU of its seat is missing, or the log cannot be written.
        """
        visible = visible_gpus()
        if missing := [gpu for gpu in self.seat.gpus if gpu not in visible]:
            raise EngineError(f"GPU {missing[0]} is not available", got=f"{len(visible)} GPUs: {list(visible)}",
                              who=f"engine {self.seat.engine}, node {self.seat.node}, on {platform.node()}",
                              fix="look at nvidia-smi and CUDA_VISIBLE_DEVICES there", code="server-gpu-unavailable")
        if self._process is not None and self._process.poll() is None:
            raise EngineError("the server is already running",
                              code="server-already-running", got=f"process {self._process.pid}", fix="stop() it "
                                                                                                       "first")
        self._log, self._children = Path(log), {}
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab") as output:
                self._begin = output.tell()
                output.write(f"$ {' '.join(command)}\n".encode())
                output.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, **environment},
                )  # fmt: skip
        except OSError as error:
            raise EngineError("the server's log cannot be written", got=error.strerror, who=str(log),
                              fix="make the run directory writable", code="server-log-unwritable") from error
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal.

        Raises:
            EngineError: it has not been started.
        """
        if self._process is None:
            raise EngineError("the server has not been started", code="server-not-started", fix="start() it")
        code = self._process.poll()
        if code is None:
            self._see_children()
        return code

    def compilers(self) -> list[str]:
        """Names of the compilers that it runs now."""
        return sorted(self._see_children() & COMPILERS)

    def tail(self, lines: int) -> list[str]:
        """The last lines of its log, of those since its last start."""
        if self._log is None or not self._log.is_file():
            return []
        with open(self._log, encoding="utf-8", errors="replace") as file:
            file.seek(max(self._begin, self._log.stat().st_size - 200 * 1024))
            return [line.rstrip() for line in deque(file, lines)]

    def stop(self) -> None:
        """End it and everything that it started, within seconds, whatever state it is in. Can be repeated."""
        if self._process is None:
            return
        self._see_children()
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process takes no other signal
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        self._signal(signal.SIGKILL)
        left = self._left()
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.wait()
        psutil.wait_procs(left, timeout=STOP_SECONDS)

    close = stop

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _see_children(self) -> set[str]:
        names = set()
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._children[child.pid] = child.create_time()
                    names.add(child.name())
        return names

    def _left(self) -> list[psutil.Process]:
        """Children that were seen and are still there."""
        children = []
        for pid, made in self._children.items():
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                if child.create_time() == made:
                    children.append(child)
        return children


def raised(lines: Iterable[str]) -> str | None:
    """The last exception of a log; None where it has none. When a child raises, SGLang kills itself with a signal, and
    its exit code says nothing."""
    return next((line[:300] for line in reversed([*lines]) if re.match(r"[\w.]+(Error|Exception)\b", line)), None)


def ended(who: str, code: int | None, lines: Sequence[str], log: Path, seconds: float | None = None) -> EngineError:
    """Why a server did not come up, from the last lines of its log.

    Args:
        code: its exit code; None when it runs and does not answer, after `seconds`.
    """
    if code is None:
        what, got = f"it did not answer within {seconds:g} s", None
        fix = "raise --server-start-timeout, or check what delays it"
    else:
        what, got, fix = "it ended while it started", f"exit code {code}", "see its log"
        if code < 0:
            fix = "a negative code is a signal; -9 is often a lack of memory on the machine"
    output = [line for line in lines if not line.startswith("$ ")]
    if (exception := raised(output)) is not None:
        got, fix = exception, "see its log"
    for pattern, meaning, remedy in CAUSES:
        if matching := [line for line in output if re.search(pattern, line)]:
            what, got, fix = f"{what}: {meaning}", matching[-1].strip()[:300], remedy
            break
    text = "\n  ".join(line[:300] for line in lines[-10:])
    return EngineError(what, code="server-start-failed", got=got, who=who, fix=f"{fix}. The end of {log}:\n  {text}")
