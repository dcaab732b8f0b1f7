"""Real commands from a warm process: heavy imports are done once, then every command is a fork of that process.

A fork runs the entry point of the console script `miles`, or a script as the interpreter would, in its own folder and
with its own output; it costs milliseconds where a fresh interpreter needs seconds for torch and transformers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import multiprocessing.reduction
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PLUGINS = [
    "miles_flags.functions", "miles_flags.plugin", "miles_flags.settings", "miles_grpo.advantage", "miles_grpo.plugin",
    "miles_local.checks", "miles_local.plugin", "miles_math.plugin", "miles_megatron.checks", "miles_megatron.decoder",
    "miles_megatron.families", "miles_megatron.memory_plan", "miles_megatron.mixture", "miles_megatron.muon_plan",
    "miles_megatron.options", "miles_megatron.plan_lines", "miles_megatron.plugin", "miles_preflight.plugin",
    "miles_preflight.rows", "miles_preflight.statements", "miles_ray.plugin", "miles_report.plugin",
    "miles_sglang.checks", "miles_sglang.plugin", "miles_sglang.surface",
]  # fmt: skip
"""What most runs import of official plugins, where these are installed."""

PRELOAD = [
    "torch", "torch.profiler", "transformers", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.configuration_qwen3",
    "miles_core.cli.run", "miles_core.build", "miles_core.execute", "miles_megatron.step",
    "miles_local.engine", "miles_megatron.checkpoint", "miles_core.loop", "miles_core.kl",
    "pydantic.main", "pydantic.type_adapter",
    "pytest",  # modules of tests import it, and forks import these for `before`
    *(name for name in PLUGINS if importlib.util.find_spec(name.partition(".")[0])),
    "miles_testing.warm",  # the last
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a command. `code` is negative for a signal."""

    code: int
    out: str
    err: str
    seconds: float


def context() -> multiprocessing.context.ForkServerContext:
    """The fork server's context; its one process has done the imports of PRELOAD and holds no threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOAD)
    return forkserver


def miles(argv: Sequence[str | Path], cwd: Path, *, timeout: float = 120.0, before: Callable[[], None] | None = None,
          while_running: Callable[[multiprocessing.process.BaseProcess], None] | None = None) -> Outcome:
    """Run `miles ARGV` in a fork and wait for it.

    Args:
        timeout: seconds after which it is killed and the outcome says -9.
        before: runs in the fork first; has to be picklable.
        while_running: runs here with the process, to send it signals for instance.
    """
    return _outcome(functools.partial(_miles, [str(word) for word in argv], before), cwd, timeout, while_running)


def python(argv: Sequence[str | Path], cwd: Path, *, timeout: float = 120.0,
           env: Mapping[str, str] | None = None) -> Outcome:
    """Run `python SCRIPT ...` or `python -c CODE ...` in a fork and wait for it.

    Its path is that of an interpreter which starts in `cwd` with the PYTHONPATH of `env`, whose `sitecustomize` it
    imports as well. What it cannot tell from a fresh one by is only that the modules of PRELOAD are there.

    Args:
        timeout: seconds after which it is killed and the outcome says -9.
        env: its environment, this process's by default.
    """
    env = dict(os.environ if env is None else env)
    path = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *_own_path()]
    return _outcome(functools.partial(_python, [str(word) for word in argv], env, path), cwd, timeout)


@functools.cache
def _own_path() -> list[str]:
    """Where an interpreter looks for modules without a script and without PYTHONPATH."""
    done = subprocess.run([sys.executable, "-c", "import json, sys; print(json.dumps(sys.path[1:]))"], check=True,
                          env={**os.environ, "PYTHONPATH": ""}, text=True, stdout=subprocess.PIPE)
    path: list[str] = json.loads(done.stdout)
    return path


def _outcome(work: Callable[[], None], cwd: Path, timeout: float,
             while_running: Callable[[multiprocessing.process.BaseProcess], None] | None = None) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # without a name, so none is left behind
        begin = time.monotonic()
        process = context().Process(target=_main, args=(work, str(cwd), _Sent(out.fileno()), _Sent(err.fileno())))
        process.start()
        if while_running is not None:
            while_running(process)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
        printed, complained = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
                               for file in (out, err))  # not read(): whoever writes on shares the place in the file
    assert process.exitcode is not None, "it was waited for"
    return Outcome(process.exitcode, printed, complained, time.monotonic() - begin)


@dataclass(frozen=True, slots=True)
class _Sent:
    """An open file that a process is started with, in which it is a number."""

    number: int

    def __reduce__(self) -> tuple[Callable[..., int], tuple[object]]:
        return _received, (multiprocessing.reduction.DupFd(self.number),)


def _received(file: Any) -> int:
    number: int = file.detach()
    return number


def _main(work: Callable[[], None], cwd: str, out: int, err: int) -> None:
    os.chdir(cwd)
    for number, file in ((1, out), (2, err)):
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - stays open until the process ends
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - stays open until the process ends
    work()


def _miles(argv: list[str], before: Callable[[], None] | None) -> None:
    sys.argv = ["miles", *argv]
    from miles_core.cli import main

    code: str | int = 0
    try:
        if before is not None:
            before()
        main()
    except SystemExit as leave:
        code = leave.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _python(argv: list[str], env: dict[str, str], path: list[str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = path
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    try:
        if argv[0] == "-c":
            sys.argv, sys.path[:0] = ["-c", *argv[2:]], [""]
            exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[:0] = argv, [str(Path(argv[0]).resolve().parent)]
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends forks without


def apart(work: Callable[..., None], *args: object, timeout: float = 120.0) -> None:
    """Do some work in a fork; what it raises is raised here.

    Raises:
        AssertionError: it raised, died or took longer than `timeout` seconds; shows its traceback.
    """
    receiving, sending = context().Pipe(duplex=False)
    process = context().Process(target=_apart, args=(sending, work, args))
    process.start()
    sending.close()
    try:
        problem = receiving.recv() if receiving.poll(timeout) else f"it took longer than {timeout:g} s"
    except EOFError:
        problem = "the process ended on its own"
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    if problem is not None:
        raise AssertionError(f"{work.__module__}.{work.__name__}: {problem}")


def _apart(sending: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    problem = None
    try:
        work(*args)
    except BaseException as error:  # noqa: BLE001 - raised by whoever waits
        text = "".join(traceback.format_exception(error))
        problem = str(error) + "\n" + text if isinstance(error, AssertionError) else text
    sending.send(problem)
    os._exit(0)
