"""The sandbox against tools that mean harm: each is ended within its limit, named, and leaves nothing behind."""

import asyncio
import itertools
import os
import re
import select
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from miles_tools import linux, sandbox_supervisor
from miles_tools.sandbox import Isolation, Limits, Sandbox, SandboxError, candidates, explain, weakness
from miles_tools.sandbox_supervisor import empty, held

from miles_core.errors import ConfigError

LIMITS = Limits(wall=1.0, cpu=5.0, memory=256 << 20, disk=4 << 20, processes=8, output=10_000)
SLACK = 2.0
MARK = "miles-tools-test-left-behind"

HOSTILE = {
    # name: (source of f, kinds of ending, words of the sentence)
    "fork_bomb": ("import os\ndef f():\n    while True:\n        os.fork()", {"processes"}, "more than 8 processes"),
    "silent_fork_bomb": (
        "import os\ndef f():\n    while True:\n        try:\n            os.fork()\n        except OSError:\n"
        "            pass", {"processes", "time"}, ""),
    "setsid_fork_bomb": (
        "import os\ndef f():\n    while True:\n        try:\n            os.fork() or os.setsid()\n"
        "        except OSError:\n            pass", {"processes", "time"}, ""),
    "infinite_loop": ("def f():\n    while True:\n        pass", {"time"}, "longer than 1 s"),
    "sleep": ("import time\ndef f():\n    time.sleep(60)", {"time"}, "longer than 1 s"),
    "ten_gigabytes": ("def f():\n    return len(bytearray(10 << 30))", {"memory"}, "256 MiB of memory"),
    "fills_the_disk": (
        "def f():\n    for i in range(100):\n        open(f'{i}', 'wb').write(b'x' * (1 << 20))\n    import time\n"
        "    time.sleep(9)", {"disk"}, "wrote more than 4 MiB"),
    "one_large_file": ("def f():\n    open('a', 'wb').write(b'x' * (5 << 20))", {"disk"}, "wrote more than 4 MiB"),
    "endless_output": ("def f():\n    while True:\n        print('x' * 1000)", {"output"}, "more than 10000 bytes"),
    "huge_result": ("def f():\n    return 'x' * (1 << 20)", {"output"}, "more than 10000 bytes"),
    "exits": ("import os\ndef f():\n    os._exit(0)", {"ended"}, "exit status 0"),
    "kills_itself": ("import os\ndef f():\n    os.kill(os.getpid(), 9)", {"ended"}, "SIGKILL"),
    "crashes": ("import ctypes\ndef f():\n    ctypes.string_at(0)", {"ended"}, "SIGSEGV"),
    "stops_itself": ("import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGSTOP)", {"time"}, "longer than"),
    "ends_its_group": ("import os\ndef f():\n    os.killpg(0, 9)", {"ended"}, "SIGKILL"),
    "deep_recursion": ("def f():\n    return f()", {"raised"}, "RecursionError"),
    "exits_politely": ("def f():\n    raise SystemExit('no')", {"raised"}, "SystemExit: no"),
}  # fmt: skip

DAEMON = f"""
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open('/dev/null').close()
            import sys
            time.sleep(600)
        os._exit(0)
    os.wait()
    return '{MARK}'
"""

DRIVER = """
import os, threading, time
from miles_tools import linux, sandbox_supervisor
from miles_tools.sandbox import Limits, Sandbox
sandbox = Sandbox(Limits(wall=60), 1)
sleep = ("import time\\ndef f():\\n    time.sleep(60)", "tool.py", "f", {})
sandbox.run("def f():\\n    pass", "tool.py", "f", {})  # processes that only look what the kernel allows are gone
threading.Thread(target=sandbox.run, args=sleep, daemon=True).start()
while len(linux.descendants(os.getpid())) < 2 or not sandbox._idle.empty():
    time.sleep(0.01)
print(*linux.descendants(os.getpid()), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module", params=["auto", "plain"])
def sandbox(request):
    made = Sandbox(LIMITS, workers=1, isolation=request.param)
    assert made.isolation.namespaces or request.param == "plain" or not can_unshare()
    yield made
    made.close()
    assert linux.descendants(os.getpid()) == [] or no_supervisor()


def can_unshare():
    return subprocess.run(["unshare", "-Urmpfn", "true"], capture_output=True).returncode == 0


def no_supervisor():
    return not any(b"miles_tools.sandbox_supervisor" in command for command in commands())


def commands():
    """The command lines of this process's descendants."""
    found = []
    for pid in linux.descendants(os.getpid()):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
    return found


def supervisors(sandbox):
    """The supervisor's process, and what it has below it."""
    idle = [supervisor for supervisor in sandbox._idle.queue if supervisor is not None]
    return [(supervisor._popen.pid, linux.descendants(supervisor._popen.pid)) for supervisor in idle]


