"""The program of a keeper: reads calls from stdin, runs each in a fresh process that it confines, answers on stdout.

    driver -- keeper -- tool                         plain
    driver -- keeper -- jail -- init | -- tool       with namespaces; what is right of | sees nothing of what is left

Each call is a fork of the keeper, which has never run foreign code. The keeper bounds wall time, output, processes and
(without a file system of the tool's own) disk while it waits; the kernel bounds the rest. Afterwards it ends all that
the call started: with namespaces the kernel does, as init is gone; otherwise orphans become the keeper's children.
Lines are JSON. It ends with its input, or with the process that started it.
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

from miles_tools import kernel

TICK = 0.05
"""Seconds between two looks at processes and disk."""
KILLING = 2.0
"""Seconds after which a process that does not die is a failure of the sandbox."""
HIDDEN = ("/home", "/root", "/run", "/dev/shm", "/var/tmp")
FILES = 4096
RESULT = 3
OURS = 70

_DISK = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def main() -> None:
    """Confine this process as far as it can be once for all calls, and serve."""
    settings = types.SimpleNamespace(**json.loads(sys.argv[1]))
    parent = os.getppid()
    with contextlib.suppress(PermissionError):  # root's: its count of processes is unbounded, so see to them in time
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        if settings.namespaces:
            if settings.user is not None:
                kernel.become(settings.user)
            kernel.own_namespaces([path for path in HIDDEN if os.path.isdir(path) and not needed(path)])
        else:
            kernel.prctl(kernel.SET_CHILD_SUBREAPER, 1)
            if settings.user is not None:
                os.chown(settings.work, settings.user, settings.user)
        tell({"ready": True})
        for line in lines(parent):
            tell(serve(json.loads(line), settings))
    except OSError as error:
        tell({"kind": "ours", "detail": str(error)})
    finally:
        if not settings.namespaces:
            shutil.rmtree(settings.work, ignore_errors=True)


def needed(folder: str) -> bool:
    """Whether Python lies in there."""
    return any(os.path.realpath(path).startswith(folder + "/") for path in (*sys.path, sys.prefix, sys.base_prefix))


def tell(answer: dict[str, object]) -> None:
    """One line to the driver."""
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data):]


def lines(parent: int) -> Iterator[bytes]:
    """Lines of stdin, until it ends or this process is somebody else's child."""
    rest = b""
    while True:
        line, found, rest = rest.partition(b"\n")
        if found:
            yield line
            continue
        rest = line
        while not select.select([0], [], [], 1.0)[0]:
            if os.getppid() != parent:
                return
        data = os.read(0, 1 << 16)
        if not data:
            return
        rest += data


def serve(call: dict[str, object], settings: types.SimpleNamespace) -> dict[str, object]:
    """Run one call and say how it ended; nothing of it is left when this returns."""
    begin = time.monotonic()
    result, result_in = os.pipe()
    output, output_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            jail(call, settings, result_in, output_in)
        finally:
            os._exit(OURS)
    os.close(result_in)
    os.close(output_in)
    texts = {result: b"", output: b""}
    try:
        ended_by = watch(pid, texts, settings, begin + settings.wall)
        clean = clear(pid, settings)
        usage = clean[1]
        drain(texts, settings.output)
    finally:
        os.close(result)
        os.close(output)
    answer = {"output": texts[output][: settings.output].decode("utf-8", "replace"),
              "seconds": time.monotonic() - begin}
    if clean[0] is None:
        return answer | {"kind": "ours", "detail": "processes that could not be ended"}
    if ended_by:
        return answer | {"kind": ended_by}
    return answer | verdict(texts[result], clean[0], usage, settings)


def watch(pid: int, texts: dict[int, bytes], settings: types.SimpleNamespace, deadline: float) -> str | None:
    """Read until the process ends; the limit that it broke, if any."""
    ending = os.pidfd_open(pid)
    look = time.monotonic() + TICK
    reading = set(texts)
    try:
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            ready = select.select([*reading, ending, 0], [], [], min(look, deadline) - now if look > now else 0)[0]
            for pipe in reading & set(ready):
                data = os.read(pipe, 1 << 16)
                texts[pipe] += data
                if not data:
                    reading.discard(pipe)
                if len(texts[pipe]) > settings.output:
                    return "output"
            if ending in ready:
                return None
            if 0 in ready:
                return "given up"  # the driver is gone
            if time.monotonic() >= look:
                if broken := exceeded(settings):
                    return broken
                look = time.monotonic() + TICK
    finally:
        os.close(ending)


