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
    """A test that is an input: what the program prints, whichever way it reads and writes.

    What it reads is a file, as some ask for its size. It has ended when its threads have.
    """
    import contextlib
    import os
    import sys
    import tempfile
    import threading

    read, written = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    read.write(stdin.encode("utf-8", "surrogatepass"))
    read.seek(0)
    os.dup2(read.fileno(), 0)
    os.dup2(written.fileno(), 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="surrogatepass", closefd=False)
    sys.stdout = printed = os.fdopen(1, "w", encoding="utf-8", errors="surrogatepass", closefd=False)
    with contextlib.suppress(SystemExit):
        exec(compile(code, "answer.py", "exec"), {"__name__": "__main__"})
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, printed):
        with contextlib.suppress(ValueError):  # closed, which flushes as well
            stream.flush()
    written.seek(0)
    return written.read().decode("utf-8", "replace")
