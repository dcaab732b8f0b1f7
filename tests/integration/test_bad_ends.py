"""Runs that are cut short: by a signal, a full disk, a second run, or by themselves. Each can be gone on with."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from miles_core.record.events import read


def events(place, kind: str) -> list[dict]:
    """The events of a kind; none before the file is there."""
    path = place.path / "runs/a/events.jsonl"
    return [event for event in read(path, everything=True) if event["event"] == kind] if path.exists() else []


def wait_for(place, kind: str, process) -> None:
    """Until the run has told of one event of this kind."""
    deadline = time.monotonic() + 60
    while not events(place, kind):
        assert process.is_alive() and time.monotonic() < deadline, f"the run ended or hung before its first {kind}"
        time.sleep(0.02)


# ---------------------------------------------------------------------------------------------------------- signals


def interrupt(place, process, number: int = signal.SIGINT, after: str = "checkpoint") -> None:
    """To all processes of the run, as a terminal does; it leads a group of its own (before=os.setsid)."""
    wait_for(place, after, process)
    os.killpg(process.pid, number)


@pytest.mark.parametrize(("number", "host"), [(signal.SIGINT, "thread"), *(
    pytest.param(*case, marks=pytest.mark.full) for case in ((signal.SIGINT, "process"), (signal.SIGTERM, "thread")))])
def test_interrupted_run_goes_on(place, quiet, number, host):
    """It says how, its record ends as interrupted, and the checkpoint it leaves is where the next run begins."""
    outcome = place.run("--save", "ckpt", "--save-interval", "1", "--num-rollout", "1000", "--trainer-host", host,
                        before=os.setsid, while_running=functools.partial(interrupt, place, number=number))
    quiet(outcome)
    assert outcome.code == 130
    assert outcome.err == "Interrupted. The same command with --load ckpt goes on from the last checkpoint.\n"
    assert "interrupted" in outcome.out.splitlines()[-1]
    assert [event["status"] for event in events(place, "run_end")] == ["interrupted"]
    done = len([path for path in (place.path / "ckpt").iterdir() if path.name.startswith("iter_")])
    place.clean("--load", "ckpt", "--num-rollout", str(done + 1))
    assert events(place, "run_start")[-1]["resumed_from"] == done
    assert events(place, "run_end")[-1]["status"] == "completed"


def test_interrupted_run_that_saved_nothing(place, quiet):
    outcome = place.run("--num-rollout", "1000", before=os.setsid,
                        while_running=functools.partial(interrupt, place, after="metrics"))
    quiet(outcome)
    assert outcome.code == 130 and outcome.err.startswith("Interrupted. Nothing was saved; with --save FOLDER")
    place.clean()


ON_ITS_OWN_TERMINAL = """
import fcntl, sys, termios
from miles_core.cli import main
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
main()
"""


@pytest.mark.full
def test_a_terminal_that_is_closed_is_an_interrupt(place):
    """The last sentence cannot be written any more, which is no error."""
    terminal, end = os.openpty()
    words = ["run", place.file, "--no-live", "--run-dir", "runs/a", "--num-rollout", "1000"]
    with subprocess.Popen([sys.executable, "-c", ON_ITS_OWN_TERMINAL, *words], cwd=place.path, stdin=end, stdout=end,
                          stderr=end, start_new_session=True) as process:
        try:
            os.close(end)
            wait_for(place, "metrics", SimpleNamespace(is_alive=lambda: process.poll() is None))
            os.close(terminal)
            assert process.wait(60) == 130
        finally:
            process.kill()
    assert [event["status"] for event in events(place, "run_end")] == ["interrupted"]


def test_interrupt_while_a_scorer_hangs(place, quiet):
    """Neither the scorer's thread nor a second Ctrl-C of an impatient user is in the way."""

    def twice(process):
        interrupt(place, process, after="weight_sync")
        time.sleep(0.3)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGINT)

    flags = place.plugin("import time\nfrom miles_core import hookimpl\n\n\nclass Bad:\n"
                         "    @hookimpl('reward', name='bad')\n    def bad(self, sample):\n        time.sleep(1000)\n"
                         "        return 0.0\n")
    outcome = place.run(*flags, "--rm-type", "bad", before=os.setsid, while_running=twice)
    quiet(outcome)
    assert outcome.code == 130 and outcome.seconds < 30
    place.clean()


