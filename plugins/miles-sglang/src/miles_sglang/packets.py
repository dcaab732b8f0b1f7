"""Packets: objects between processes of ours, over a socket pair that keeps the bounds of what is sent.

An object is pickled with its arrays beside it. What is small travels in the packet. What is larger is written once, to
memory without a name whose descriptor travels, and the receiver maps it: an end that dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

INLINE = 2**16
"""Bytes up to which an object travels in its packet."""
MAPPED = 2**20
"""Bytes from which it stays where it lies; less is copied, since a process has a bounded number of mappings."""
PAUSE = 0.01
"""Seconds until the system is asked again for what it has none left of."""
_ALIGNED = 64
_HEAD = struct.Struct("<qQ")  # key; bytes of the memory that travels along, or 0


class Channel:
    """One end of a socket pair, in the running loop.

    Args:
        end: made by `pair`.
        received: called with the key and the object of each packet; the object is an OSError where it did not arrive.
        lost: called once when the other end is gone.
    """

    def __init__(self, end: socket.socket, received: Callable[[int, Any], None], lost: Callable[[], None]):
        self._end, self._received, self._lost = end, received, lost
        self._loop, self._unsent, self._retry = asyncio.get_running_loop(), deque[tuple[bytes, int | None]](), None
        end.setblocking(False)
        self._loop.add_reader(end, self._receive)

    def send(self, key: int, message: object) -> None:
        """Send it, at once or when there is room; nothing happens when the other end is gone.

        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        if self._end.fileno() >= 0:
            self._unsent.append(_packed(key, message))
            if len(self._unsent) == 1:  # what is before it waits already
                self._flush()

    def close(self) -> None:
        """Close this end, which the other one notices."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        if self._retry is not None:
            self._retry.cancel()
        while self._unsent:
            _close(self._unsent.popleft()[1])

    def _flush(self) -> None:
        self._retry = None
        while self._unsent:
            data, memory = self._unsent[0]
            try:
                socket.send_fds(self._end, [data], [] if memory is None else [memory])
            except BlockingIOError:
                self._loop.add_writer(self._end, self._flush)
                return
            except OSError as error:
                self._loop.remove_writer(self._end)
                if error.errno in (errno.ENOBUFS, errno.ETOOMANYREFS):
                    self._retry = self._loop.call_later(PAUSE, self._flush)
                return  # gone otherwise, which reading finds out
            _close(self._unsent.popleft()[1])
        self._loop.remove_writer(self._end)

    def _receive(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, 2 * INLINE, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if not data:
            self.close()
            self._lost()
            return
        key, size = _HEAD.unpack_from(data)
        try:
            if size and not descriptors:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            blob = _memory(descriptors[0], size) if size else memoryview(bytearray(data))[_HEAD.size:]
        except OSError as error:
            self._received(key, error)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._received(key, _unpacked(blob))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _packed(key: int, message: object) -> tuple[bytes, int | None]:
    """What is sent, and the descriptor of what lies beside it."""
    arrays: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=arrays.append)
    parts = [memoryview(data), *(array.raw() for array in arrays)]
    table = struct.pack(f"<{len(parts) + 1}Q", len(parts), *(part.nbytes for part in parts))
    pieces = [piece for part in (memoryview(table), *parts) for piece in (part, bytes(-part.nbytes % _ALIGNED))]
    size = sum(map(len, pieces))
    if size <= INLINE:
        return b"".join([_HEAD.pack(key, 0), *pieces]), None
    memory = os.memfd_create("miles-packet")
    try:
        with open(memory, "wb", buffering=0, closefd=False) as file:
            for piece in pieces:
                written = 0
                while written < len(piece):
                    written += file.write(memoryview(piece)[written:])
    except BaseException:
        os.close(memory)
        raise
    return _HEAD.pack(key, size), memory


def _memory(descriptor: int, size: int) -> memoryview:
    if size >= MAPPED:
        try:
            return memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE))
        except OSError:  # too many mappings
            pass
    blob = bytearray(size)
    if os.preadv(descriptor, [blob], 0) != size:
        raise OSError(errno.EIO, "the memory is shorter than its packet says")
    return memoryview(blob)


def _unpacked(blob: memoryview) -> Any:
    (count,) = struct.unpack_from("<Q", blob)
    parts, at = [], _ceil(8 * (count + 1))
    for size in struct.unpack_from(f"<{count}Q", blob, 8):
        parts.append(blob[at:at + size])
        at = _ceil(at + size)
    return pickle.loads(parts[0], buffers=parts[1:])


def _ceil(size: int) -> int:
    return size + -size % _ALIGNED


def _close(memory: int | None) -> None:
    if memory is not None:
        os.close(memory)
