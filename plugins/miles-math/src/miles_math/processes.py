"""Processes that grade: a line of JSON in, a word out, and the kernel ends what takes too long.

SymPy, and other graders of what a model wrote, can be sent into C code that no exception, signal handler or thread can
interrupt and that holds the interpreter's lock: no bounded wait of this process would ever expire. So they run in
processes of their own. The programs of these processes are written with serving.py.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from miles_core.errors import RewardError

_ENDED_BY_THE_QUESTION = (signal.SIGPROF, signal.SIGALRM, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
"""Its time was up, its stack or memory was full, or the kernel needed the memory (SIGKILL)."""


class Ungradable(Exception):
    """The grader was ended by the kernel: it took too long or too much memory."""


class Processes:
    """Processes of one program, started when first needed; safe to use from several threads at once.

    Args:
        program: a file that calls serving.serve.
        timeout: CPU seconds for one question.
        count: most processes, and so the questions that are answered side by side.
        who: whom errors name.
        fix: what errors say where a process does not start.
    """

    def __init__(self, program: Path, timeout: float, count: int, *, who: str, fix: str):
        self._program, self._timeout, self._who, self._fix = program, timeout, who, fix
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(count):
            self._idle.put(None)

    def ask(self, question: dict[str, object]) -> str:
        """The word with which a process answers.

        Raises:
            Ungradable: it took too long or too much memory.
            RewardError: a process did not start, or somebody else ended it.
        """
        process = self._idle.get()
        try:
            if process is not None and not process.alive():
                process.kill()
                process = None
            process = process or _Process(self._program, self._who, self._fix)
            return process.ask(question | {"seconds": self._timeout})
        except BaseException:
            if process is not None:
                process.kill()
            process = None
            raise
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the processes that are idle; those at work end by themselves when their time is up."""
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                process.kill()
            self._idle.put(None)


class _Process:
    """One process that grades."""

    def __init__(self, program: Path, who: str, fix: str) -> None:
        self._who = who
        self._popen = subprocess.Popen([sys.executable, "-P", str(program)], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE)
        self._asked, self._told = cast("IO[bytes]", self._popen.stdin), cast("IO[bytes]", self._popen.stdout)
        if self._told.readline() != b"ready\n":
            self.kill()
            raise RewardError("the grading process did not start", code="grading-process-not-started", who=who,
                              got=f"exit status {self._popen.returncode}", fix=fix)

    def alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, question: dict[str, object]) -> str:
        try:
            self._asked.write(json.dumps(question).encode() + b"\n")
            self._asked.flush()
            word = self._told.readline().decode().strip()
        except BrokenPipeError:
            word = ""
        if word:
            return word
        status = self._popen.wait()
        if -status in _ENDED_BY_THE_QUESTION:
            raise Ungradable(signal.Signals(-status).name)
        raise RewardError("a grading process ended", code="grading-process-ended", got=f"exit status {status}",
                          who=self._who, fix="find out what ended it; an ungraded answer does not count as wrong")

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self._asked.close()
        self._told.close()
