"""The sandbox's supervisor: reads calls from stdin, runs each in a fresh process that it confines, answers on stdout.

    driver -- supervisor -- tool                     plain
    driver -- supervisor -- jail -- init | -- tool   with namespaces; what is right of | sees nothing of what is left

Each call is a fork of the supervisor, which has never run foreign code. The supervisor bounds wall time, output,
processes and (without a file system of the tool's own) disk while it waits; the kernel bounds the rest. Afterwards it
ends all that the call started: with namespaces the kernel does, as init is gone; otherwise orphans become the
supervisor's children. Lines are JSON. It ends with its input, or with the process that started it.

What fails before a tool's code runs is told on a pipe of its own, which is closed by then. Whatever comes afterwards,
exit codes and the result included, is written by the tool and believed of the tool alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from miles_tools import linux
from miles_tools.foreign import describe, loads
from miles_tools.parts import packed

TICK = 0.05
"""Seconds between two looks at processes and disk."""
SETUP = 10.0
"""Seconds that confining a process may take; a tool's wall time begins afterwards."""
KILLING = 2.0
"""Seconds after which a process that does not die is a failure of the sandbox."""
HIDDEN = ("/home", "/root", "/run", "/dev/shm", "/var/tmp")
FILES = 4096
RESULT = 3
READY = b"ready"
"""What the pipe of the set-up says once a tool's code is about to run."""
ANSWERS = ("ok", "raised", "memory", "disk", "processes")
"""Kinds of ending that a tool's process tells of itself."""

_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main() -> None:
    """Confine this process as far as it can be once for all calls, and serve."""
    settings = types.SimpleNamespace(**json.loads(sys.argv[1]))
    parent = os.getppid()
    os.umask(0o022)  # what is made here is for another user, too
    with contextlib.suppress(PermissionError):  # root's: its count of processes is unbounded, so see to them in time
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        confine(settings)
        linux.prctl(linux.SET_DUMPABLE, 0)  # a tool of the same user cannot open its memory and descriptors
        tell({"ready": True})
        for line in lines(parent):
            tell(serve(json.loads(line), settings))
    except Exception as error:  # noqa: BLE001 - the driver gets to know, and starts another
        tell({"kind": "ours", "detail": str(error) or type(error).__name__})
    finally:
        if not settings.namespaces:
            shutil.rmtree(settings.work, ignore_errors=True)


def confine(settings: types.SimpleNamespace) -> None:
    """What holds for this process and every call. While it is root it uncovers Python, which may lie where only root
    gets to, for the user that it or its tools become.

    Raises:
        OSError: the kernel refuses.
    """
    hidden = {folder: needed(folder, settings.work) for folder in HIDDEN if os.path.isdir(folder)}
    if not settings.namespaces:
        hidden = {folder: inside for folder, inside in hidden.items() if inside}
        linux.prctl(linux.SET_CHILD_SUBREAPER, 1)
    if settings.user is not None:
        with contextlib.suppress(PermissionError):
            linux.own_mounts(hidden)
            hidden = {}
    if settings.namespaces:
        if settings.user is not None:
            linux.become(settings.user)
        linux.own_namespaces(hidden)
    elif settings.user is not None:
        os.chown(settings.work, settings.user, settings.user)


def needed(folder: str, work: str) -> list[str]:
    """What is needed of a folder, no path inside another: what Python is imported from, and a tool's directory."""
    places = {form(path) for path in (*sys.path, sys.prefix, sys.base_prefix, work) if path
              for form in (os.path.abspath, os.path.realpath)}
    inside = [path for path in sorted(places) if path.startswith(folder + "/") and os.path.isdir(path)]
    return [path for path in inside if not any(path.startswith(other + "/") for other in inside)]


def tell(answer: dict[str, object]) -> None:
    """One line to the driver."""
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data):]


