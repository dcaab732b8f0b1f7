"""Prompts of rows that are read as they are needed.

The rows of an epoch come in windows, each shuffled by itself; a position is the row at which the window begins and how
many prompts came since. Where one window holds all rows, the order is that of the source `rows`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from miles_core.errors import DataError
from miles_core.stages.prompts import Rendering, Rows, shuffled
from miles_core.types import Prompt
from miles_datasets.source import Source

Row = tuple[int, dict[str, Any]]
"""Its number, and what it holds."""


class StreamedPrompts:
    """An endless stream of prompts that holds one window of rows.

    Args:
        shuffle: each window anew in each epoch.
        buffer: rows of a window.

    Raises:
        DataError: no row is left, a row without a prompt, or one that is too long and may not be left out.
    """

    def __init__(self, rows: Rows, source: Source, tokenizer: Any, *, shuffle: bool = False, seed: int = 0,
                 buffer: int = 10_000):
        self._source, self._shuffle, self._seed, self._buffer = source, shuffle, seed, buffer
        self._prompt = Rendering(rows, source.where, tokenizer)
        self.data = source.data
        self._again: deque[Prompt] = deque()
        self._next, self._first = 0, 0
        self._epoch, self._number, self._row = 0, 0, 0
        self._read(self._rows(0))

    def __len__(self) -> int:
        """
        Raises:
            DataError: files that do not say how many rows they have.
        """
        if (total := self._source.total) is None:
            raise DataError("only Parquet says how many rows a stream has", who=self._source.name,
                            fix="write --num-rollout in place of --num-epoch", code="stream-length-unknown")
        return total

    def next(self) -> Prompt:
        """The next prompt: one that was given back, else a fresh one."""
        if self._again:
            return self._again.popleft()
        if self._next - self._first >= len(self._window):  # beyond it, if rows have gone since the position was saved
            self._advance()
        row, record = self._window[self._next - self._first]
        self._next += 1
        return self._prompt(self._next - 1, row, record)

    def give_back(self, prompts: list[Prompt]) -> None:
        """Hand these out again before anything else, in this order."""
        self._again.extendleft(reversed(prompts))

    def state_dict(self) -> dict[str, Any]:
        """The window's first row and number, and the prompts that come again by their numbers and rows."""
        return {"next": self._next, "first": self._first,
                "epoch": self._epoch, "window": self._number, "row": self._row,
                "again": [[prompt.uid, prompt.row] for prompt in self._again],
                "buffer": self._buffer, "data": self.data}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Raises:
            DataError: windows are of another size than those of the state.
        """
        if state["buffer"] != self._buffer:
            raise DataError("the checkpoint's position is in windows of another size", code="shuffle-buffer-changed",
                            got=self._buffer, who="datasets.shuffle_buffer",
                            fix=f"--datasets.shuffle-buffer {state['buffer']}")
        self._next, self._first = state["next"], state["first"]
        self._epoch, self._number, self._row = state["epoch"], state["window"], state["row"]
        self._read(self._rows(self._row))
        wanted, records = {row for _, row in state["again"]}, {}
        for row, record in self._rows(min(wanted)) if wanted else ():
            if row in wanted:
                records[row] = record
                if len(records) == len(wanted):
                    break
        self._again = deque(self._prompt(uid, row, records[row]) for uid, row in state["again"] if row in records)

    def _rows(self, first: int) -> Iterator[Row]:
        """From a row to the end of the files."""
        return enumerate(self._source.stream(first), first)

    def _advance(self) -> None:
        """Go on to the next window, or to the first of the next epoch."""
        self._first, self._row, self._number = self._next, self._after, self._number + 1
        self._read(self._reader)
        if not self._window:
            self._epoch, self._number, self._row = self._epoch + 1, 0, 0
            self._read(self._rows(0))

    def _read(self, reader: Iterator[Row]) -> None:
        """Fill the window from the row that the reader has reached."""
        window: list[Row] = []
        self._reader, self._after = reader, self._row
        for row, record in reader:
            self._after = row + 1
            if self._prompt.fits(row, record):
                window.append((row, record))
            if len(window) == self._buffer:
                break
        if not window and self._number == 0:
            raise DataError("no prompt is left", code="stream-prompts-all-dropped", who=self._source.name,
                            fix="the files are empty, the @[a:b] slice is, or --rollout-max-prompt-len leaves all out")
        self._window = window
        if self._shuffle and window:
            later = (self._number,) if self._number else ()
            self._window = [window[place] for place in shuffled(len(window), self._seed, self._epoch, *later)]
