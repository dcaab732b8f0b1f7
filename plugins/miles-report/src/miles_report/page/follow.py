"""Follower: reads events.jsonl as it grows, every byte once."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from miles_core.errors import RunDirectoryError
from miles_core.reading import reading
from miles_core.record.events import parsed
from miles_report.page.history import History

HEAD = 128
"""Bytes by which a file is known again; the first event's time is among them."""


class Follower:
    """The history of a file that may not be there yet, may grow, and may be removed for another run's.

    Args:
        path: of events.jsonl.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path, self.history = Path(path), History()
        self.offset = self._lines = 0
        self._head, self._name = b"", secrets.token_hex(4)

    @property
    def lineage(self) -> str:
        """Changes when something that was taken is no longer so: what one holds can then not be added to."""
        return f"{self._name}-{self.history.cuts}"

    def advance(self) -> History:
        """Take the whole lines that came since the last call. A torn last line is left for the next one.

        Raises:
            RunDirectoryError: a line is damaged. What came before it has been taken; the next call says so again.
        """
        try:
            with open(self.path, "rb") as file:
                head = file.read(HEAD)
                if head[:len(self._head)] != self._head or os.fstat(file.fileno()).st_size < self.offset:
                    self._forget()
                self._head = head
                file.seek(self.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    with reading(f"{self.path}, line {self._lines + 1}", RunDirectoryError):
                        self.history.take(parsed(line, self._lines + 1, self.path))
                    self.offset, self._lines = self.offset + len(line), self._lines + 1
        except FileNotFoundError:
            if self.offset:
                self._forget()
        return self.history

    def since(self, offset: int, most: int) -> list[dict] | None:
        """The events that were taken from a byte on; None when it starts no line, or when they have too many bytes."""
        if not 0 < self.offset - offset <= most:
            return [] if offset == self.offset else None
        with open(self.path, "rb") as file:
            file.seek(max(0, offset - 1))
            before, text = file.read(min(offset, 1)), file.read(self.offset - offset)
        return [json.loads(line) for line in text.splitlines()] if before in (b"", b"\n") else None

    def _forget(self) -> None:
        self.__init__(self.path)
