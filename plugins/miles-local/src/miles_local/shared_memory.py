"""Trainer ranks in processes of their own and the local engine: weights by memory that both sides see.

The first rank fills two files in turn, which lie in memory (/dev/shm) where there is room, and says over a socket what
lies in them; the engine copies from there and answers. So no more than two buckets exist beside the two models, and
nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles_core.errors import SyncError
from miles_core.types import Rank
from miles_local.buckets import Bucket, Cutter

if TYPE_CHECKING:
    from miles_core.config.tables import RunConfig
    from miles_core.hosts import Handle
    from miles_core.stages.rollout import Engine

@dataclass(frozen=True, slots=True)
class Settings:
    """What both sides have to know of the run.

    Args:
        limit: bytes of a bucket.
        timeout: seconds that one message may take to come.
        source, target: dtype that the trainer's parameters have, and that they are sent in.
    """

    limit: int
    timeout: float
    source: torch.dtype
    target: torch.dtype

    @classmethod
    def of(cls, config: RunConfig) -> Settings:
        """From a run's configuration."""
        source = "bfloat16" if config.perf.bf16 else "float32"
        return cls(min(config.perf.update_weight_buffer_size, LARGEST),
                   0.9 * config.perf.weight_sync_timeout,  # what is late is named before the sync itself is
                   getattr(torch, source), getattr(torch, config.rollout.engine_dtype or source))


LARGEST = 64 * 1024**2
"""Bytes of a bucket: larger ones take memory and save nothing where both sides are CPUs of one machine."""


class SharedSender:
    """See stages.sync.Sender.

    Args:
        folder: where the socket is and the first rank's files go.
    """

    takes_stacks = False

    def __init__(self, settings: Settings, folder: str):
        self.settings, self.folder = settings, folder
        self._files: dict[int, tuple[str, torch.Tensor]] = {}

    def open(self, rank: Rank) -> None:
        """
        Raises:
            SyncError: the first rank is on another machine than the driver.
        """
        self._leads = rank.index == 0
        if self._leads and not Path(self.folder).is_dir():
            raise SyncError("the trainer's first rank is not on the driver's machine", who=self.folder,
                            fix="use --weight-sync in-process", code="first-rank-not-local")

    def send(self, stream: Iterator[tuple[str, torch.Tensor]], version: int) -> dict[str, float]:
        if not self._leads:
            for _ in stream:
                pass
            return {}
        begin, tensors, size, unread = time.perf_counter(), 0, 0, 0
        cutter = Cutter(self.settings.limit, self.settings.source, self.settings.target, allocate=self._memory)
        try:
            with _Line(f"{self.folder}/line", self.settings.timeout) as line:
                for number, bucket in enumerate(cutter(stream)):
                    file = self._files[number % cutter.buffers][0]
                    line.say({"file": file, "bytes": bucket.buffer.numel(), "tensors": bucket.tensors,
                              "size": bucket.size, "crc": zlib.crc32(bucket.flat.numpy())})
                    tensors, size, unread = tensors + len(bucket.tensors), size + bucket.bytes, unread + 1
                    if unread == cutter.buffers:  # the next one goes where the oldest lies
                        line.hear()
                        unread -= 1
                line.say({"end": True})
                for _ in range(unread + 1):
                    line.hear()
        except (OSError, EOFError) as error:
            raise SyncError("the engine failed to load the weights", got=f"{type(error).__name__}: {error}",
                            fix="see the engine's error", code="engine-load-failed") from error
        return {"tensors": tensors, "bytes": size, "transfer_s": time.perf_counter() - begin}

    def close(self) -> None:
        self._files.clear()

    def _memory(self, index: int, size: int, _device: torch.device) -> torch.Tensor:
        """A file of this many bytes, kept from sync to sync.

        Raises:
            SyncError: no room for it.
        """
        if index not in self._files or self._files[index][1].numel() < size:
            if (room := shutil.disk_usage(self.folder).free) < size:  # writing beyond it would end the process
                raise SyncError("not enough shared memory for a bucket of weights", code="shared-memory-full",
                                got=f"{room} bytes free", who=self.folder,
                                fix="lower --update-weight-buffer-size")
            path = f"{self.folder}/{index}-{size}"
            self._files[index] = path, torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        return self._files[index][1]


