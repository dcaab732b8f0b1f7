"""Scorer unit-tests: code against the tests of its prompt, in the real sandbox."""

import asyncio
import json
import time

import pytest
from miles_tools.plugin import Tools, ToolsOptions
from miles_tools.sandbox import Limits, Sandbox, SandboxError
from miles_tools.unit_tests import UnitTests

from miles_core.config.tables import RunConfig
from miles_core.errors import RewardError
from miles_core.types import Prompt, Sample

ADD = "<think>```python\nwrong\n```</think>Here:\n```python\ndef add(a, b):\n    return a + b\n```\n<|im_end|>"
SUM = "```python\nprint(sum(map(int, input().split())))\n```"
ASSERTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 5", "assert add(0, 0) == 0"]


@pytest.fixture(scope="module")
def sandbox():
    made = Sandbox(Limits(wall=1.0), workers=2)
    yield made
    made.close()


def sample(text, label=None, **metadata):
    return Sample(Prompt(3, 3, "", (1,), label=label, metadata=metadata), 0, text=text)


def score(sandbox, made, *, share=False, seconds=60.0):
    return asyncio.run(UnitTests(sandbox, "tests", share=share, seconds=seconds).score(made))


@pytest.mark.parametrize(("text", "tests", "whole", "share"), [
    (ADD, ASSERTS[0], 1, 1),
    (ADD, ASSERTS, 0, 2 / 3),
    (ADD, json.dumps(ASSERTS[::2]), 1, 1),
    (ADD, "def test():\n    assert add('a', 'b') == 'ab'\ntest()", 1, 1),
    (SUM, {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7 "]}, 1, 1),
    (SUM, {"inputs": ["1 2\n", "3 4"], "outputs": ["3", "8"]}, 0, 0.5),
    ("no code at all", ASSERTS[0], 0, 0),
    ("```python\ndef add(a, b:\n```", ASSERTS[0], 0, 0),
    ("```python\nimport os\nos._exit(0)\n```", ASSERTS[0], 0, 0),
    ("```python\nraise SystemExit\n```", ASSERTS[0], 0, 0),
    ("```python\nclass No:\n    def __eq__(self, other): return False\ndef add(a, b): return No()\n```", ASSERTS, 0, 0),
])  # fmt: skip
def test_scores_are_all_or_nothing_or_the_share_that_passes(sandbox, text, tests, whole, share):
    for made in (sample(text, tests=tests), sample(text, label=tests if isinstance(tests, str) else json.dumps(tests))):
        assert score(sandbox, made) == whole
        assert score(sandbox, made, share=True) == share
        told = made.metadata["unit_tests"]
        assert told["passed"] / told["of"] == share and bool(told["reason"]) == (share < 1)


READS = {
    "sys.stdin.buffer.read()": "import sys", "sys.stdin.readline() + sys.stdin.readline()": "import sys",
    "os.read(0, os.fstat(0).st_size)": "import os", "open(0).read()": "", "input() + ' ' + input()": "",
}  # fmt: skip
WRITES = {
    "sys.stdout.buffer.write(b'%d' % total)": "import sys", "os.write(1, b'%d' % total)": "import os",
    "threading.Thread(target=lambda: (time.sleep(0.1), print(total))).start()": "import threading, time",
    "print(total); sys.stdout.close(); sys.exit()": "import sys",
}  # fmt: skip


@pytest.mark.parametrize(("reads", "writes"), [*((one, "print(total)") for one in READS), *(("open(0).read()", one)
                                                                                            for one in WRITES)])
def test_a_program_may_read_and_write_in_every_way(sandbox, reads, writes):
    lines = (READS[reads], WRITES.get(writes, ""), f"total = sum(map(int, ({reads}).split()))", writes)
    made = sample("```python\n" + "\n".join(lines) + "\n```", tests={"inputs": ["1 2\n3"], "outputs": ["6\n"]})
    assert score(sandbox, made) == 1, made.metadata


def test_what_a_program_prints_without_end_is_bounded(sandbox):
    made = sample("```python\nwhile True: print('x' * 100_000)\n```", tests={"inputs": ["1"], "outputs": ["x"]})
    assert score(sandbox, made) == 0 and made.metadata["unit_tests"]["reason"].startswith("test 1: error: ")


def test_a_hang_is_bounded_and_named(sandbox):
    made = sample("```python\ndef add(a, b):\n    while True: pass\n```", tests=ASSERTS)
    begin = time.monotonic()
    assert score(sandbox, made) == 0
    assert time.monotonic() - begin < 3
    assert made.metadata["unit_tests"] == {"passed": 0, "of": 3, "reason": "test 1: error: it took longer than 1 s"}
    begin = time.monotonic()
    assert score(sandbox, made, share=True, seconds=1.5) == 0
    assert time.monotonic() - begin < 1.5 + 3


@pytest.mark.parametrize(("tests", "words"), [
    (None, "the row has no tests"), ("", "the row has no tests"), ("[1", "the tests are not JSON"), ([], "no tests"),
    ({"inputs": ["1"], "outputs": []}, "no tests"), ([1], "no tests"), ({"inputs": [1], "outputs": [2]}, "no tests"),
])  # fmt: skip
def test_a_row_without_tests_is_an_error(sandbox, tests, words):
    with pytest.raises(RewardError, match=words) as caught:
        score(sandbox, sample(ADD, tests=tests))
    assert "row 3" in str(caught.value)


def test_a_failure_of_the_sandbox_is_an_error_and_no_zero(sandbox, monkeypatch):
    calls = []

    def broken(*arguments):
        calls.append(arguments)
        raise SandboxError("a sandbox process ended")

    monkeypatch.setattr(sandbox, "run", broken)
    with pytest.raises(RewardError, match="could not run the tests of train prompt 3") as caught:
        score(sandbox, sample(ADD, tests=ASSERTS))
    assert len(calls) == 2 and "not counted as wrong" in str(caught.value)


def test_the_plugins_scorer_runs_and_its_sandbox_ends_with_the_run():
    plugin = Tools(ToolsOptions(unit_tests_share=True), RunConfig())
    try:
        assert asyncio.run(plugin.unit_tests(sample(ADD, tests=ASSERTS))) == 2 / 3
        supervisor, = [one for one in plugin._sandbox._idle.queue if one is not None]
        assert supervisor._popen.poll() is None
    finally:
        plugin.finish()
    assert supervisor._popen.poll() is not None
