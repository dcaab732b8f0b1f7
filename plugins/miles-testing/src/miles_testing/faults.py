"""Faults: record what a process does to the files under a folder, and kill it at any one of these operations.

`Faults` goes into a forked command (`before=` of miles_testing.forked). It replaces the functions through which
Python changes files; each call that concerns the folder is one numbered operation:

    open                     for writing or creating, through open, io.open, pathlib and os.open
    write, truncate, copy    what reaches the kernel: raw writes below the buffers of Python's files, os.write,
                             os.pwrite, os.truncate, os.ftruncate, os.sendfile
    fsync                    of files and folders
    rename, unlink, mkdir, rmdir, link

What is written in a row to one of Python's files is one operation, since torch flushes after every tensor; each
os.write is its own. A process is killed with SIGKILL right before an operation, so that killing at each of 1 .. N, and
resuming what came to its end, shows every state that the folder goes through, but for files that are written in part:
for those an operation can be torn, which means that only some of its bytes are written before the kill. (What was
written and not flushed to disk outlives a killed process; a power failure is another matter, and not tested here.)

Seen as well: torch's zip writer, whose output goes through a Python file here also when it is given a path. Not seen:
reads, locks, times and modes, other processes, and code in C that is given a path; `untraced` tells of files that
Python opened for writing behind our back.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_testing.forked import PRELOAD

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PROCESS = re.compile(r"\.\d+-\d+(?=\.publishing$)")
_real_open, _real_write = io.open, os.write


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the folder.

    Args:
        number: 1 for the first.
        kind: see the module.
        path: relative to the folder; process numbers in temporary names are left out.
        size: bytes of the writes or the copy, else 0.
    """

    number: int
    kind: str
    path: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.number} {self.kind} {self.path}" + (f" [{self.size}]" if self.size else "")

    @property
    def tearable(self) -> bool:
        """Whether half of it can be done."""
        return self.kind in ("write", "copy") and self.size > 1


@dataclass(frozen=True)
class Faults:
    """Traces this process's changes under `root` and appends them to `log`, which must lie elsewhere.

    Args:
        kill: SIGKILL right before the operation of this number; None only records.
        torn: for writes: let so many bytes pass first. What writes fewer at that number (files change in no fixed order
            where threads write) is done whole, and the kill comes right before the next operation.
    """

    root: Path
    log: Path
    kill: int | None = None
    torn: int = 0

    def __call__(self) -> None:
        """Begin, in the process that shall be traced; there is no way back.

        Raises:
            RuntimeError: the process or the one that it was forked from has threads, so the fork is not to be trusted.
        """
        threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
        if threads != 1 or threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError(f"the fork server has {threads} threads, its fork {threading.active_count()}")
        if missing := [name for name in PRELOAD if name not in sys.modules]:
            raise RuntimeError(f"the fork server has not imported {missing}")
        _Tracer(self).install()


def operations(log: Path) -> list[Operation]:
    """What a process recorded; the last one is where it was killed, if it was."""
    by_number: dict[int, Operation] = {}
    for number, kind, path, size in _records(log):
        if number is not None:
            before = by_number[number].size if number in by_number else 0
            by_number[number] = Operation(number, kind, path, before + size)
    return list(by_number.values())


def untraced(log: Path) -> list[str]:
    """Files under the folder that Python opened for writing, or renamed, without an operation of ours."""
    return [record[2] for record in _records(log) if record[0] is None]


def _records(log: Path) -> Iterator[list[Any]]:
    if log.exists():
        yield from map(json.loads, log.read_text().splitlines())


