"""The side of processes.py that answers: questions from stdin, a word for each on stdout.

The kernel ends the process when a question takes more CPU seconds than it may: SIGPROF with its default action, which
unlike a handler also ends what is deep in C code, and CPU time, so that a busy machine makes no answer wrong. It gets
no more memory than MEMORY, and ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 4 << 30
START_SECONDS = 120.0
WALL = 10
"""Wall seconds per CPU second, for a question that waits instead of working (SIGALRM)."""


def allow(seconds: float) -> None:
    """Let the process live for so many CPU seconds more; 0 means for ever."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL)


def serve(answer: Callable[[dict[str, Any]], str], warm_up: Callable[[], object]) -> None:
    """Serve until the input ends.

    Args:
        answer: question -> a word; whatever it raises is its own to catch.
        warm_up: imports and compiles what the first question should not pay for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for clock in (signal.SIGPROF, signal.SIGALRM):  # whatever the parent made of them
        signal.signal(clock, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [clock])
    allow(START_SECONDS)
    with contextlib.suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    logging.disable(logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warm_up()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    allow(0)
    answers.write("ready\n")
    for line in sys.stdin:
        question = json.loads(line)
        allow(question["seconds"])
        word = answer(question)
        allow(0)
        answers.write(word + "\n")