def exceeded(settings: types.SimpleNamespace) -> str | None:
    """What the kernel does not bound, or not everywhere."""
    beside = 2 if settings.namespaces else 0
    if len(kernel.descendants(os.getpid())) - beside > settings.processes:
        return "processes"
    if not settings.namespaces and held(settings.work, settings.disk) > settings.disk:
        return "disk"
    return None


def held(folder: str, enough: int) -> int:
    """Bytes in a folder; stops counting above `enough`, and counts an inode as a page."""
    total = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += 4096 + os.lstat(os.path.join(place, name)).st_blocks * 512
        if total > enough:
            break
    return total


def clear(pid: int, settings: types.SimpleNamespace) -> tuple[int | None, float]:
    """End all that the call started and empty its directory: (exit status, None if something lives; CPU seconds)."""
    status, seconds = None, 0.0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # at once for the whole group, so that no fork escapes
    deadline = time.monotonic() + KILLING
    while time.monotonic() < deadline:
        left = kernel.descendants(os.getpid())  # before waiting: what ends after this look is waited for, too
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
    """Remove what is in a folder, whatever its permissions."""
    for place, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def drain(texts: dict[int, bytes], most: int) -> None:
    """What is left in the pipes, now that nobody writes any more."""
    for pipe in texts:
        while len(texts[pipe]) <= most and select.select([pipe], [], [], 0)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                break
            texts[pipe] += data


def verdict(result: bytes, status: int, seconds: float, settings: types.SimpleNamespace) -> dict[str, object]:
    """How a call ended that broke no limit of the keeper's."""
    code = os.waitstatus_to_exitcode(status)
    ending = -code if code < 0 else code - 128 if code > 128 else 0
    with contextlib.suppress(ValueError):
        answer = json.loads(result)
        if isinstance(answer, dict) and "kind" in answer:
            return answer
    if code == OURS:
        return {"kind": "ours", "detail": result.decode("utf-8", "replace") or "the process could not be confined"}
    if ending == signal.SIGXCPU or (ending == signal.SIGKILL and seconds >= settings.cpu):
        return {"kind": "cpu"}
    if ending:
        name = signal.Signals(ending).name if ending in set(signal.Signals) else f"signal {ending}"
        return {"kind": "ended", "detail": name}
    return {"kind": "ended", "detail": f"exit status {code}"}


def jail(call: dict[str, object], settings: types.SimpleNamespace, result: int, output: int) -> None:
    """In the forked process: confine it, and run the tool. Never returns."""
    keeper = os.getppid()
    os.setsid()
    try:
        if settings.namespaces:
            kernel.die_with_parent(keeper)
            kernel.unshare(kernel.NEW_PID | kernel.NEW_NS)
            relay(os.getpid())
            kernel.own_directories(settings.work, settings.disk, FILES)
            relay(os.getpid())
            kernel.drop_capabilities()
        elif settings.user is not None:
            kernel.become(settings.user)
        kernel.die_with_parent(os.getppid())
        os.chdir(settings.work)
        nowhere = os.open(os.devnull, os.O_RDONLY)
        result, output = os.dup(result), os.dup(output)
        for source, target in ((nowhere, 0), (output, 1), (output, 2), (result, RESULT)):
            os.dup2(source, target)
        os.closerange(RESULT + 1, 1024)
        os.environ.update(HOME=settings.work, TMPDIR=settings.work)
        apart = settings.namespaces or settings.user is not None
        others = 3 if settings.namespaces else 0 if apart else kernel.tasks_of(os.getuid())
        kernel.limit(cpu=settings.cpu, memory=settings.memory, disk=settings.disk, files=settings.files,
                     processes=settings.processes + others)
    except OSError as error:
        os.write(result, str(error).encode())
        os._exit(OURS)
    perform(call)


def relay(parent: int) -> None:
    """Fork; only the new process goes on. The old one waits for it, and ends as it did."""
    pid = os.fork()
    if pid == 0:
        kernel.die_with_parent(parent)
        return
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
        answer = {"kind": "ok", "value": getattr(module, call["function"])(**call["arguments"])}
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
    try:
        what = f"{type(error).__name__}: {error}"[:1000].removesuffix(": ")
    except BaseException:  # noqa: BLE001 - its __str__ is the tool's, too
        what = type(error).__name__
    return {"kind": kind, "detail": what if line is None else f"{what} (line {line})"}


if __name__ == "__main__":
    main()