@pytest.mark.full
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGTERM)])
def test_signals_while_a_plugin_blocks_the_event_loop(place, quiet, numbers):
    """The one who blocks is named meanwhile, heartbeats go on, and a second signal ends the run cleanly."""

    def twice(process):
        interrupt(place, process, numbers[0], after="loop_blocked")
        time.sleep(0.3)
        assert process.is_alive(), "the first signal waits for the loop"
        wait_for(place, "heartbeat", process)
        os.killpg(process.pid, numbers[1])

    flags = place.plugin("import time\nfrom miles_core import hookimpl\n\n\nclass Bad:\n"
                         "    @hookimpl('reward', name='bad')\n    async def bad(self, sample):\n"
                         "        time.sleep(1000)\n        return 0.0\n")
    outcome = place.run(*flags, "--rm-type", "bad", "--heartbeat-interval", "1", before=os.setsid, while_running=twice)
    quiet(outcome)
    assert outcome.code == 130 and outcome.err.startswith("Interrupted.") and outcome.seconds < 60
    blocked = events(place, "loop_blocked")[0]
    assert (blocked["plugin"], blocked["hook"]) == ("bad", "reward") and "bad.py:8 " in blocked["where"]
    assert events(place, "heartbeat")[-1]["where"] == blocked["where"]
    assert "bad.py:8" in outcome.out and "bad.py:8" in (place.path / "runs/a/logs/run.log").read_text()
    assert [event["status"] for event in events(place, "run_end")] == ["interrupted"]
    place.clean()


LONG_BACKWARD = """
import time
import torch
from miles_core import hookimpl


class Long(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        open('backward', 'w').close()
        while True:
            time.sleep(0.005)


class Bad:
    @hookimpl('policy_loss', name='bad')
    def bad(self, inputs):
        return Long.apply(-inputs.log_probs), {}
"""


