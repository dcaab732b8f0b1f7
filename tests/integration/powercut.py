"""Power cuts, simulated: one run is recorded, and every state that its disk may be left in can be laid out in a folder.

The model is stricter than ext4. Of a file, the bytes that were there at its last fsync are sure; of those after, any
prefix may be left, or the size with zeros in place of blocks. Of a folder, the names at its last fsync are sure, and of
the changes after it any prefix may be left, whatever became of the files and of other folders.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from miles_testing.faults import Faults, _Tracer

from miles_core.record import publish

BLOCK = 512
"""Smaller than a disk's, so that short files have several."""


@dataclass(frozen=True)
class Recorder(Faults):
    """Beside the numbered operations, notes what they were done to, and keeps a copy of each file at its fsync."""

    def __call__(self) -> None:
        _Recording(self).install()


class _Recording(_Tracer):
    def __init__(self, faults: Recorder):
        super().__init__(faults)
        self._store = Path(f"{faults.log}.store")
        self._store.mkdir()
        self._copies = 0

    def at(self, kind, path, size=0, tear=None, file=None):
        super().at(kind, path, size, tear, file)
        full = os.path.join(self.root, self._actual(path))
        if kind == "rename" or (kind == "open" and os.path.isdir(full)):  # a file without a name
            return
        copy = None
        if kind == "fsync" and os.path.isfile(full):
            copy, self._copies = self._copies, self._copies + 1
            shutil.copyfile(full, self._store / str(copy))
        self._write_down(kind, path, size, copy)

    def install(self):
        super().install()
        real = publish.exchange

        def traced(one, other):
            if done := real(one, other):
                self._write_down("exchange", self.inside(one), self.inside(other), None)
            return done

        publish.exchange = traced

    def inside(self, path, dir_fd=None):
        found = super().inside(path, dir_fd)
        if found is not None and "PROCESS" in found:
            name = path if not isinstance(path, int) else os.readlink(f"/proc/self/fd/{path}")
            self._last_temporary = os.path.basename(os.fsdecode(name))
        return found

    def _actual(self, path):
        return os.path.join(os.path.dirname(path), self._last_temporary) if "PROCESS" in path else path

    def _of_two(self, real, kind):
        inner = super()._of_two(real, kind)

        def traced(source, target, **named):
            if kind == "rename" and (there := self.inside(target)) is not None:
                self._write_down("rename", self.inside(source), there, None)
            return inner(source, target, **named)

        return traced

    def _write_down(self, *what):
        with open(f"{self.faults.log}.detail", "a") as file:
            file.write(json.dumps(what) + "\n")


@dataclass(eq=False)
class File:
    """`copy`: where its bytes of the end are; it is only ever appended to."""

    size: int = 0
    sure: int = 0
    copy: Path | None = None


@dataclass(eq=False)
class Folder:
    """`now`: its names; `sure`: those at its last fsync; `since`: changes after that, name -> what, None for gone."""

    now: dict = field(default_factory=dict)
    sure: dict = field(default_factory=dict)
    since: list = field(default_factory=list)

    def change(self, **names):
        self.since.append(names)
        self.now = self.applied(self.now, names)

    @staticmethod
    def applied(names, changes):
        return {name: node for name, node in {**names, **changes}.items() if node is not None}


class Disk:
    """The folder `root` as a run recorded by `Recorder` changes it, one operation after the other."""

    def __init__(self, root: Path, log: Path):
        self.steps = [json.loads(line) for line in Path(f"{log}.detail").read_text().splitlines()]
        self._store = Path(f"{log}.store")
        self.top = Folder()
        for step in self.steps:  # once through, to know what every file is in the end
            self.do(*step, files := getattr(self, "_files", []))
            self._files = files
        for path, node in self._walk(self.top, Path()):
            if isinstance(node, File) and (root / path).is_file():
                node.copy = root / path
        self._copies = [node.copy for node in files]
        self.restart()

    def restart(self) -> None:
        """Nothing was done yet."""
        self.top, self._files = Folder(), []

    def step(self, number: int) -> None:
        """Do the operation of this index; they come in order."""
        self.do(*self.steps[number], self._files)

    def do(self, kind: str, path: str, more: object, copy: int | None, files: list[File]) -> None:
        parent, name = self._find(os.path.dirname(path)), os.path.basename(path)
        if path == ".":
            if kind == "fsync":
                self.top.sure, self.top.since = dict(self.top.now), []
            return
        node = parent.now.get(name)
        if kind == "open" and node is None:
            files.append(File(copy=getattr(self, "_copies", [None] * 10**6)[len(files)]))
            parent.change(**{name: files[-1]})
        elif kind in ("write", "copy"):
            node.size += more
        elif kind == "mkdir" and node is None:
            parent.change(**{name: Folder()})
        elif kind in ("unlink", "rmdir"):
            parent.change(**{name: None})
        elif kind in ("rename", "exchange"):
            there = self._find(os.path.dirname(more))
            assert there is parent, f"{path} -> {more} has two folders to go through"
            other = os.path.basename(more)
            parent.change(**{name: parent.now[other] if kind == "exchange" else None, other: node})
        elif kind == "fsync" and isinstance(node, Folder):
            node.sure, node.since = dict(node.now), []
        elif kind == "fsync":
            node.copy = self._store / str(copy)
            node.size = node.sure = node.copy.stat().st_size  # less than was written, where it was written anew

    def lay_out(self, folder: Path, draw: random.Random) -> None:
        """One of the states that a power cut may leave now."""
        self._lay_out(self.top, folder, draw)

    def _lay_out(self, top: Folder, to: Path, draw: random.Random) -> None:
        to.mkdir()
        names = top.sure
        for changes in top.since[:draw.choice((0, len(top.since), draw.randint(0, len(top.since))))]:
            names = top.applied(names, changes)
        for name, node in names.items():
            if isinstance(node, Folder):
                self._lay_out(node, to / name, draw)
            elif node.size == node.sure > 1 << 16:
                os.link(node.copy, to / name)
            else:
                (to / name).write_bytes(self._left(node, draw))

    @staticmethod
    def _left(node: File, draw: random.Random) -> bytes:
        data = (node.copy.read_bytes() if node.copy is not None else b"").ljust(node.size, b"?")[:node.size]
        if node.size == node.sure:
            return data
        sure, later = data[:node.sure], bytearray(data[node.sure:])
        match draw.choice(("lost", "all", "partly", "zeros", "holes")):
            case "lost":
                return sure
            case "partly":
                return sure + later[:draw.randint(0, len(later))]
            case "zeros":
                return sure + bytes(len(later))
            case "holes":
                for begin in range(0, len(later), BLOCK):
                    if draw.random() < 0.5:
                        later[begin:begin + BLOCK] = bytes(len(later[begin:begin + BLOCK]))
        return sure + later

    def _find(self, path: str) -> Folder:
        found = self.top
        for part in Path(path).parts:
            found = found.now[part]
        return found

    def _walk(self, top: Folder, at: Path):
        for name, node in top.now.items():
            yield at / name, node
            if isinstance(node, Folder):
                yield from self._walk(node, at / name)
