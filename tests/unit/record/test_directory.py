"""One run per directory, freed by death; files published whole."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_core.errors import RunDirectoryError
from miles_core.record import directory
from miles_core.record.directory import RunDirectory, publish
from miles_core.record.events import EventLog

HOLD = """
import os, sys, time
from miles_core.record.directory import RunDirectory
run = RunDirectory(sys.argv[1]).acquire()
print("held", flush=True)
if "fork" in sys.argv and not os.fork():
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def hold(path: Path, *flags: str) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), *flags], stdout=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert process.stdout.readline()
    return process


def test_a_run_makes_the_layout(tmp_path):
    run = RunDirectory(tmp_path / "a" / "run")
    with run:
        assert all(folder.is_dir() for folder in (run.samples, run.logs)) and not run.debug.exists()
        assert run.holder()["pid"] == os.getpid()
    assert run.holder() is None
    with run:  # and may be taken again
        pass


def test_a_second_run_is_told_who_holds_it_and_what_to_do(tmp_path):
    with RunDirectory(tmp_path), pytest.raises(RunDirectoryError) as caught:
        RunDirectory(tmp_path).acquire()
    text = str(caught.value)
    assert str(os.getpid()) in text and os.uname().nodename in text and str(time.localtime().tm_year) in text
    assert "--run-dir" in text and caught.value.exit_code == 2


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])  # Lustre, others, NFS
def test_a_file_system_without_locks_is_named_with_the_flag(tmp_path, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(directory.fcntl, "flock", flock)
    with pytest.raises(RunDirectoryError, match=f"locks.*{os.strerror(number)}.*--save") as caught:
        directory.Lock(tmp_path / ".lock", "--save").take()
    assert caught.value.who == str(tmp_path)


def test_a_killed_run_never_blocks(tmp_path):
    with hold(tmp_path) as process:
        with pytest.raises(RunDirectoryError, match=str(process.pid)):
            RunDirectory(tmp_path).acquire()
        process.kill()
    with RunDirectory(tmp_path) as run:
        assert run.holder()["pid"] == os.getpid()


def test_an_orphaned_fork_does_not_keep_the_lock(tmp_path):
    with hold(tmp_path, "fork") as process:
        child = int(process.stdout.readline())
        process.kill()
        process.wait()
        try:
            RunDirectory(tmp_path).acquire().release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_what_a_run_writes_is_for_its_owner_alone(tmp_path):
    with RunDirectory(tmp_path / "a" / "run") as run, run.open_log("run.log"):
        publish(run.plan_json, "{}")
        EventLog(run.events).close()
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
        for file in (run.plan_json, run.events, run.logs / "run.log"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_file_in_the_way_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"a file exists.*\[run-directory-unwritable\]"):
        RunDirectory(tmp_path / "file").acquire()
    with pytest.raises(RunDirectoryError, match="a file exists"):
        RunDirectory(tmp_path / "file" / "below").acquire()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(RunDirectoryError, match=r"dead link.*\[run-directory-unwritable\]"):
        RunDirectory(tmp_path / "link").acquire()


@pytest.mark.parametrize(("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "cannot be written")])
def test_a_disk_that_refuses_is_explained_and_leaves_nothing(tmp_path, monkeypatch, code, words):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    publish(tmp_path / "plan.txt", "old")
    monkeypatch.setattr(directory.os, "fsync", refuse)
    with pytest.raises(RunDirectoryError, match=words) as caught:
        publish(tmp_path / "plan.txt", "new")
    assert "plan.txt" in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.txt"]
    assert (tmp_path / "plan.txt").read_text() == "old"
    monkeypatch.setattr(directory.os, "pwrite", refuse)
    with pytest.raises(RunDirectoryError, match=words):
        RunDirectory(tmp_path / "run").acquire()
    assert RunDirectory(tmp_path / "run").holder() is None


def test_publish_replaces_and_takes_text_or_bytes(tmp_path):
    assert publish(tmp_path / "a", "é\ud800").read_bytes() == "é".encode() + rb"\ud800"
    assert publish(tmp_path / "a", b"\0").read_bytes() == b"\0"


def test_acquire_sweeps_what_a_kill_left_half_published(tmp_path):
    (tmp_path / "samples").mkdir()
    left = tmp_path / "samples" / f".x.jsonl.1-0{directory._TEMPORARY}"
    left.write_text("half")
    with RunDirectory(tmp_path):
        assert not left.exists()


def test_existing_refuses_what_is_no_run(tmp_path):
    for path, words in ((tmp_path / "no", "not exist"), (tmp_path, "neither"), (Path(__file__), "is a file")):
        with pytest.raises(RunDirectoryError, match=rf"{words}.*\[not-a-run-directory\]"):
            RunDirectory.existing(path)
    (tmp_path / "plan.json").write_text("{}")
    assert RunDirectory.existing(tmp_path).path == tmp_path
    os.mkfifo(tmp_path / "events.jsonl")  # whoever opened it would wait for ever
    with pytest.raises(RunDirectoryError, match=r"\[not-a-run-directory\]"):
        RunDirectory.existing(tmp_path)