class SharedMemory:
    """See stages.sync.WeightSync; for the local engine. Every bucket has a checksum."""

    def __init__(self, config: RunConfig):
        self._settings, self._mode = Settings.of(config), config.rollout.pause_generation_mode
        self._folder: str | None = None
        self._maps: dict[str, torch.Tensor] = {}

    async def sync(self, trainer: Handle, engine: Engine, version: int) -> dict[str, float]:
        begin = time.perf_counter()
        await engine.pause(self._mode)
        if self._folder is None:
            self._folder = folder_in_memory(2 * self._settings.limit)
            await trainer.connect(SharedSender(self._settings, self._folder))
        paused, seconds = time.perf_counter() - begin, [0.0]
        with _listening(Path(self._folder), self._settings.timeout) as listener:
            taken = self._taken(listener, seconds)
            sending = asyncio.ensure_future(trainer.send(version))
            taking = asyncio.ensure_future(engine.update_weights(taken, version))
            await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_EXCEPTION)
            if sending.done() and sending.exception() is not None:
                with contextlib.suppress(OSError):
                    listener.shutdown(socket.SHUT_RDWR)  # no peer will connect
            elif taking.done():
                taken.close()  # no peer is listening
            results = await asyncio.gather(taking, sending, return_exceptions=True)
        # Whoever failed first left the other without its peer, and only a SyncError may be about that.
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, SyncError))
        await engine.resume()
        return {"pause_s": paused, **results[1], "verify_s": seconds[0]}

    def _taken(self, listener: socket.socket, seconds: list[float]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the sender puts into memory, as views that last until the next bucket is asked for.

        Raises:
            SyncError: the sender ended early, or what came is not what was sent.
        """
        try:
            with _Line.accepted(listener) as line:
                while "end" not in (message := line.hear()):
                    memory, begin = self._mapped(message["file"], message["bytes"]), time.perf_counter()
                    if zlib.crc32(memory[: message["size"]].numpy()) != message["crc"]:
                        raise SyncError("weights changed on their way through shared memory",
                                        code="shared-memory-changed", who=message["file"],
                                        fix="resume from the last checkpoint, and test the machine's memory")
                    seconds[0] += time.perf_counter() - begin
                    yield from Bucket(memory, message["tensors"]).views()
                    line.say({})
                line.say({})
        except (OSError, EOFError) as error:
            raise SyncError("the trainer ended the weight sync early", got=f"{type(error).__name__}: {error}",
                            fix="see the trainer's error", code="weight-sync-ended-early") from error

    def _mapped(self, path: str, size: int) -> torch.Tensor:
        if path not in self._maps:
            self._maps[path] = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            Path(path).unlink()  # both have it; when both end it is gone
        return self._maps[path]


def folder_in_memory(need: int) -> str:
    """A new folder in /dev/shm, or among the temporary files where that has less than `need` bytes left."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > need
    return tempfile.mkdtemp(prefix="miles-", dir=memory if fits else None)


@contextlib.contextmanager
def _listening(folder: Path, timeout: float) -> Iterator[socket.socket]:
    """The socket in a folder that exists as long as the block; mapped files outlive their names.

    Raises:
        SyncError: another user made the folder since the block before, and would say what is mapped and removed.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise SyncError("the folder of the weights belongs to another user", code="weights-folder-taken",
                        who=str(folder), fix="resume the run, which takes another name")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.settimeout(timeout)
            listener.bind(f"{folder}/line")
            listener.listen(1)
            yield listener
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Line:
    """JSON, line by line, between two processes; every wait is bounded by the socket's timeout."""

    def __init__(self, path: str, timeout: float):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        self._socket.connect(path)
        self._reader = self._socket.makefile("r")

    @classmethod
    def accepted(cls, listener: socket.socket) -> _Line:
        line = cls.__new__(cls)
        line._socket, _ = listener.accept()
        line._socket.settimeout(listener.gettimeout())
        line._reader = line._socket.makefile("r")
        return line

    def say(self, message: dict) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> dict:
        """
        Raises:
            EOFError: the other side has ended.
        """
        if not (text := self._reader.readline()):
            raise EOFError("the peer closed the connection")
        return json.loads(text)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_exc) -> None:
        self._reader.close()
        self._socket.close()
