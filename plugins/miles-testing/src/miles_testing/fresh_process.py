"""A fresh process without torch, whose forks look at plugins: what is imported when, what a load costs, what binds.

One such process serves a whole test session; each job is a fork of it, so that no job sees what another has imported.
"""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

HEAVY = ("torch", "megatron", "transformers", "ray", "sglang")
"""Packages too slow to import for listing or planning."""

SECONDS = 60.0
"""How long a job may take."""


def ask(job: Callable[..., dict[str, Any]], *args: object) -> dict[str, Any]:
    """What a job of this module gives in a fork of the fresh process.

    Raises:
        AssertionError: the job raised, died or took too long; shows its traceback.
    """
    process = _process()
    assert process.stdin and process.stdout
    _write(process.stdin, (job.__name__, args, sys.path, os.getcwd()))
    answer: dict[str, Any] = _read(process.stdout)
    if "error" in answer:
        raise AssertionError(f"in a fresh process: {answer['error']}")
    return answer


@functools.cache
def _process() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from miles_testing.fresh_process import serve; serve()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # ends when its input does
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin and process.stdout
    process.stdin.close()
    process.wait(SECONDS)
    process.stdout.close()


def imports(name: str, run_file: Path, argv: list[str]) -> dict[str, Any]:
    """List, plan and load a plugin; load it again, and once more as if for the first time.

    Returns:
        `listed`, `planned`, `loaded`: heavy packages that are there by then; `early`: modules of the plugin that were
        imported before it was loaded, though it offers no hook of the time when a run is planned; `seconds`: of the
        CPU, for the load; `threads`: that it began; `same`: a second load gives the same class; `again`: the error of
        a load after its modules were forgotten.
    """
    from miles_core.plugins import load, scan
    from miles_core.plugins.plan import prepare
    from miles_core.plugins.select import all_specs, manifest_of

    for one in scan.installed():
        if one.name == name:
            manifest_of(one)
    listed, before = _heavy(), set(sys.modules)
    plan = prepare(run_file, argv)
    manifest = next(one.manifest for one in plan.selected if one.manifest.name == name)
    own = re.compile(re.escape(manifest.plugin.partition(":")[0].partition(".")[0]) + r"(\.|$)|miles_plugin_file_")
    planning = any(all_specs()[offer.hook].role == "plan" for offer in manifest.offers)
    planned, early = _heavy(), [] if planning else sorted(m for m in set(sys.modules) - before if own.match(m))
    begin, threads = time.process_time(), threading.active_count()
    kind = load.load(manifest)
    seconds = time.process_time() - begin
    seen = {"listed": listed, "planned": planned, "early": early, "loaded": _heavy(), "seconds": seconds,
             "threads": threading.active_count() - threads, "same": load.load(manifest) is kind, "again": None}
    for module in [m for m in sys.modules if own.match(m)]:
        del sys.modules[module]
    try:
        load.load(manifest)
    except Exception as error:  # noqa: BLE001 - told by whoever asked
        seen["again"] = str(error)
    return seen


def binds(name: str, selected: bytes, config: bytes) -> dict[str, Any]:
    """Bind what came over, pickled, for each role and each role again.

    Returns:
        `offers`: role -> hooks that are there, of both times.
    """
    from miles_core import hookspecs
    from miles_core.plugins import bind
    from miles_core.plugins.select import all_specs

    one, settings = pickle.loads(selected), pickle.loads(config)
    offers = []
    for _ in range(2):
        roles = [bind.bind([one], settings, role) for role in hookspecs.ROLES]
        bind.check_roles_apart(roles)
        offers.append({hooks.role: sorted(hook for hook in all_specs() if getattr(hooks, hook)) for hooks in roles})
        for hooks in roles:
            if hooks.finish is not None:
                hooks.finish("completed")
    return {"offers": offers}


def serve() -> None:
    """Answer jobs until the input ends."""
    import miles_core.plugins.bind
    import miles_core.plugins.plan  # noqa: F401 - forks have it then

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what plugins print is no answer
    while True:
        try:
            request = _read(sys.stdin.buffer)
        except EOFError:
            return
        _write(out, _forked(*request))


def _forked(job: str, args: tuple[Any, ...], path: list[str], folder: str) -> dict[str, Any]:
    answer: dict[str, Any]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        sys.path[:] = path
        try:
            os.chdir(folder)
            answer = globals()[job](*args)
        except BaseException as error:  # noqa: BLE001 - told by whoever asked
            answer = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        with os.fdopen(writing, "wb") as pipe:
            _write(pipe, answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            answer = {"error": f"it took longer than {SECONDS:g} s"}
        else:
            try:
                answer = _read(pipe)
            except EOFError:
                answer = {"error": "the process ended on its own"}
    os.waitpid(child, 0)
    return answer


def _heavy() -> list[str]:
    return sorted(set(HEAVY) & set(sys.modules))


def _write(pipe: IO[bytes], value: object) -> None:
    data = pickle.dumps(value)
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(pipe.read(int.from_bytes(head, "big")))
