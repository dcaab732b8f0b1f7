"""The folder of a run: what lies where, who holds it, and how files are published into it.

    plan.json, plan.txt    what the run was resolved to, for programs and for people
    events.jsonl           what happened, one object a line (events.py)
    hashes.jsonl           hashes of every tensor and column, with --debug-determinism (journal.py)
    samples/               answers with their tokens, one file per rollout or evaluation (samples.py)
    profile/               traces, with --use-pytorch-profiler
    logs/  debug/          text of worker processes; whatever --debug-... writes
    run_id                 names the run for trackers, the same in every start
    .lock                  held by the run that writes here; the kernel frees it when that process dies

A new one is open to its owner alone (0700, its files 0600): plan and logs may hold a secret that a plugin was given.

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
    """Where one run writes. `acquire` makes the folders and takes the lock; without it the object only names paths, for
    readers."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._lock = Lock(self.path / ".lock", "--run-dir")
        self.plan_json, self.plan_text = self.path / "plan.json", self.path / "plan.txt"
        self.lock = self.path / "plugins.lock"  # versions and digests of all that the run is made of
        self.events, self.hashes = self.path / "events.jsonl", self.path / "hashes.jsonl"
        self.samples, self.logs, self.profile, self.debug = map(
            self.path.joinpath, ("samples", "logs", "profile", "debug"))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def run_id(self) -> str:
        """Names the run for trackers: drawn once, then the same in every start here.

        Raises:
            RunDirectoryError: it cannot be written, or the disk is full.
        """
        path = self.path / "run_id"
        if not path.is_file():
            publish(path, os.urandom(8).hex() + "\n")
        return path.read_text(encoding="utf-8").strip()

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """The run that lies at `path`, for commands that read one.

        Raises:
            RunDirectoryError: nothing is there, or what is there is no run.
        """
        run = cls(path)
        if not run.path.is_dir():
            what = "this is a file, not a run folder" if run.path.exists() else "the folder does not exist"
        elif not (run.events if run.events.exists() else run.plan_json).is_file():
            what = "this is not a run folder: it has neither a file events.jsonl nor, before that, plan.json"
        else:
            return run
        raise RunDirectoryError(what, code="not-a-run-directory", who=str(path),
                                fix="give the folder passed as --run-dir, such as runs/demo")

    def acquire(self) -> RunDirectory:
        """Take the directory for this process until it ends, and make its folders.

        Raises:
            RunDirectoryError: another run holds it, it cannot be written, or the disk is full.
        """
        with explained(self.path):
            make_folder(self.path, 0o700)  # plan and logs may hold what a plugin was given as a secret
            self._lock.take()
            try:
                for folder in (self.samples, self.logs):
                    make_folder(folder)
                self._sweep()
            except BaseException:
                self.release()
                raise
        return self

    def open_log(self, name: str) -> TextIO:
        """A file under logs/ to append lines to.

        Raises:
            RunDirectoryError: it cannot be written, or the disk is full.
        """
        with explained(self.logs / name):
            return open(self.logs / name, "a", encoding="utf-8", errors="backslashreplace", buffering=1, opener=private)

    def release(self) -> None:
        """Let another run have the directory."""
        self._lock.release()

    __enter__ = acquire

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

    def _sweep(self) -> None:
        """Remove what a killed run had half published; nobody else writes while the lock is held."""
        for folder in (self.path, self.samples, self.logs, self.profile, self.debug):
            for left in folder.glob(f".*{_TEMPORARY}"):
                left.unlink(missing_ok=True)


class Lock:
    """A file that one process at a time holds; the kernel frees it when that process dies, however it does.

    Args:
        path: of the file. It stays: removing it would let two processes hold two files.
        option: the flag that names its folder, for messages.
    """

    def __init__(self, path: Path, option: str):
        self.path, self._option, self._file = path, option, -1

    def take(self) -> None:
        """
        Raises:
            RunDirectoryError: another process has it, or the file system knows no locks.
            OSError: the file cannot be written.
        """
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(file)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%F %T %z")}
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode() + b"\n", 0)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        _held.add(self)

    def release(self) -> None:
        """Let another process have it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            _held.discard(self)

    def _wait_for(self, file: int) -> None:
        """Lock exclusively. Tries for a moment, because `holder` takes a shared lock for an instant."""
        who = str(self.path.parent)
        for attempt in range(6):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt < 5:
                    time.sleep(0.03)
            except OSError as error:
                raise RunDirectoryError("the file system does not support locks (flock)", code="file-locks-unsupported",
                                        got=error.strerror, who=who, fix="choose a folder on another file system with "
                                        f"{self._option}, such as a local disk, or mount this one with locks (Lustre: "
                                        "-o flock)") from error
        holder = _named(file)
        raise RunDirectoryError(f"another run uses this folder: process {holder['pid']} on {holder['host']}, since "
                                f"{holder['since']}", code="run-directory-in-use", who=who,
                                fix=f"wait for it, stop it, or give this run another {self._option}")


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_locks() -> None:
    """In a forked child: close the inherited descriptors, or an orphan would keep a dead run's folders locked."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_locks)


def _named(lock: int) -> dict[str, object]:
    """What the holder wrote about itself; it may be so young that it has written nothing yet."""
    try:
        text = dict(json.loads(os.pread(lock, 4096, 0)))
    except (OSError, ValueError, TypeError, RecursionError):
        text = {}
    return {key: text.get(key, "unknown") for key in ("pid", "host", "since")}


@contextlib.contextmanager
def explained(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError of the body into a RunDirectoryError that says what to do about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            what, fix = "the disk is full", "free some space or choose a --run-dir on another disk, then resume"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST):
            what, fix = "a file exists, or a dead link, where a folder is due", "move it, or choose another --run-dir"
        else:
            what, fix = "cannot be written", "check its owner and mount, or choose a --run-dir that you may write to"
        raise RunDirectoryError(what, code="run-directory-unwritable", got=error.strerror or error, who=os.fspath(path),
                                fix=fix) from error


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
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
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
    with publishing(path) as temporary, open(temporary, "wb", opener=private) as file:
        file.write(data)
    return Path(path)


def private(path: str, flags: int) -> int:
    """`opener` of files that only their owner may read."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def sync(path: str | os.PathLike[str]) -> None:
    """Have the content of a file, or the names in a folder, outlast a power cut."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot do so for folders
            raise
    finally:
        os.close(file)


def make_folder(path: str | os.PathLike[str], mode: int = 0o777) -> None:
    """A folder, and those above it, that outlast a power cut; `mode` is of the last one, if it is made."""
    path = Path(path)
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync(path.parent)
