"""Hosts: the same object behind a thread and behind a process; order, errors and deaths."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from miles_core.errors import TrainError, WaitError
from miles_core.hosts import ProcessHost, ThreadHost, in_daemon_thread, meeting_folder


class Counter:
    """Adds, fails, streams, dies."""

    def __init__(self, start):
        if start < 0:
            raise ValueError(f"cannot start from {start}")
        self.value, self.seen = start, []

    def add(self, number, seconds=0.0, until=None):
        """Once the time is over, and there is a file where one is waited for: a minute at most."""
        end = time.monotonic() + 60
        while until is not None and not os.path.exists(until) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(seconds)
        self.value += number
        self.seen.append(number)
        return self.value

    def order(self):
        return self.seen

    def fail(self):
        raise KeyError("no such thing")

    def stream(self):
        yield from [("a", 1), ("b", 2)]

    def where(self):
        return os.getpid(), threading.current_thread().name

    def die(self):
        os._exit(7)


HOSTS = pytest.mark.parametrize("host", [ThreadHost, ProcessHost])


def run(host, work, start=0):
    """Work with a hosted counter."""
    async def main():
        handle = host("trainer", Counter, start)
        try:
            return await work(handle)
        finally:
            await handle.close()

    return asyncio.run(main())


@HOSTS
def test_calls_are_served_one_after_the_other_in_order(host):
    async def work(handle):
        answers = await asyncio.gather(*(handle.add(number, 0.02 if number == 1 else 0.0) for number in (1, 2, 3)))
        return answers, await handle.order()

    assert run(host, work) == ([1, 3, 6], [1, 2, 3])


@HOSTS
def test_an_exception_is_raised_where_it_is_awaited_and_the_object_lives_on(host):
    async def work(handle):
        with pytest.raises(KeyError, match="no such thing"):
            await handle.fail()
        return await handle.add(5)

    assert run(host, work) == 5


@HOSTS
def test_an_object_that_cannot_be_made_fails_every_call(host):
    async def work(handle):
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot start from -1"):
                await handle.add(1)

    run(host, work, start=-1)


@HOSTS
def test_a_stream_arrives_whole(host):
    async def work(handle):
        return list(await handle.stream())

    assert run(host, work) == [("a", 1), ("b", 2)]


@HOSTS
def test_the_object_lives_beside_the_event_loop(host, tmp_path):
    async def work(handle):
        slow = asyncio.ensure_future(handle.add(1, 0.0, tmp_path / "go"))
        await asyncio.sleep(0.01)
        assert not slow.done()
        (tmp_path / "go").touch()  # which the object waits for, so the loop goes on meanwhile
        async with asyncio.timeout(30):
            await slow
        return await handle.where()

    pid, thread = run(host, work)
    assert (pid == os.getpid()) == (host is ThreadHost)
    assert (thread == "trainer") == (host is ThreadHost)


def test_a_loop_that_was_blocked_hears_the_answer_before_it_calls_it_late(tmp_path):
    async def work(handle):
        handle.timeout = 0.2
        call = asyncio.ensure_future(handle.add(1, 0.05))
        await asyncio.sleep(0.01)
        time.sleep(0.6)  # as a hook that computes in the event loop
        assert await call == 1
        with pytest.raises(WaitError, match="0.2 s"):
            await handle.add(1, 0.0, tmp_path / "go")
        (tmp_path / "go").touch()

    run(ThreadHost, work)


def test_a_process_that_dies_is_named_with_its_exit_code():
    async def work(handle):
        with pytest.raises(TrainError, match=r"'trainer' died in die\(\).*exit code 7"):
            await handle.die()
        with pytest.raises(TrainError, match="trainer"):
            await handle.add(1)

    run(ProcessHost, work)


def test_a_process_keeps_the_traceback_of_the_other_side():
    async def work(handle):
        with pytest.raises(KeyError) as caught:
            await handle.fail()
        assert any("in fail" in note for note in caught.value.__notes__)

    run(ProcessHost, work)


def test_work_in_a_daemon_thread_answers_or_raises():
    async def main():
        assert await in_daemon_thread(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(lambda: 1 / 0)

    asyncio.run(main())


@HOSTS
def test_a_call_that_hangs_is_bounded_and_named(host, tmp_path):
    async def work(handle):
        assert await handle.add(1) == 1
        handle.timeout = 0.2
        with pytest.raises(WaitError, match=r"the trainer did not finish add\(\) within 0\.2 s"):
            await handle.add(1, 0.0, tmp_path / "go")
        (tmp_path / "go").touch()  # it was waited for no longer

    run(host, work)


def test_the_meeting_folder_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = ("import os, tempfile; from miles_core.hosts import meeting_folder\n"
               f"tempfile.tempdir = {str(tmp_path)!r}\n"
               "kept = meeting_folder(); print(kept.name, flush=True); os.kill(os.getpid(), 9)")
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
    assert os.path.isdir(left)
    first, second = meeting_folder(), meeting_folder()
    assert not os.path.exists(left)
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(one.name) for one in (first, second))
    first.cleanup()
    second.cleanup()
    assert os.listdir(tmp_path) == []


def test_a_pipe_that_another_user_left_among_the_meeting_folders_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "miles-ranks-other").mkdir()
    os.mkfifo(tmp_path / "miles-ranks-other" / "lock")
    made: list[tempfile.TemporaryDirectory[str]] = []
    meeting = threading.Thread(target=lambda: made.append(meeting_folder()), daemon=True)
    meeting.start()
    meeting.join(5)
    assert made
    made[0].cleanup()