def run(sandbox, source, **arguments):
    return sandbox.run(source, "tool.py", "f", arguments)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tool_is_contained_and_named(sandbox, name):
    source, kinds, words = HOSTILE[name]
    begin = time.monotonic()
    outcome = run(sandbox, source)
    assert time.monotonic() - begin < LIMITS.wall + SLACK
    assert outcome.kind in kinds, outcome
    sentence = explain(outcome, LIMITS)
    assert sentence.startswith("error: ") and words in sentence, sentence
    assert len(outcome.output) <= LIMITS.output
    (_, below), = supervisors(sandbox)
    assert below == []
    assert run(sandbox, "def f(x):\n    return x + 1", x=1).value == 2, "the next call is served"
    assert run(sandbox, "import os\ndef f():\n    return os.listdir('.')").value == [], "its directory is empty"


def test_cpu_seconds_end_what_hides_from_the_clock(sandbox):
    strict = Sandbox(Limits(wall=10.0, cpu=1.0), workers=1, isolation="auto" if sandbox.isolation.namespaces else
                     "plain")
    try:
        begin = time.monotonic()
        outcome = strict.run("def f():\n    while True:\n        pass", "tool.py", "f", {})
        assert (outcome.kind, explain(outcome, strict.limits)) == ("cpu", "error: it used more than 1 CPU seconds")
        assert time.monotonic() - begin < 9
    finally:
        strict.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_supervisor_that_looks_late_sees_first_what_has_ended(monkeypatch, ends):
    child = subprocess.Popen([sys.executable, "-c", "" if ends else "input()"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    if ends:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    clock, look = itertools.count(0, 1000), select.select
    quiet, end = os.pipe()  # in the place of the standard input, which is the driver's
    with child, monkeypatch.context() as late:
        late.setattr(time, "monotonic", lambda: next(clock))
        late.setattr(select, "select", lambda reading, *rest: look([one or quiet for one in reading], *rest))
        pipe = child.stdout.fileno()
        assert sandbox_supervisor.watch(child.pid, {pipe: b""}, -1, types.SimpleNamespace(output=99)) == (
            None if ends else "time")
    for one in (quiet, end):
        os.close(one)


def test_a_daemon_does_not_outlive_its_call(sandbox):
    before = set(os.listdir("/proc"))
    outcome = run(sandbox, DAEMON)
    assert outcome.value == MARK
    (supervisor, below), = supervisors(sandbox)
    assert below == []
    forked = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and group_of(pid) == supervisor]
    assert forked == []


def group_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_the_environment_and_descriptors_of_the_driver_are_not_inherited(sandbox, monkeypatch):
    monkeypatch.setenv("A_SECRET", "do not tell")
    with open(os.devnull) as opened:
        os.set_inheritable(opened.fileno(), True)
        outcome = run(sandbox, "import os\ndef f():\n    fds = [n for n in range(1000) if is_open(n)]\n"
                      "    return [dict(os.environ), fds, os.read(0, 1).decode()]\n"
                      "def is_open(n):\n    try:\n        return os.fstat(n) is not None\n"
                      "    except OSError:\n        return False")
    environment, descriptors, read = outcome.value
    assert "A_SECRET" not in environment and set(environment) <= {"PATH", "LANG", "HOME", "TMPDIR", "LC_CTYPE",
                                                                  "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    assert descriptors == [0, 1, 2, 3] and read == ""


def test_with_namespaces_nothing_outside_can_be_written_seen_or_reached(sandbox, tmp_path):
    if not sandbox.isolation.namespaces:
        pytest.skip("without namespaces the file system and the network are the driver's")
    target = tmp_path / MARK
    outcome = run(sandbox, "def f(path):\n    open(path, 'w').write('x')", path=str(target))
    assert outcome.kind == "raised" and not target.exists()
    settings = run(sandbox, "import os\ndef f():\n    return os.statvfs('/proc').f_flag & os.ST_RDONLY").value
    assert settings, "a tool that has to run as root could set the kernel's, the program of core dumps among them"
    home = Path("/root" if os.getuid() == 0 else Path.home()) / MARK
    assert run(sandbox, "def f(path):\n    open(path, 'w').write('x')", path=str(home)).kind == "raised"
    assert not home.exists()
    seen = run(sandbox, "import os\ndef f():\n    return [n for n in os.listdir('/proc') if n.isdigit()]").value
    assert len(seen) <= 2, "its own processes"
    assert run(sandbox, "import os\ndef f(pid):\n    os.kill(pid, 9)", pid=os.getpid()).kind == "raised"
    network = run(sandbox, "import socket\ndef f():\n    socket.create_connection(('127.0.0.1', 22), 1)")
    assert network.kind == "raised" and "unreachable" in network.detail
    again = run(sandbox, "import ctypes\ndef f():\n    return ctypes.CDLL(None).unshare(0x10000000)")
    assert again.value == -1, "a namespace of its own would let it mount"
    assert run(sandbox, "import ctypes\ndef f():\n    return ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, b'')"
               ).value == -1


def test_without_namespaces_a_tool_still_has_a_directory_of_its_own(sandbox):
    outcome = run(sandbox, "import os\ndef f():\n    os.makedirs('a/b')\n    open('a/b/c', 'w').write('x')\n"
                  "    os.chmod('a', 0)\n    return os.getcwd()")
    assert outcome.kind == "ok"
    if not sandbox.isolation.namespaces:
        assert os.listdir(outcome.value) == []


def test_calls_run_side_by_side_and_know_nothing_of_each_other():
    sandbox = Sandbox(Limits(wall=3.0), workers=3)
    source = ("import time\nstate = []\ndef f(x):\n    begin = time.monotonic()\n    state.append(x)\n"
              "    time.sleep(0.3)\n    print('hello', x)\n    return state, begin, time.monotonic()")
    try:
        async def all_of_them():
            return await asyncio.gather(*(sandbox.call(source, "tool.py", "f", {"x": i}) for i in range(6)))

        found = asyncio.run(all_of_them())
        assert [outcome.value[0] for outcome in found] == [[i] for i in range(6)]
        assert [outcome.output for outcome in found] == [f"hello {i}\n" for i in range(6)]
        spans = sorted(outcome.value[1:] for outcome in found)
        assert any(begin < end for (_, end), (begin, _) in itertools.pairwise(spans))
    finally:
        sandbox.close()


def test_a_supervisor_that_dies_is_an_error_of_the_sandbox_and_is_replaced():
    sandbox = Sandbox(LIMITS, workers=1)
    try:
        assert run(sandbox, "def f():\n    return 1").value == 1
        (pid, _), = supervisors(sandbox)
        os.kill(pid, 9)
        with pytest.raises(SandboxError, match="a sandbox process ended"):
            run(sandbox, "def f():\n    return 1")
        assert run(sandbox, "def f():\n    return 1").value == 1
    finally:
        sandbox.close()


def test_supervisors_end_with_the_process_that_started_them():
    said = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in said.stdout.split()]
    assert len(pids) >= 2, said.stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_what_a_tool_returns_and_raises_is_told():
    sandbox = Sandbox(LIMITS, workers=1)
    try:
        assert run(sandbox, "def f(a, b=2):\n    return {'sum': a + b}", a=1).value == {"sum": 3}
        failed = run(sandbox, "def f(x):\n    y = x\n    return 1 / y", x=0)
        assert explain(failed, LIMITS) == "error: ZeroDivisionError: division by zero (line 3)"
        assert "SyntaxError" in explain(run(sandbox, "def f(:"), LIMITS)
        assert "TypeError" in explain(run(sandbox, "def f(x):\n    return x"), LIMITS)
        assert "AttributeError" in explain(run(sandbox, "def g():\n    return 1"), LIMITS)
    finally:
        sandbox.close()


def test_an_isolation_that_the_kernel_refuses_is_an_error_with_the_reason():
    sandbox = Sandbox(Limits(memory=1 << 20), workers=1)
    try:
        with pytest.raises(ConfigError, match="the sandbox cannot be set up here"):
            run(sandbox, "def f():\n    return 1")
    finally:
        sandbox.close()


@pytest.mark.skipif(os.getuid() != 0, reason="root alone can give tools another user")
@pytest.mark.parametrize("isolation", ["auto", "plain"])
def test_tools_of_a_driver_that_is_root_are_another_users(isolation, tmp_path):
    secret = tmp_path / "key"
    secret.touch(0o600)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o011)  # it is the file itself that keeps them out
    sandbox = Sandbox(LIMITS, workers=1, isolation=isolation)
    try:
        for path in (secret, "/etc/shadow"):
            outcome = run(sandbox, "def f(path):\n    return open(path).read()", path=str(path))
            assert outcome.kind == "raised" and "Error" in outcome.detail, (path, outcome)
        for target in (os.getpid(), 1) if sandbox.isolation.unprivileged else ():
            signalled = run(sandbox, "import os\ndef f(pid):\n    os.kill(pid, 0)", pid=target)
            assert signalled.kind == "raised" or sandbox.isolation.namespaces and target == 1, (target, signalled)
        assert run(sandbox, "import os\ndef f():\n    return os.getuid()").value >= 61184
    finally:
        sandbox.close()


@pytest.mark.parametrize(("isolation", "words"), [
    (Isolation(True, True), None), (Isolation(True, False), "as root.*every file"),
    (Isolation(False, True), "without namespaces.*other users"), (Isolation(False, False), "as root and without"),
])
def test_weaker_isolation_of_roots_tools_is_named(monkeypatch, isolation, words):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    said = weakness(isolation)
    assert said is None if words is None else re.search(words, said)


def test_a_folder_so_deep_that_no_path_reaches_into_it_is_counted_and_removed(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    here = os.getcwd()
    try:
        os.chdir(work)
        for _ in range(1200):
            os.mkdir("folder")
            os.chdir("folder")
        Path("file").write_text("x")
    finally:
        os.chdir(here)
    assert held(str(work), 1 << 20) > 1 << 20
    empty(str(work))
    assert os.listdir(work) == []


def test_root_tries_another_user_first(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert candidates("auto") == [Isolation(True, True), Isolation(True, False), Isolation(False, True)]
    assert candidates("plain") == [Isolation(False, True), Isolation(False, False)], "as root only when asked by name"
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert candidates("plain") == [Isolation(False, False)]
