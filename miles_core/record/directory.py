"""The folder of a run: what lies where, who holds it, and how files are published into it.

    plan.json, plan.txt    what the run was resolved to, for programs and for people
    events.jsonl           what happened, one object a line (events.py)
    hashes.jsonl           hashes of every tensor and column, with --debug-determinism (journal.py)
    samples/               answers with their tokens, one file per rollout or evaluation (samples.py)
    profile/               traces, with --use-pytorch-profiler
    logs/  debug/          text of worker processes; whatever --debug-... writes
    .lock                  held by the run that writes here; the kernel frees it when that process dies

Reading never takes the lock: a report of a running run is fine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from miles_core.errors import RunDirectoryError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TEMPORARY = ".publishing"
_serial = itertools.count()


class RunDirectory:
    """Where one run writes.

    `acquire` makes the folders and takes the lock; without it the object only names paths, for readers.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock: int | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def lock(self) -> Path:
        """Versions and digests of all that the run is made of."""
        return self.path / "plugins.lock"

    @property
    def plan_text(self) -> Path:
        return self.path / "plan.txt"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def hashes(self) -> Path:
        return self.path / "hashes.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def debug(self) -> Path:
        return self.path / "debug"

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run that lies at `path`, for commands that read one.

        Raises:
            RunDirectoryError: nothing is there, or what is there is no run.
        """
        run = cls(path)
        if not run.path.is_dir():
            what = "this is a file, not the folder of a run" if run.path.exists() else "there is no such folder"
        elif not run.events.is_file() and not run.plan_json.is_file():
            what = "this folder is no run: it has neither events.jsonl nor plan.json"
        else:
            return run
        raise RunDirectoryError(what, who=str(path), fix="give the folder that --run-dir named, such as runs/demo")

    def acquire(self) -> RunDirectory:
        """Take the directory for this process until it ends, and make its folders. Again is a no-op.

        Raises:
            RunDirectoryError: another run holds it, it cannot be written, or the disk is full.
        """
        if self._lock is not None:
            return self
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._wait_for(lock)
            with explained(self.path):
                holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %z")}
                os.ftruncate(lock, 0)
                os.pwrite(lock, json.dumps(holder).encode() + b"\n", 0)
                for folder in (self.samples, self.logs, self.debug):
                    folder.mkdir(exist_ok=True)
                self._sweep()
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        _held.add(self)
        return self

    def open_log(self, name: str) -> TextIO:
        """A file under logs/ to append lines to.

        Raises:
            RunDirectoryError: it cannot be written, or the disk is full.
        """
        with explained(self.logs / name):
            return open(self.logs / name, "a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def release(self) -> None:
        """Let another run have the directory. The lock file stays: removing it would let two runs hold two files."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _held.discard(self)

    def __enter__(self) -> RunDirectory:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def holder(self) -> dict[str, object] | None:
        """Who writes here right now, {"pid", "host", "since"}; None when nobody does."""
        try:
            lock = os.open(self.path / ".lock", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except OSError:
            return _named(lock)
        finally:
            os.close(lock)

    def _wait_for(self, lock: int) -> None:
        """Lock exclusively. Tries for a moment, because `holder` takes a shared lock for an instant."""
        for attempt in range(6):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt < 5:
                    time.sleep(0.03)
            except OSError as error:
                raise RunDirectoryError(
                    "the file system does not support locks (flock)", got=error.strerror, who=str(self.path),
                    fix="put --run-dir on a local disk, or on one that is mounted with locks",
                ) from error
        holder = _named(lock)
        raise RunDirectoryError(
            f"another run is writing here: process {holder['pid']} on {holder['host']}, since {holder['since']}",
            who=str(self.path),
            fix="wait for it, stop it, or give this run its own --run-dir",
        )

    def _sweep(self) -> None:
        """Remove what a killed run had half published; nobody else writes while the lock is held."""
        for folder in (self.path, self.samples, self.logs, self.profile, self.debug):
            for left in folder.glob(f".*{_TEMPORARY}"):
                left.unlink(missing_ok=True)


_held: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: close the inherited descriptors, or an orphan would keep a dead run's directory locked."""
    for run in list(_held):
        run.release()


os.register_at_fork(after_in_child=_forget_locks)


def _named(lock: int) -> dict[str, object]:
    """What the holder wrote about itself; it may be so young that it has written nothing yet."""
    try:
        text = json.loads(os.pread(lock, 4096, 0))
    except (OSError, ValueError):
        text = {}
    return {key: text.get(key, "unknown") for key in ("pid", "host", "since")}


@contextlib.contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the body into a RunDirectoryError that says what to do about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            what, fix = "the disk is full", "free some space, or give a --run-dir on another disk; then resume"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            what, fix = "a file stands where a folder is needed", "move it away, or give another --run-dir"
        else:
            what, fix = "cannot be written", "check owner and mount, or give a --run-dir that you may write to"
        raise RunDirectoryError(what, got=error.strerror or error, who=os.fspath(path), fix=fix) from error


@contextlib.contextmanager
def publishing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Where to write a file that shall take the place of `path` when the block ends, whole or not at all.

    Raises:
        RunDirectoryError: it cannot be written, or the disk is full; the old file is then still there.
    """
    path = Path(path)
    # In the same folder, since os.replace is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_serial)}{_TEMPORARY}")
    with explained(path):
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def publish(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file so that a reader, or a kill, sees the old content or the new one and never half of either.

    Raises:
        RunDirectoryError: it cannot be written, or the disk is full; the old file is then still there.
    """
    # errors: a lone surrogate in generated text becomes the escape \\udc80, which JSON reads back as what it was.
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with publishing(path) as temporary:
        temporary.write_bytes(data)
    return Path(path)
