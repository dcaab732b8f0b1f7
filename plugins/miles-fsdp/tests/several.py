"""A function on ranks that are processes of their own."""

from __future__ import annotations

import multiprocessing
import traceback

TIMEOUT = 60


def on_ranks(function, size, folder, *arguments):
    """What `function(index, size, meeting, *arguments)` answers, by rank; function and answers have to be picklable.

    Raises:
        AssertionError: one of them has failed, with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, daemon=True,
                                 args=(answers, function, index, size, folder / "meeting", arguments))
                 for index in range(size)]
    for process in processes:
        process.start()
    try:
        ranks = sorted((answers.get(timeout=TIMEOUT) for _ in processes), key=lambda answer: answer[0])
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    for index, _, error in ranks:
        assert error is None, f"rank {index}: {error}"
    return [answer for _, answer, _ in ranks]


def _rank(answers, function, index, size, meeting, arguments):
    """One of the processes."""
    try:
        answers.put((index, function(index, size, meeting, *arguments), None))
    except BaseException:  # noqa: BLE001  the first process tells it
        answers.put((index, None, traceback.format_exc()))
