"""The program of a grading process: reads questions from stdin, answers with equal, different or label on stdout.

The kernel ends the process when a question takes more CPU seconds than it may: SIGPROF with its default action, which
unlike a handler also ends what is deep in C code, and CPU time, so that a busy machine makes no answer wrong. It gets
no more memory than MEMORY, and ends with its input. math-verify's own timeouts, which are Python's handlers, are off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from decimal import Decimal

MEMORY = 4 << 30
START_SECONDS = 120.0
WALL = 10
"""Wall seconds per CPU second, for a question that waits instead of working (SIGALRM)."""
WARM_UP = (("1", "2", True), ("1", "2", False), ("x+1", "1+x", True), ("\\frac{1}{2}", "0.5", True))
"""Questions that import and compile what the first real one should not pay for."""


_CAPITALS = re.compile(r"[A-Z]{2,}")
"""Letters that name things, points or choices, rather than being multiplied: AB is not BA."""
_NUMERIC = re.compile(r"(?:[\d\s.+\-*/^(){}!]|\\(?:d?frac|sqrt|cdot|times|div|left|right))+")
"""The left side of an equation without unknowns, which is right or wrong by itself: 5=6 is no answer 6."""


def usual(text: str) -> str:
    """What math-verify does not read, as it reads it: `42.`, `1e3`, `90\\degree`, `-2 i`."""
    text = re.sub(r"(?<=[^.\s\\])\.$", "", text.strip())
    text = re.sub(r"\^?\\degree(?![a-zA-Z])", r"^\\circ", text)
    text = re.sub(r"(?<=\d)\s+(?=i\b)", "", text)
    scientific = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3}", text)
    return f"{Decimal(text):f}" if scientific else text


def equal(answer: str, label: str, *, boxed: bool) -> bool | None:
    """math-verify's verdict; None when the label cannot be parsed.

    Args:
        answer: what a box held, or the end of a response without a box.
        label: the ground truth, bare or in a box or between dollar signs.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    label = usual(label.strip().strip("$"))
    answer = usual(answer) if boxed else answer
    if _CAPITALS.fullmatch(answer) and _CAPITALS.fullmatch(label):
        return answer == label
    statement = answer.rpartition("=") if boxed and "=" not in label else ("", "", "")
    if _NUMERIC.fullmatch(statement[0]) and not equal(statement[0], statement[2], boxed=True):
        return False
    gold = parse(label if "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None)
    if not gold:
        return None
    plain = [LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig()]
    parsed = (parse(f"\\boxed{{{answer}}}", parsing_timeout=None) if boxed
              else parse(answer, plain, parsing_timeout=None))
    return bool(verify(gold, parsed, timeout_seconds=None))


def allow(seconds: float) -> None:
    """Let the process live for so many CPU seconds more; 0 means for ever."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL)


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for clock in (signal.SIGPROF, signal.SIGALRM):  # whatever the parent made of them
        signal.signal(clock, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [clock])
    allow(START_SECONDS)
    with contextlib.suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    logging.disable(logging.CRITICAL)
    for answer, label, boxed in WARM_UP:
        equal(answer, label, boxed=boxed)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    allow(0)
    answers.write("ready\n")
    for line in sys.stdin:
        question = json.loads(line)
        allow(question["seconds"])
        try:
            verdict = equal(question["answer"], question["label"], boxed=question["boxed"])
        except Exception:  # noqa: BLE001 - SymPy raises anything; what it cannot compare is not equal
            verdict = False
        allow(0)
        answers.write({True: "equal", False: "different", None: "label"}[verdict] + "\n")


if __name__ == "__main__":
    main()