@pytest.mark.full
@pytest.mark.parametrize("signals", [1, 2])
def test_interrupt_during_a_long_backward(place, signals):
    """An interpreter torn down under a thread in the middle of C++ aborts; only a process of its own shows it."""
    flags = place.plugin(LONG_BACKWARD)
    run = subprocess.Popen([sys.executable, "-c", "from miles_core.cli import main; main()", "run", place.file,
                            "--no-live", "--run-dir", "runs/a", "--save", "ckpt", *flags, "--policy-loss", "bad"],
                           cwd=place.path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (place.path / "backward").exists():
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        for _ in range(signals):
            os.killpg(run.pid, signal.SIGINT)
            time.sleep(0.3)
        begin = time.monotonic()
        _, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, err
    assert b"terminate called" not in err and b"last checkpoint" not in err
    assert [event["status"] for event in events(place, "run_end")] == ["interrupted"]
    assert signals == 1 or time.monotonic() - begin < 4, "the second one waits for nothing more"


# ------------------------------------------------------------------------------------------------------ full disks


@pytest.fixture
def small_disk(tmp_path):
    """A function that puts a file system of so many bytes at a folder; unmounted at the end."""
    mounted = []

    def mount(folder, size: int):
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
        if done.returncode:
            pytest.skip(f"mount is not permitted: {done.stderr.decode().strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


def test_disk_full_while_saving(place, small_disk):
    """The checkpoint of before stays; once there is room the run goes on from it."""
    small_disk(place.path / "ckpt", 8 << 20)
    place.saved()
    filler = place.path / "ckpt/filler"
    room = os.statvfs(filler.parent)
    filler.write_bytes(b"\0" * (room.f_bavail * room.f_frsize - 100_000))
    place.refused(1, "ckpt/iter_0000002: the disk is full ... free some space",
                  "--save", "ckpt", "--load", "ckpt", "--num-rollout", "2")
    assert (place.path / "ckpt/latest_checkpointed_iteration.txt").read_text() == "1\n"
    assert not list((place.path / "ckpt").glob(".tmp-*")), "what was half written is gone and takes no room"
    filler.unlink()
    place.clean("--save", "ckpt", "--load", "ckpt", "--num-rollout", "2")
    assert (place.path / "ckpt/latest_checkpointed_iteration.txt").read_text() == "2\n"


@pytest.mark.full
def test_disk_full_while_recording(place, small_disk):
    """The record holds whole lines up to where the disk was full, and goes on after them."""
    small_disk(place.path / "runs", 1 << 20)
    filler = place.path / "runs/filler"
    filler.write_bytes(b"\0" * (900 << 10))
    place.refused(1, "runs/a/ ... the disk is full ... free some space",
                  "--save", "ckpt", "--save-interval", "3", "--num-rollout", "1000")
    lines = (place.path / "runs/a/events.jsonl").read_bytes().splitlines(keepends=True)
    assert all(json.loads(line) and line.endswith(b"\n") for line in lines)
    filler.unlink()
    done = int((place.path / "ckpt/latest_checkpointed_iteration.txt").read_text())
    place.clean("--load", "ckpt", "--num-rollout", str(done + 1))


def limit(size: int):
    """No file larger than this: what a quota does, and it needs no mount."""
    return functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.full
def test_file_limit_while_saving(place):
    place.saved()
    place.refused(1, "ckpt/iter_0000002: the disk is full ... earlier checkpoints are intact",
                  "--save", "ckpt", "--load", "ckpt", "--num-rollout", "2", before=limit(100_000))
    place.clean("--load", "ckpt", "--num-rollout", "2")


@pytest.mark.full
def test_file_limit_while_recording(place):
    place.refused(1, "runs/a/ ... the disk is full", "--num-rollout", "1000", before=limit(25_000))
    list(read(place.path / "runs/a/events.jsonl"))
    place.clean()


def test_file_limit_at_the_start(place):
    place.refused(2, "runs/a/plan ... the disk is full", before=limit(1000))
    place.clean()


@pytest.mark.parametrize(("flags", "words"), [
    (["--save", "run.toml"], "(--save): run.toml is a file ... [folder-not-writable]"),
    (["--save", "/proc/nowhere"], "--save /proc/nowhere: ... [checkpoint-folder-unwritable]"),
    (["--run-dir", "run.toml"], "(--run-dir): run.toml is a file ... [folder-not-writable]"),
    (["--run-dir", "/proc/nowhere"], "/proc/nowhere: cannot be written"),
    (["--save", "ckpt", "--save-hf", "hf/{rollout}"], "checkpoint.save_hf (--save-hf): ... {rollout_id}"),
    (["--run-dir", "runs/{x}", "--save", "ckpt", "--save-hf", "{run_dir}/hf"], "checkpoint.run_dir (--run-dir)"),
    (["--save", "ckpt", "--save-hf", "run.toml/{rollout_id}"],
     "(--save-hf): ... run.toml is a file (got run.toml/{rollout_id}) ... [folder-not-writable]"),
], ids=lambda value: "".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_unwritable_folder(place, flags, words):
    """Known before the first rollout, not when the first checkpoint is due."""
    place.refuses(2, words, *flags)


def close_streams():
    """Leave the process as an interpreter finds itself that starts without streams."""
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None


def test_closed_standard_streams(place):
    """A run that a daemon starts without any goes on, and what a library prints is in none of its files."""
    (place.path / "loud.py").write_text(LOUD)
    flags = ["--run-dir", "runs/a", "--save", "ckpt", "--plugin", "./loud.py", "--rm-type", "loud"]
    assert place.run(*flags, before=close_streams).code == 0
    assert [event["status"] for event in events(place, "run_end")] == ["completed"]
    files = [path for folder in ("runs", "ckpt") for path in (place.path / folder).rglob("*") if path.is_file()]
    assert not [path for path in files if b"printed" in path.read_bytes()]


LOUD = '''
"""A scorer that prints as a library does, to the numbers of the streams."""
import os, subprocess, sys
from miles_core import hookimpl


class Loud:
    """Rewards nothing in particular."""

    @hookimpl("reward", name="loud")
    def score(self, sample):
        """Any number."""
        for number in (1, 2):
            os.write(number, b"printed")
        subprocess.run([sys.executable, "-c", "import os; os.write(1, b'printed')"], check=True)
        return float(sample.index)
'''


# ----------------------------------------------------------------------------------------------- a second run, and
# ----------------------------------------------------------------------------------------------- runs without work


def test_two_runs_in_one_directory(place, quiet):
    """The second is refused and names the first, which does not notice."""
    seen = []

    def second(process):
        wait_for(place, "metrics", process)
        seen.append(place.run())
        place.decent(seen[0], 2, f"runs/a: another run uses this folder: process {process.pid} on ... --run-dir")
        interrupt(place, process, after="metrics")

    outcome = place.run("--num-rollout", "1000", before=os.setsid, while_running=second)
    quiet(outcome)
    assert seen and outcome.code == 130
    done = [event["rollout_id"] for event in events(place, "metrics")]
    assert done == list(range(len(done))) and len(events(place, "run_start")) == 1
    place.clean()


@pytest.mark.full
def test_two_runs_that_save_into_one_folder(place, quiet):
    """Each in a run directory of its own: the second is refused, as long as the first lives."""
    seen = []

    def second(process):
        wait_for(place, "metrics", process)
        seen.append(place.run("--save", "ckpt", "--run-dir", "runs/b"))
        place.decent(seen[0], 2, f"ckpt: another run uses this folder: process {process.pid} on ... --save")
        os.killpg(process.pid, signal.SIGKILL)

    place.run("--num-rollout", "1000", "--save", "ckpt", before=os.setsid, while_running=second)
    assert seen
    place.clean("--save", "ckpt", "--load", "ckpt")


def test_nothing_left_to_do(place):
    """A checkpoint that is as far as --num-rollout asks: said, and not an error."""
    place.saved()
    outcome = place.clean("--load", "ckpt", "--num-rollout", "1")
    assert "nothing left to do: 1 of 1 rollouts are done; raise --num-rollout" in outcome.out


def test_a_resume_under_another_plan_says_once_what_changed(place):
    """And keeps it in the record; the same plan says nothing."""
    place.saved()
    place.clean("--load", "ckpt", "--save", "ckpt", "--num-rollout", "2", "--lr", "2e-5", "--seed", "7")
    place.clean("--load", "ckpt", "--save", "ckpt", "--num-rollout", "3", "--lr", "2e-5", "--seed", "7")
    said = [event["text"] for event in events(place, "message") if "another plan" in event["text"]]
    assert all(word in said[0] for word in ("optimizer.lr", "2e-05", "optimizer.seed"))
    assert not any("optimizer.lr" in text for text in said[1:])


HOOK = """
import numpy as np
from miles_core import hookimpl
from miles_core.types import Drop, Sample


class Bad:
    @hookimpl({mark})
    {define}(self, {arguments}):
        return {body}
"""


@pytest.mark.full
@pytest.mark.parametrize(("mark", "define", "arguments", "body", "flags", "words"), [
    ("", "def filter_group", "group", "Drop('dull', 'too easy')", ["--max-over-sampling-waves", "2"],
     "filters dropped ... groups (dull ... and kept 0 of the 4 ... too easy ... [batch-starved]"),
    ("name='bad'", "async def generate", "prompt, generation", "[]", ["--generate", "bad"],
     "generator 'bad', train prompt 0: a generator must return a non-empty list of samples (got [])"),
    ("name='bad'", "async def generate", "prompt, generation", "None if prompt else []", ["--generate", "bad"],
     "generator 'bad', train prompt 0: a generator must return a non-empty list of samples (got None)"),
    ("name='bad'", "async def generate", "prompt, generation",
     "2 * await __import__('miles_core.stages.rollout').stages.rollout.single_turn(prompt, generation)",
     ["--generate", "bad"], "generator 'bad', train prompt 0: ... [generator-returns-no-samples]"),
    ("name='bad'", "def advantage", "batch", "[1.0]", ["--advantage-estimator", "bad", "--policy-loss", "clip"],
     "advantage ... 'bad' ... 16"),
    ("name='bad'", "def advantage", "batch", "[float('nan')] * 16",
     ["--advantage-estimator", "bad", "--policy-loss", "clip"],
     "advantage ... 'bad' ... finite"),
    ("name='bad'", "def combine_rewards", "sample, weights", "None if sample else 0", ["--combine-rewards", "bad"],
     "(got None) ... [score-not-finite]"),
    ("", "def finish", "", "1 / 0", ["--num-rollout", "1", "--strict-trackers"],
     "plugin bad ... hook finish: ZeroDivisionError"),
    ("", "def metrics", "rollout_id", "1 / 0", ["--strict-trackers"], "plugin bad ... hook metrics: ZeroDivisionError"),
], ids=["all-dropped", "no-samples", "none", "twice", "too-few", "nan", "combine", "finish", "metrics"])  # fmt: skip
def test_hook_that_gives_nothing_to_train_on(place, mark, define, arguments, body, flags, words):
    source = HOOK.format(mark=mark, define=define, arguments=arguments, body=body).replace("(self, )", "(self)")
    place.refuses(1, words, *place.plugin(source), *flags)
