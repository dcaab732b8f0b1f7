"""Runs one unit test in the sandbox; this source is sent there. What returns `passed` has seen the test pass.

The word is a secret of the call, so that code that ends the process early has not passed.
"""


def statement(code: str, test: str, passed: str) -> str:
    """A test that is Python: asserts, which see the names of the code."""
    scope: dict[str, object] = {"__name__": "answer"}
    exec(compile(code, "answer.py", "exec"), scope)
    exec(compile(test, "test.py", "exec"), scope)
    return passed


def program(code: str, stdin: str) -> str:
    """A test that is an input: what the program prints."""
    import contextlib
    import io
    import sys

    sys.stdin, printed = io.StringIO(stdin), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        exec(compile(code, "answer.py", "exec"), {"__name__": "__main__"})
    return printed.getvalue()