def lines(parent: int) -> Iterator[bytes]:
    """Lines of stdin, until it ends or this process has another parent."""
    buffered = b""
    while True:
        line, newline, buffered = buffered.partition(b"\n")
        if newline:
            yield line
            continue
        buffered = line
        while not select.select([0], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        data = os.read(0, 1 << 16)
        if not data:
            return
        buffered += data


def serve(call: dict[str, object], settings: types.SimpleNamespace) -> dict[str, object]:
    """Run one call and say how it ended; nothing of it is left when this returns."""
    begin = time.monotonic()
    result, result_in = os.pipe()
    output, output_in = os.pipe()
    setup, setup_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            jail(call, settings, result_in, output_in, setup_in)
        finally:
            os._exit(1)
    for pipe in (result_in, output_in, setup_in):
        os.close(pipe)
    texts = {result: b"", output: b"", setup: b""}
    try:
        ended_by = watch(pid, texts, setup, settings)
        clean = clear(pid, settings)
        usage = clean[1]
        drain(texts, settings.output)
    finally:
        for pipe in texts:
            os.close(pipe)
    answer = {"output": texts[output][: settings.output].decode("utf-8", "replace"),
              "seconds": time.monotonic() - begin}
    if clean[0] is None:
        return answer | {"kind": "ours", "detail": "processes that could not be ended"}
    if texts[setup] != READY:
        problem = texts[setup].decode("utf-8", "replace") or f"its set-up ended ({ended_by or 'without a word'})"
        return answer | {"kind": "ours", "detail": problem}
    return answer | ({"kind": ended_by} if ended_by else verdict(texts[result], clean[0], usage, settings))


def watch(pid: int, texts: dict[int, bytes], setup: int, settings: types.SimpleNamespace) -> str | None:
    """Read until the process ends; the limit that it broke, if any."""
    ending = os.pidfd_open(pid)
    begin = time.monotonic()
    look, deadline = begin + TICK, begin + SETUP
    reading = set(texts)
    try:
        while True:
            now = time.monotonic()
            ready = select.select([*reading, ending, 0], [], [], max(0.0, min(look, deadline) - now))[0]
            for pipe in reading & set(ready):
                data = os.read(pipe, 1 << 16)
                texts[pipe] += data
                if not data:
                    reading.discard(pipe)
                    deadline = time.monotonic() + settings.wall if pipe == setup else deadline
            if max(map(len, texts.values())) > settings.output:
                return "output"
            if ending in ready:
                return None
            if 0 in ready:
                return "given up"  # the driver is gone
            if now >= deadline and not ready:  # what ended in time is seen first, however late this process looks
                return "time"
            if time.monotonic() >= look:
                if broken := exceeded(settings):
                    return broken
                look = time.monotonic() + TICK
    finally:
        os.close(ending)


def exceeded(settings: types.SimpleNamespace) -> str | None:
    """What the kernel does not bound, or not everywhere."""
    beside = 2 if settings.namespaces else 0
    if len(linux.descendants(os.getpid())) - beside > settings.processes:
        return "processes"
    if not settings.namespaces and held(settings.work, settings.disk) > settings.disk:
        return "disk"
    return None


def held(folder: str, enough: int) -> int:
    """Bytes in a folder; stops counting above `enough`, and counts an inode as a page."""
    total, folders = 0, [folder]
    while folders and total <= enough:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += 4096 + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # too deep to list
                return enough + 1
    return total


def clear(pid: int, settings: types.SimpleNamespace) -> tuple[int | None, float]:
    """End all that the call started and empty its directory: (exit status, None if something lives; CPU seconds)."""
    status, seconds = None, 0.0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # at once for the whole group, so that no fork escapes
    deadline = time.monotonic() + KILLING
    while time.monotonic() < deadline:
        left = linux.descendants(os.getpid())  # before waiting: what ends after this look is waited for, too
        with contextlib.suppress(ChildProcessError):
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                if ended[0] == pid:
                    status, seconds = ended[1], ended[2].ru_utime + ended[2].ru_stime
        if not left and status is not None:
            break
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.001)
    else:
        return None, seconds
    if not settings.namespaces:
        empty(settings.work)
    return status, seconds


def empty(folder: str) -> None:
    """Remove what is in a folder, whatever its permissions and depth: what is in its folders is moved up first."""
    prefix, moved = os.urandom(8).hex(), 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            for inner in _open_up(path):
                moved += 1
                if os.path.isdir(inner) and not os.path.islink(inner):
                    os.chmod(inner, 0o700)  # a folder that moves is written to
                os.rename(inner, os.path.join(folder, f"{prefix}-{moved}"))
            os.rmdir(path)


def _open_up(folder: str) -> list[str]:
    os.chmod(folder, 0o700)
    return [os.path.join(folder, name) for name in os.listdir(folder)]


def drain(texts: dict[int, bytes], most: int) -> None:
    """What is left in the pipes, now that no process writes any more."""
    for pipe in texts:
        while len(texts[pipe]) <= most and select.select([pipe], [], [], 0)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            texts[pipe] += data


