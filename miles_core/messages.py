"""Messages between processes, their arrays apart: in memory that sender and receivers share.

The sender writes an array once, whatever the number of receivers. These map the memory, so that what they do not read
they do not hold; an answer refers to arrays that came with the message. Received arrays are read-only.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import reduction
from tempfile import TemporaryFile
from typing import Any

import numpy as np

Pickler = Callable[[Any, Callable[[pickle.PickleBuffer], Any]], bytes]
"""(content, buffer_callback) -> bytes; see pickle.Pickler."""


def pickled(content: Any, callback: Callable[[pickle.PickleBuffer], Any]) -> bytes:
    """By multiprocessing's pickler, which knows how to send tensors."""
    stream = io.BytesIO()
    reduction.ForkingPickler(stream, 5, True, callback).dump(content)
    return stream.getvalue()


class Message:
    """Any content, pickled once for any number of processes. Its memory has no name and ends with who holds it last."""

    def __init__(self, content: Any, pickler: Pickler = pickled):
        arrays: list[memoryview] = []
        self.body = pickler(content, lambda one: arrays.append(one.raw()))
        self.spans, self.size, self.memory = [(0, 0)] * len(arrays), 0, memoryview(b"")
        # The smallest first: columns that every rank reads share pages, and none with those that few read.
        for i in sorted(range(len(arrays)), key=lambda i: arrays[i].nbytes):
            self.spans[i] = self.size, self.size + arrays[i].nbytes
            self.size += -(-arrays[i].nbytes // 64) * 64
        if self.size:
            self.file = os.memfd_create("miles") if hasattr(os, "memfd_create") else os.dup(TemporaryFile().fileno())  # noqa: SIM115
            weakref.finalize(self, os.close, self.file)
            os.truncate(self.file, self.size)
            self.memory = memoryview(mmap.mmap(self.file, self.size))
            for (begin, end), array in zip(self.spans, arrays, strict=True):
                self.memory[begin:end] = array


class Line:
    """One end of a pipe to another process. `memory` is that of the last message with arrays."""

    def __init__(self, pipe: Any):
        self.pipe, self.memory = pipe, memoryview(b"")

    def ask(self, process: int | None, method: str, message: Message) -> Any:
        """Send a call to a process, by its id, and wait for the answer."""
        self.pipe.send((method, message.body, message.spans, message.size))
        if message.size:
            reduction.send_handle(self.pipe, message.file, process)
            self.memory = message.memory
        return unpickled(*self.pipe.recv(), self.memory)

    def asked(self) -> tuple[str, Any] | None:
        """Wait for a call; None when there will be no further one."""
        if (call := self.pipe.recv()) is None:
            return None
        method, body, spans, size = call
        if size:
            file = reduction.recv_handle(self.pipe)
            self.memory = memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))
            os.close(file)
        return method, unpickled(body, spans, self.memory)


def unpickled(body: bytes, spans: Iterable[tuple[int, int]], memory: memoryview) -> Any:
    """The content, with read-only arrays of the memory."""
    return pickle.loads(body, buffers=[memory[begin:end].toreadonly() for begin, end in spans])


def answered(content: Any, memory: memoryview, pickler: Pickler = pickled) -> tuple[bytes, list[tuple[int, int]]]:
    """An answer, pickled: of arrays that lie in the memory only the places, [first byte, last byte + 1)."""
    base, spans = _address(memory), []

    def is_new(array: memoryview) -> bool:
        begin = _address(array) - base
        if known := begin >= 0 and begin + array.nbytes <= memory.nbytes:
            spans.append((begin, begin + array.nbytes))
        return not known

    return pickler(content, lambda one: is_new(one.raw())), spans


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data if memory.nbytes else 0


def portable(error: BaseException) -> BaseException:
    """The error, or one that says the same, if it does not survive pickling: a plugin's own class may not."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:  # noqa: BLE001 - whatever its class does
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.__notes__ = getattr(error, "__notes__", [])
        return other
