"""The recorder itself: what it sees, and that it stops exactly where it is told to."""

import pytest
from miles_testing.faults import operations, untraced
from miles_testing.forked import python

WORK = """
import os, shutil, sys
from pathlib import Path
from miles_testing.faults import Faults, _Tracer
kill, torn = int(sys.argv[1]) or None, int(sys.argv[2])
_Tracer(Faults(Path("root"), Path("log"), kill, torn)).install()
import torch
root = Path("root")
root.mkdir()
(root / "text").write_text("0123456789")
with open("root/buffered", "wb", buffering=4) as file:
    for part in (b"01234", b"56789"):
        file.write(part)
        file.flush()
    os.fsync(file.fileno())
fd = os.open("root/raw", os.O_RDWR | os.O_CREAT)
os.write(fd, b"ab")
os.write(fd, b"cd")
os.pwrite(fd, b"X", 0)
os.ftruncate(fd, 3)
os.close(fd)
torch.save({"one": 1}, root / "zip")
shutil.copyfile("root/text", "root/copy")
os.replace("root/copy", "root/moved")
Path("outside").write_text("not under the root")
assert (root / "text").read_text() == "0123456789" and torch.load("root/zip") == {"one": 1}
shutil.rmtree(root)
"""
SEEN = [
    "mkdir .", "open text", "write text", "open buffered", "write buffered", "fsync buffered", "open raw", "write raw",
    "write raw", "write raw", "truncate raw", "open zip", "write zip", "open copy", "copy copy", "rename moved",
]  # fmt: skip


def work(path, kill=0, torn=0):
    path.mkdir()
    done = python(["-c", WORK, str(kill), str(torn)], path)
    return done.code, done.err, [f"{o.kind} {o.path}" for o in operations(path / "log")]


@pytest.mark.integration
def test_what_is_seen_and_where_it_stops(tmp_path):
    code, errors, seen = work(tmp_path / "whole")
    assert code == 0, errors
    assert seen[: len(SEEN)] == SEEN
    removed = [f"unlink {name}" for name in ("buffered", "moved", "raw", "text", "zip")]
    assert sorted(seen[len(SEEN) :]) == ["rmdir .", *removed]
    assert untraced(tmp_path / "whole/log") == []

    code, _, seen = work(tmp_path / "before", kill=5)
    assert code == -9 and seen == SEEN[:5]
    assert (tmp_path / "before/root/buffered").read_bytes() == b""
    code, _, seen = work(tmp_path / "torn", kill=5, torn=7)
    assert code == -9 and seen == SEEN[:5]
    assert (tmp_path / "torn/root/buffered").read_bytes() == b"0123456"
    code, _, seen = work(tmp_path / "copy", kill=15, torn=3)
    assert code == -9 and (tmp_path / "copy/root/copy").read_bytes() == b"012"
    code, _, seen = work(tmp_path / "short", kill=5, torn=20)  # nothing to tear: the write has only 10 bytes
    assert code == -9 and seen == SEEN[:6]
    assert (tmp_path / "short/root/buffered").read_bytes() == b"0123456789"