def verdict(result: bytes, status: int, seconds: float, settings: types.SimpleNamespace) -> dict[str, object]:
    """How a call ended that broke no limit of the supervisor's; all of it is the tool's doing."""
    code = os.waitstatus_to_exitcode(status)
    ending = -code if code < 0 else code - 128 if code > 128 else 0
    unreadable = ""
    try:
        if answer := told(loads(result)):
            return answer
    except ValueError as error:
        unreadable = str(error)
    if ending == signal.SIGXCPU or (ending == signal.SIGKILL and seconds >= settings.cpu):
        return {"kind": "cpu"}
    if ending:
        name = signal.Signals(ending).name if ending in set(signal.Signals) else f"signal {ending}"
        return {"kind": "ended", "detail": name}
    if result and not code:
        return {"kind": "raised", "detail": f"its answer cannot be read: {unreadable or 'of another form'}"}
    return {"kind": "ended", "detail": f"exit status {code}"}


def told(answer: object) -> dict[str, object] | None:
    """What `perform` writes; None for anything else, as a tool can write to that pipe, too."""
    if not isinstance(answer, dict) or answer.get("kind") not in ANSWERS:
        return None
    if answer["kind"] == "ok":
        return {"kind": "ok", "value": answer.get("value")}
    detail = answer.get("detail", "")
    return {"kind": answer["kind"], "detail": detail[:2000]} if isinstance(detail, str) else None


def jail(call: dict[str, object], settings: types.SimpleNamespace, result: int, output: int, setup: int) -> None:
    """In the forked process: confine it, and run the tool. Never returns."""
    supervisor = os.getppid()
    os.setsid()
    try:
        if settings.namespaces:
            linux.die_with_parent(supervisor)
            linux.unshare(linux.NEW_PID | linux.NEW_NS)
            relay(os.getpid())
            linux.own_directories(settings.work, settings.disk, FILES)
            relay(os.getpid())
            linux.drop_capabilities()
        else:
            if settings.user is not None:
                linux.become(settings.user)
            linux.prctl(linux.SET_NO_NEW_PRIVS, 1)
        linux.prctl(linux.SET_DUMPABLE, 1)  # its own /proc/self
        linux.die_with_parent(os.getppid())
        os.chdir(settings.work)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        result, output, setup = os.dup(result), os.dup(output), os.dup(setup)
        for source, target in ((nowhere, 0), (output, 1), (output, 2), (result, RESULT), (setup, RESULT + 1)):
            os.dup2(source, target)
        setup = RESULT + 1
        os.closerange(setup + 1, 1024)
        os.environ.update(HOME=settings.work, TMPDIR=settings.work)
        apart = settings.namespaces or settings.user is not None
        others = 3 if settings.namespaces else 0 if apart else linux.tasks_of(os.getuid())
        linux.limit(cpu=settings.cpu, memory=settings.memory, disk=settings.disk, files=settings.files,
                     processes=settings.processes + others)
    except BaseException as error:  # noqa: BLE001 - whatever it is, no tool had a part in it
        os.write(setup, (str(error) or type(error).__name__).encode()[:1000])
        os._exit(1)
    os.write(setup, READY)
    os.close(setup)
    perform(call)


def relay(parent: int) -> None:
    """Fork; only the new process goes on. The old one waits for it, and ends as it did."""
    pid = os.fork()
    if pid == 0:
        linux.die_with_parent(parent)
        return
    os.closerange(0, 1024)  # a tool finds nothing in the processes above it
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def perform(call: dict[str, Any]) -> None:
    """Run the function and write what it returns, or how it fails. Never returns."""
    own = os.getpid()
    try:
        module = types.ModuleType("tool")
        module.__file__ = call["file"]
        exec(compile(call["source"], call["file"], "exec"), module.__dict__)
        answer = {"kind": "ok", "value": packed(getattr(module, call["function"])(**call["arguments"]))}
        text = json.dumps(answer, default=str)
    except BaseException as error:  # noqa: BLE001 - whatever a tool raises is its answer
        text = json.dumps(failure(error, call["file"]))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if os.getpid() != own:  # a fork of the tool's came out here, too
        os._exit(0)
    data = text.encode("utf-8", "surrogatepass")
    while data:
        data = data[os.write(RESULT, data):]
    os._exit(0)


def failure(error: BaseException, file: str) -> dict[str, object]:
    """What a tool's exception says, with the last line of its file that was on the way."""
    number = getattr(error, "errno", None)
    kind = ("memory" if isinstance(error, MemoryError) else "disk" if number in _DISK
            else "processes" if number == errno.EAGAIN else "raised")
    line, at = None, error.__traceback__
    while at is not None:
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == file else line
        at = at.tb_next
    what = describe(error).removesuffix(": ")
    return {"kind": kind, "detail": what if line is None else f"{what} (line {line})"}


if __name__ == "__main__":
    main()