class _Tracer:
    """Counts operations; `at` is called before each."""

    def __init__(self, faults: Faults):
        self.faults = faults
        self.root = os.path.realpath(faults.root)
        self._log = os.open(faults.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._count, self._last, self._passed = 0, None, 0
        self._mutex = threading.Lock()
        self._ours = threading.local()

    def inside(self, path: object, dir_fd: int | None = None) -> str | None:
        """The path relative to the root, or None when it lies elsewhere; also of descriptors."""
        try:
            if isinstance(path, int):
                full = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
            else:
                base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
                full = os.path.join(base, os.fsdecode(path))
                full = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
        except (OSError, TypeError, ValueError):
            return None
        if full != self.root and not full.startswith(self.root + os.sep):
            return None
        return _PROCESS.sub(".PROCESS", os.path.relpath(full, self.root))

    def at(self, kind: str, path: str, size: int = 0, tear: Callable[[int], object] | None = None,
           file: object = None) -> None:
        """An operation is about to be done.

        Args:
            tear: does so many bytes of it.
            file: what it writes to belongs together with what this file wrote right before.
        """
        with self._mutex:
            if file is None or file is not self._last:
                self._count, self._passed = self._count + 1, 0
            self._last = file
            self._note([self._count, kind, path, size])
            left, self._passed = self.faults.torn - self._passed, self._passed + size
            kill = self.faults.kill
            if kill is None or self._count < kill or (self._count == kill and size and left >= size):
                return
            if self._count == kill and left > 0 and tear is not None:
                tear(left)
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    def _note(self, record: list[Any]) -> None:
        _real_write(self._log, json.dumps(record).encode() + b"\n")

    def install(self) -> None:
        """Replace the functions."""
        sys.addaudithook(self._audit)
        builtins.open = io.open = self._open
        for kind, names in {"unlink": ("unlink", "remove"), "mkdir": ("mkdir",), "rmdir": ("rmdir",),
                            "truncate": ("truncate", "ftruncate"), "fsync": ("fsync", "fdatasync")}.items():
            for name in names:
                setattr(os, name, self._of_one(getattr(os, name), kind))
        for kind, names in {"rename": ("rename", "replace"), "link": ("link", "symlink")}.items():
            for name in names:
                setattr(os, name, self._of_two(getattr(os, name), kind))
        for name in ("write", "pwrite"):
            setattr(os, name, self._write(getattr(os, name)))
        os.open, os.sendfile = self._os_open(os.open), self._sendfile(os.sendfile)
        self._through_python()

    def _through_python(self) -> None:
        """Give torch's zip writer a Python file where it was given a path."""
        from torch import serialization

        class Writer(serialization._open_zipfile_writer_buffer):
            def __init__(self, name):
                super().__init__(open(name, "wb"))  # noqa: SIM115 - closed below

            def __exit__(self, *failure):
                super().__exit__(*failure)
                self.buffer.close()

        serialization._open_zipfile_writer_file = Writer

    def _open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        path = self.inside(file) if set(mode) & set("wax+") else None
        if path is None:
            return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and opener is None:  # an opener calls os.open
            self.at("open", path)
        with self._done_by_us():
            raw = _File(self, path, file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        buffer = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffer
        text = io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text

    def _os_open(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def traced(path, flags, mode=0o777, *, dir_fd=None):
            inside = self.inside(path, dir_fd) if flags & _WRITES else None
            if inside is not None:
                self.at("open", inside)
            with self._done_by_us():
                return real(path, flags, mode, dir_fd=dir_fd)

        return traced

    def _write(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def traced(fd, data, *where):
            if (inside := self.inside(fd)) is not None:
                view = memoryview(data).cast("B")
                self.at("write", inside, len(view), lambda part: real(fd, view[:part], *where))
            return real(fd, data, *where)

        return traced

    def _sendfile(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def traced(out, source, offset, count, *further):
            if (inside := self.inside(out)) is not None:
                size = min(count, os.fstat(source).st_size - (offset or 0))
                if size > 0:  # the last call only finds that nothing is left
                    self.at("copy", inside, size, lambda part: real(out, source, offset, part, *further))
            return real(out, source, offset, count, *further)

        return traced

    def _of_one(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def traced(path, *args, **named):
            if (inside := self.inside(path, named.get("dir_fd"))) is not None:
                self.at(kind, inside)
            return real(path, *args, **named)

        return traced

    def _of_two(self, real: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def traced(source, target, **named):
            inside = self.inside(target, named.get("dst_dir_fd")) or self.inside(source, named.get("src_dir_fd"))
            if inside is not None:
                self.at(kind, inside)
            with self._done_by_us():
                return real(source, target, **named)

        return traced

    def _done_by_us(self) -> _Flag:
        return _Flag(self._ours)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """The interpreter tells of every open and rename; note those that did not come through us."""
        if event not in ("open", "os.rename", "os.link") or getattr(self._ours, "on", False):
            return
        if event == "open":
            mode, flags = args[1], args[2]
            writes = bool(set(mode) & set("wax+")) if isinstance(mode, str) else bool((flags or 0) & _WRITES)
            if not writes:
                return
        self._ours.on = True  # what follows opens nothing, but must not call itself either
        try:
            inside = self.inside(args[0]) or (self.inside(args[1]) if event != "open" else None)
            if inside is not None and not isinstance(args[0], int):
                self._note([None, event, inside])
        finally:
            self._ours.on = False


class _Flag:
    """`with`: what the interpreter tells of now is ours."""

    def __init__(self, state: threading.local):
        self._state = state

    def __enter__(self) -> None:
        self._state.on = True

    def __exit__(self, *_failure: object) -> None:
        self._state.on = False


class _File(io.FileIO):
    """A file whose writes are operations."""

    def __init__(self, tracer: _Tracer, path: str, *args: object):
        super().__init__(*args)
        self._tracer, self._path = tracer, path

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        if len(view):
            tear = super().write
            self._tracer.at("write", self._path, len(view), lambda part: tear(view[:part]), self)
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        self._tracer.at("truncate", self._path)
        return super().truncate(size)
