"""What Linux offers to keep a process in, for which Python 3.11 has no function. Standard library only.

man 2 prctl, unshare, mount, mount_setattr, capset; man 7 user_namespaces, pid_namespaces.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

NEW_NS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
NO_SUID, NO_DEV, BIND, RECURSIVE, PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
SET_PDEATHSIG, SET_DUMPABLE, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 4, 36, 38
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_RDONLY = 442, -100, 0x8000, 1
CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """
    Raises:
        OSError: the kernel refuses.
    """
    _checked("prctl", _libc.prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))


def die_with_parent(parent: int) -> None:
    """SIGKILL once the parent ends; at once when it has. Call after any change of credentials, which undoes it."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() not in (parent, 0):  # 0: the parent is outside of this namespace
        os._exit(1)


def unshare(flags: int) -> None:
    """
    Raises:
        OSError: the kernel, or a container's filter of system calls, refuses.
    """
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """
    Raises:
        OSError: the kernel refuses.
    """
    texts = [text.encode() for text in (source, target, kind)]
    _checked(f"mount {target}", _libc.mount(*texts, ctypes.c_ulong(flags), data.encode()))


def own_mounts(hidden: Mapping[str, Sequence[str]]) -> None:
    """A new mount namespace in which directories are empty.

    Args:
        hidden: directory -> the paths in there that stay, each with all that is below it.

    Raises:
        OSError: not root of this user namespace, or refused.
    """
    unshare(NEW_NS)
    _hide(hidden)


def _hide(hidden: Mapping[str, Sequence[str]]) -> None:
    mount("none", "/", "", RECURSIVE | PRIVATE)
    for directory, needed in hidden.items():
        opened = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in needed}
        mount("tmpfs", directory, "tmpfs", NO_SUID | NO_DEV, "size=4k,mode=0755")
        for path, descriptor in opened.items():
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, "", BIND | RECURSIVE)
            os.close(descriptor)


def own_namespaces(hidden: Mapping[str, Sequence[str]]) -> None:
    """New user, mount, network and IPC namespaces; every file system becomes read-only; no further user namespaces.

    The process keeps its user and has all capabilities in there, so that it can mount for those it starts.

    Args:
        hidden: directories that become empty, and what of them stays, as for `own_mounts`.

    Raises:
        OSError: something of it is refused.
    """
    user, group = os.getuid(), os.getgid()
    prctl(SET_DUMPABLE, 1)  # a change of user takes it, and with it the right to write the maps
    unshare(NEW_USER | NEW_NS | NEW_NET | NEW_IPC)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")  # in one of its own a tool could mount
    _hide(hidden)
    attributes = (ctypes.c_uint64 * 4)(ATTR_RDONLY, 0, 0, 0)
    _checked("mount_setattr", _libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes),
                                            ctypes.c_size_t(ctypes.sizeof(attributes))))


def own_directories(work: str, size: int, files: int) -> None:
    """In a new mount and process namespace: an empty working directory of `size` bytes in memory, and its own /proc.

    Raises:
        OSError: refused, except that /proc becomes an empty directory where it may not be mounted.
    """
    mount("tmpfs", work, "tmpfs", NO_SUID | NO_DEV, f"size={size},nr_inodes={files},mode=0700")
    try:
        mount("proc", "/proc", "proc", NO_SUID | NO_DEV | ATTR_RDONLY)  # root writes the kernel's settings there
    except OSError:  # a container hides parts of its own
        mount("tmpfs", "/proc", "tmpfs", NO_SUID | NO_DEV | ATTR_RDONLY, "size=4k")


def drop_capabilities() -> None:
    """Give up all capabilities, for good.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(SET_NO_NEW_PRIVS, 1)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    _checked("capset", _libc.capset(ctypes.byref(header), ctypes.byref(none)))


def become(user: int) -> None:
    """Turn from root into an unprivileged user and group of that number.

    Raises:
        OSError: not root, or a number that this container does not have.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def limit(*, cpu: float, memory: int, disk: int, processes: int, files: int) -> None:
    """Resource limits of this process and those it starts; `processes` counts all tasks of this user, and does
    not bound root."""
    seconds = max(1, -int(-cpu // 1))
    limits = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_FSIZE: (disk, disk),
        resource.RLIMIT_NOFILE: (files, files),
        resource.RLIMIT_NPROC: (processes, processes),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
    }
    for kind, bounds in limits.items():
        highest = resource.getrlimit(kind)[1]
        if highest != resource.RLIM_INFINITY:
            bounds = min(bounds[0], highest), min(bounds[1], highest)
        resource.setrlimit(kind, bounds)


def descendants(root: int) -> list[int]:
    """Every process below `root`, zombies left out, by the parents that /proc states."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it ended
                continue
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    pids: list[int] = []
    below = {root}
    while below:
        below = {pid for pid, parent in parents.items() if parent in below and pid not in pids}
        pids += below
    return pids


def tasks_of(user: int) -> int:
    """How many threads of a user /proc shows."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it ended
                continue
    return total
