"""Comparing an answer with a label: the obvious cases here, everything else by math-verify in a process of its own.

SymPy can be sent into C code that no exception, signal handler or thread can interrupt and that holds the interpreter's
lock (`10^{100000000}` does): no bounded wait of this process would ever expire. So the library runs in processes of its
own, which the kernel ends when their time is up.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from miles_core.errors import RewardError
from miles_math.answer import boxed_answer, opens_box, without_end_tokens

PLAIN_TAIL = 2000
"""Characters at the end of an unboxed response in which its answer is looked for."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_PLAIN = re.compile(r"[0-9A-Za-z+\-*/^_(){}\\., ]*[0-9][0-9A-Za-z+\-*/^_(){}\\., ]*")

_ENDED_BY_THE_QUESTION = (signal.SIGPROF, signal.SIGALRM, signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL)
"""Its time was up, its stack or memory was full, or the kernel needed the memory (SIGKILL)."""


def obvious(answer: str, label: str, *, boxed: bool) -> bool | None:
    """The library's verdict where it need not be asked: two plain integers, or a box that holds the label's text."""
    answer, label = answer.strip(), label.strip()
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(label):
        return int(answer) == int(label)
    return True if boxed and answer == label and _PLAIN.fullmatch(answer) else None


class Ungradable(Exception):
    """The comparison was ended by the kernel: it took too long or too much memory."""


class Grader:
    """Grades responses; safe to call from several threads at once.

    Args:
        timeout: CPU seconds for one comparison.
        processes: how many comparisons may run side by side; a process is started when it is first needed.
    """

    def __init__(self, timeout: float, processes: int):
        self._timeout = timeout
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)

    def grade(self, response: str, label: str, *, boxed_only: bool = False) -> bool:
        """Whether the answer of a response equals the label.

        Args:
            boxed_only: a response without a box is wrong, whatever it ends with.

        Raises:
            Ungradable: the comparison took too long or too much memory.
            RewardError: the label is nothing that could be compared with.
        """
        answer = boxed_answer(response)
        if answer is not None:
            return bool(answer) and self._compare(answer, label, boxed=True)
        if boxed_only or opens_box(response):
            return False
        return self._compare(without_end_tokens(response)[-PLAIN_TAIL:], label, boxed=False)

    def close(self) -> None:
        """End the processes that are idle; those at work end by themselves when their time is up."""
        for process in [self._idle.get() for _ in range(self._idle.qsize())]:
            if process is not None:
                process.kill()
            self._idle.put(None)

    def _compare(self, answer: str, label: str, *, boxed: bool) -> bool:
        plain = obvious(answer, label, boxed=boxed) if answer else False
        if plain is not None:
            return plain
        process = self._idle.get()
        try:
            if process is not None and not process.alive():
                process.kill()
                process = None
            process = process or _Process()
            verdict = process.ask({"answer": answer, "label": label, "boxed": boxed, "seconds": self._timeout})
        except BaseException:
            if process is not None:
                process.kill()
            process = None
            raise
        finally:
            self._idle.put(process)
        if verdict == "label":
            raise RewardError("the label cannot be read as a mathematical expression", got=repr(label), who="math",
                              fix="correct the row, or check --label-key")
        return verdict == "equal"


class _Process:
    """One process that grades: a line of JSON in, a word out. See grading_process.py."""

    def __init__(self) -> None:
        program = str(Path(__file__).with_name("grading_process.py"))
        self._popen = subprocess.Popen([sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._asked, self._told = cast("IO[bytes]", self._popen.stdin), cast("IO[bytes]", self._popen.stdout)
        if self._told.readline() != b"ready\n":
            self.kill()
            raise RewardError("the grading process did not start", who="math",
                              got=f"exit status {self._popen.returncode}",
                              fix="import math_verify by hand to see why; pip install 'math-verify[antlr4-13-2]'")

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
        raise RewardError("a grading process ended", got=f"exit status {status}", who="math",
                          fix="find out what ended it; an ungraded answer is not counted as wrong")

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self._asked.close()
        self._told.close()
