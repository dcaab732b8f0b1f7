"""ServerProcess with small programs in a server's place: ends, orphans, logs, and what a failed start says."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from miles_sglang.server import ServerProcess, ended

from miles_core.errors import EngineError
from miles_core.types import NodeSlot

TREE = """
import os, subprocess, sys, time, signal
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import time, os; os.setsid(); print('child', os.getpid(), flush=True); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", code])
print("up", os.environ.get("WORD"), flush=True)
time.sleep(600)
"""


def until(condition, seconds=30.0):
    """Wait for it; its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def child_of(process):
    """The process id of TREE's child, which has a session of its own."""
    line = until(lambda: next((line for line in process.tail(20) if line.startswith("child")), None))
    return int(line.split()[1])


@pytest.fixture
def process():
    made = ServerProcess(NodeSlot())
    yield made
    made.stop()


@pytest.mark.parametrize("how", ["stop", "stubborn", "killed", "stopped"])
def test_nothing_is_left_however_it_ends(process, tmp_path, how, monkeypatch):
    monkeypatch.setattr("miles_sglang.server.STOP_SECONDS", 0.5)
    process.start([sys.executable, "-c", TREE, how], {"WORD": "ours"}, tmp_path / "logs" / "server.log")
    child = child_of(process)
    assert process.exit_code() is None and "up ours" in process.tail(5)
    if how == "killed":
        os.kill(process._process.pid, signal.SIGKILL)
        assert until(process.exit_code) == -9
    if how == "stopped":
        os.kill(process._process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    process.stop()
    assert time.monotonic() - begin < 5
    assert process.exit_code() is not None
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_it_dies_with_who_started_it(tmp_path):
    code = ("import sys, time; from miles_sglang.server import *; process = ServerProcess(NodeSlot());"
            f"print(process.start([sys.executable, '-c', 'import time; time.sleep(600)'], {{}}, '{tmp_path}/log'),"
            "flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as host:
        server = int(host.stdout.readline())
        assert psutil.pid_exists(server)
        host.kill()
    until(lambda: not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE)


def test_the_compilers_that_it_runs_are_seen(process, tmp_path):
    (tmp_path / "ninja").write_bytes(Path(shutil.which("sleep")).read_bytes())
    (tmp_path / "ninja").chmod(0o755)
    code = "import subprocess, sys, time; subprocess.run([sys.argv[1], '1']); print('built', flush=True); time.sleep(9)"
    process.start([sys.executable, "-c", code, str(tmp_path / "ninja")], {}, tmp_path / "log")
    assert until(process.compilers) == ["ninja"]
    until(lambda: "built" in process.tail(1))
    assert process.compilers() == []
    process.stop()
    assert process.compilers() == []


def test_ports_are_free_and_differ(process):
    assert len(set(process.free_ports(5))) == 5


def test_it_is_not_started_twice(process, tmp_path):
    with pytest.raises(EngineError, match="has not been started"):
        process.exit_code()
    process.start([sys.executable, "-c", TREE], {}, tmp_path / "log")
    with pytest.raises(EngineError, match=r"already running .*process \d+"):
        process.start([sys.executable, "-c", TREE], {}, tmp_path / "log")


@pytest.mark.parametrize(("line", "words"), [
    ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use", "port is in use"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "--sglang-mem-fraction-static"),
    ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.1.",
     "--sglang-mem-fraction-static"),
    ("ValueError: Cannot find model module. 'Foo' is not a registered model in the Transformers library",
     "cannot load this model"),
    ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
     "a checkpoint that is whole"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "--sglang-mem-fraction-static"),
    ("launch_server.py: error: unrecognized arguments: --no-such-flag", "the --sglang-* flag"),
    ("ValueError: Model architectures ['Foo'] are not supported for now.", "cannot load this model"),
    ("Segmentation fault (core dumped)", "see its log"),
    ("ModuleNotFoundError: No module named 'sglang'", "pip install 'miles-sglang[server]'"),
])
def test_a_failed_start_says_what_to_do(line, words):
    error = ended("engine 0", 1, ["$ command", "before", line, "after"], Path("engine-0.log"))
    assert words in str(error) and line[:60] in str(error) and "after" in str(error)
    assert re.match("engine 0: it ended while it started", str(error))


def test_an_exception_says_more_than_the_signal_that_follows_it():
    lines = ["$ python --mem-fraction-static 0.5", "Traceback", "KeyError: 'odd'", "kill_process_tree called"]
    error = ended("engine 0", -9, lines, Path("engine-0.log"))
    assert error.got == "KeyError: 'odd'" and "signal" not in error.fix
    assert "lack of memory" in ended("engine 0", -9, ["loading"], Path("engine-0.log")).fix


def test_a_command_that_is_none_is_said(process, tmp_path):
    process.start(["/no/such/program"], {}, tmp_path / "log")
    until(lambda: process.exit_code() is not None)
    error = ended("engine 0", process.exit_code(), process.tail(50), tmp_path / "log")
    assert "cannot start /no/such/program: No such file" in str(error) and "--sglang-server-command" in str(error)


def test_a_server_that_never_answers_is_said():
    error = ended("engine 1", None, ["still loading"], Path("engine-1.log"), 900.0)
    assert str(error).startswith("engine 1: it did not answer within 900 s. Fix: raise --server-start-timeout")
    assert "still loading" in str(error)


def test_a_gpu_that_is_not_there_is_named_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(EngineError, match=r"engine 3, node 1, on .*: GPU 2 .*got 2 GPUs: \[0, 1\]"):
        ServerProcess(NodeSlot(engine=3, node=1, nodes=2, gpus=(1, 2))).start(["true"], {}, tmp_path / "log")
    assert not (tmp_path / "log").exists()
