"""Tool code that writes, exits and tampers where the sandbox's own words travel: all of it is the tool's error."""

import asyncio
import itertools

import pytest
from miles_tools.calls import Call
from miles_tools.sandbox import Limits, Sandbox
from miles_tools.toolbox import Tool, Toolbox

LIMITS = Limits(wall=4.0, memory=256 << 20, disk=8 << 20, processes=8, output=10_000)

WRITES = {
    "nothing": "b''", "half": "b'{'", "null": "b'null'", "list": "b'[]'", "no_utf8": "b'\\xff\\xfe\\x00'",
    "deep": "b'[' * 900 + b']' * 900", "deeper": "b'[' * 5000", "deep_value":
    "b'{\"kind\": \"ok\", \"value\": ' + b'[' * 500 + b']' * 500 + b'}'",
    "ours": "b'{\"kind\": \"ours\"}'", "ours_with_words": "b'{\"kind\": \"ours\", \"detail\": \"no\"}'",
    "given_up": "b'{\"kind\": \"given up\"}'", "ready": "b'ready'", "ready_line": "b'{\"ready\": true}\\n'",
    "no_kind": "b'{\"value\": 1}'", "kind_list": "b'{\"kind\": [1]}'", "kind_unknown": "b'{\"kind\": \"fine\"}'",
    "kind_limit": "b'{\"kind\": \"time\"}'", "detail_number": "b'{\"kind\": \"raised\", \"detail\": 5}'",
    "surrogate": "b'{\"kind\": \"ok\", \"value\": \"\\\\ud800\"}'",
    "surrogate_key": "b'{\"kind\": \"ok\", \"value\": {\"\\\\udfff\": 1}}'",
    "surrogate_detail": "b'{\"kind\": \"raised\", \"detail\": \"\\\\ud800\"}'",
    "digits": "b'{\"kind\": \"ok\", \"value\": ' + b'9' * 5000 + b'}'",
    "two_answers": "b'{\"kind\": \"ok\", \"value\": 1}{\"kind\": \"ok\", \"value\": 2}'",
    "more_keys": "b'{\"kind\": \"memory\", \"seconds\": \"x\", \"output\": 3, \"self\": 1}'",
    "too_much": "b'x' * 20000",
}  # fmt: skip

EXITS = {
    "exit_70": "os._exit(70)", "exit_1": "os._exit(1)", "exit_137": "os._exit(137)", "abort": "os.abort()",
    "kill": "os.kill(os.getpid(), 9)", "raise": "raise ValueError('\\ud800')", "returns": "return 'x' * 20000",
    "str_exits": "raise Bad", "str_raises": "raise Worse", "closes": "os.closerange(0, 64)",
}  # fmt: skip

TAMPERING = {
    "write": "os.write = lambda *a: os._exit(70)", "dumps": "import json\n    json.dumps = lambda *a, **k: 1 / 0",
    "getpid": "os.getpid = lambda: -1", "stdout": "import sys\n    sys.stdout = Bad()",
    "exit": "os._exit = lambda code: None", "alarm": "import signal\n    signal.setitimer(0, 0.01)",
    "reopens": "os.close(3)\n    os.open('/dev/null', 0)", "duplicates": "[os.dup2(3, i) for i in range(20)]",
    "main": "import __main__\n    vars(__main__).clear()",
    "supervisor": "import miles_tools.sandbox_supervisor as s\n    s.READY = s.ANSWERS = b''",
    "parent": "try:\n        os.kill(os.getppid(), 9)\n    except OSError:\n        pass",
    "all": "pid = os.fork()\n    if not pid:\n        os.kill(-1, 9)\n    os.wait()",
    "folders": "for _ in range(1500):\n        os.mkdir('d')\n        os.chdir('d')",
    "thread": "import threading\n    threading.Thread(target=os.write, args=(3, b'[' * 500)).start()",
    "fork_returns": "os.fork()",
}  # fmt: skip

SOURCE = """
class Bad(Exception):
    def __str__(self):
        os._exit(70)
    flush = errno = property(__str__)
class Worse(Exception):
    def __str__(self):
        raise SystemExit
    @property
    def errno(self):
        raise KeyboardInterrupt
def f():
    {before}
    {exit}
    return object
"""

ATTACKS = {f"{name}-{ending}": SOURCE.format(before=f"os.write(3, {WRITES[name]})", exit=EXITS[ending])
           for name, ending in itertools.product(WRITES, EXITS)}
ATTACKS |= {f"{name}-{ending}": SOURCE.format(before=TAMPERING[name], exit=EXITS[ending])
            for name, ending in itertools.product(TAMPERING, ("exit_70", "raise", "str_exits"))}


@pytest.mark.full
@pytest.mark.parametrize("isolation", ["auto", "plain"])
def test_whatever_a_tool_does_to_the_protocol_is_its_own_error_and_the_run_goes_on(isolation):
    assert len(ATTACKS) >= 200
    sandbox = Sandbox(LIMITS, workers=1, isolation=isolation)
    if not (sandbox.isolation.namespaces or sandbox.isolation.unprivileged):
        pytest.skip("a tool of the same user may end this process")
    chosen = dict(itertools.islice(ATTACKS.items(), isolation == "plain", None, 2))  # every attack once, in one of them
    try:
        assert answer(sandbox, "def f():\n    return 'here'").text == "here"
        supervisor = supervisor_of(sandbox)
        for name, source in chosen.items():
            told = answer(sandbox, source)
            assert told.failed and told.text.startswith("error: "), (name, told)
            assert told.text.encode() and len(told.text) < 3000, (name, told)
            assert supervisor_of(sandbox) == supervisor, (name, "it was replaced")
        assert answer(sandbox, "import os\ndef f():\n    return os.listdir('.')").text == "[]"
    finally:
        sandbox.close()


def answer(sandbox, source):
    tools = Toolbox({"f": Tool("f", "tool.py", source, {}, ())}, sandbox)
    return asyncio.run(tools.answer(Call("f", {})))


def supervisor_of(sandbox):
    return [supervisor._popen.pid for supervisor in sandbox._idle.queue]
