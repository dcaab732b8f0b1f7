"""A script in a fork is one that an interpreter has started."""

import os
import subprocess
import sys

import pytest
from miles_testing import forked

SCRIPT = """
import atexit, os, sys
import library, neighbour
atexit.register(print, "over")
print(__name__, sys.argv, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), os.environ["WORD"], os.getcwd())
print(library.VALUE, neighbour.VALUE, "library" in sys.modules, "sitecustomize" in sys.modules, "tests" in sys.modules)
print(sys.path)
print("heard", file=sys.stderr)
subprocess = __import__("subprocess").run([sys.executable, "-c", "print('a child')"], check=True)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "sys.exit('enough')", "raise KeyError('unforeseen')"])
def test_it_ends_and_prints_as_that_does(tmp_path, end):
    for folder, name in (("of_script", "neighbour"), ("of_path", "library")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(f"VALUE = {name!r}\n")
    (tmp_path / "of_path" / "sitecustomize.py").write_text("print('customised', flush=True)\n")
    (tmp_path / "of_script" / "one.py").write_text(SCRIPT.format(end=end))
    argv = ["of_script/one.py", "--word", "a b"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "of_path"), "WORD": "w"}
    fork = forked.python(argv, tmp_path, env=env)
    real = subprocess.run([sys.executable, "-u", *argv], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert fork.code == real.returncode
    assert sorted(fork.out.splitlines()) == sorted(real.stdout.splitlines())
    assert fork.err.splitlines()[0] == "heard"
    assert fork.err.splitlines()[-1] == real.stderr.splitlines()[-1]
    assert "unforeseen" not in end or "Traceback (most recent call last)" in fork.err


def test_code_of_the_command_line_finds_modules_of_the_folder(tmp_path):
    (tmp_path / "near.py").write_text("VALUE = 3\n")
    done = forked.python(["-c", "import sys, near; print(near.VALUE, sys.argv)", "more"], tmp_path)
    assert (done.code, done.out) == (0, "3 ['-c', 'more']\n")


def test_nothing_lies_about_while_one_runs(tmp_path):
    seen = []
    done = forked.miles(["--version"], tmp_path, while_running=lambda process: seen.append([*tmp_path.iterdir()]))
    assert (done.code, done.err, seen) == (0, "", [[]]) and done.out.strip()
