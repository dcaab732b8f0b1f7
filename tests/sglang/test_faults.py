"""Whole runs on real servers, of which one is killed or hangs, or whose answers are spoilt: nothing tainted is trained.

The proof is independent of the servers: transformers computes the log-prob of every trained token with the weights that
the token's version names, which the run exported.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from miles_testing import kill_resume
from miles_testing.forked import miles
from proxy import Proxy
from scenes import left_behind, mark
from test_conformance import reference

from miles_core.record.events import read
from miles_core.record.replay import load_batch
from tests.integration.faults import MODES, SERVER_SECONDS, SERVERS
from tests.integration.watching import Cell, Watch, shown, write

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.filterwarnings("ignore::ResourceWarning")]

ROLLOUTS = 9
VICTIM = {"engine kill": ("sglang_cpu", signal.SIGKILL), "engine hang": ("sglang_cpu", signal.SIGSTOP),
          "router kill": ("smg", signal.SIGKILL)}  # fmt: skip


def strike(folder: Path, hit, process, events: list[dict]) -> bool:
    """Once the second trained version is in use, amid the sampling that follows."""
    if not any(event["event"] == "weight_sync" and event["version"] == 3 for event in events):
        return False
    time.sleep(0.1)
    (folder / "injected").write_text(str(time.monotonic()))
    hit(process)
    return True


def wound(name: str, process) -> None:
    """Send the oldest process of this name the signal of the fault."""
    word, number = VICTIM[name]
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(child.cmdline()):
                found.append((child.create_time(), child.pid))
    os.kill(min(found)[1], number)


def tells_of(name: str):
    """Event -> its sentence, if it tells of the fault."""
    def tells(event: dict) -> str | None:
        if event["event"] in ("engine_lost", "router_lost"):
            return f"{event['event']}: {event.get('engine', 'router')}: {event['why']}"
        return event["text"] if event["event"] == "message" and event["level"] == "error" else None

    return tells


def tainted(folder: Path, model: Path, lag: int) -> tuple[int, list[str]]:
    """Trained samples; and those of them with a token whose log-prob is not that of the weights of its version."""
    count, found = 0, []
    for path in sorted((folder / "run/debug").glob("*.safetensors")):
        batch = load_batch(str(path), 0)
        for sample in batch.samples:
            count += 1
            versions, drawn = sample.columns["versions"], sample.columns["rollout_log_probs"]
            if not batch.version - lag <= versions.min() <= versions.max() <= batch.version:
                found.append(f"{sample.name} is of versions {set(versions)} in a batch at {batch.version}")
            for version in set(versions.tolist()):
                weights = model if version == 1 else folder / f"hf/{version - 1}"
                right = reference(weights, sample.tokens.tolist())[-sample.response_length:]
                if abs(drawn - right)[versions == version].max() > 1e-3:
                    found.append(f"{sample.name} is not of version {version}")
    return count, found


@contextmanager
def proxied(server: str):
    """A proxy in front of the server, in a thread; gives it and its loop."""
    ready, ends = threading.Event(), threading.Event()
    held = {}

    async def serve() -> None:
        async with Proxy(server) as held["proxy"]:
            ready.set()
            while not ends.is_set():
                await asyncio.sleep(0.05)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield held["proxy"]
    finally:
        ends.set()
        thread.join()


@pytest.fixture(scope="module")
def rows():
    """What was run; with MILES_WRITE_RELIABILITY it becomes the page's second table, once it is whole."""
    found: dict[tuple[str, str], Cell] = {}
    yield found
    if os.environ.get("MILES_WRITE_RELIABILITY") and {name for name, _ in found} == set(SERVERS):
        write([found[name, SERVERS[name][0]] for name in SERVERS], "servers", "make reliability-sglang")


@pytest.mark.parametrize("name", SERVERS)
def test_a_fault_of_real_servers(config, run_file, models, tiny, tmp_path, request, rows, name):
    mode, fault = SERVERS[name]
    tag, launcher = str(tmp_path), config.options["sglang"]["server_command"]
    path = f"{os.environ['PATH']}:{Path(launcher[0]).parent}"  # smg may be there alone
    flags = ["run", run_file(), "--no-live", "--run-dir", "run", "--engine", "sglang", "--max-lag", MODES[mode],
             "--num-rollout", ROLLOUTS, "--rollout-max-response-len", "80", "--rollout-ignore-eos", "--save",
             "run/ckpt", "--save-interval", "1", "--save-hf", "hf/{rollout_id}", "--max-tokens-per-gpu", "1024",
             "--save-debug-rollout-data", "run/debug/{rollout_id}.safetensors", *fault.flags]  # fmt: skip

    def go(more: list, hit, model: Path) -> Cell:
        watch = Watch(tmp_path / "run", tells_of(name), partial(strike, tmp_path, hit), limit=900)
        outcome = miles([*flags, *more], tmp_path, timeout=10, before=partial(mark, MILES_TEST_RUN=tag, PATH=path),
                        while_running=watch)
        told, said = watch.told or (float("nan"), "")
        seconds = told - float((tmp_path / "injected").read_text())
        count, problems = tainted(tmp_path, model, MODES[mode])
        taints = len(problems)
        if outcome.code != (0 if fault.end == "completed" else 1):
            problems.append(f"exit code {outcome.code}: {outcome.err[-2000:]}")
        last = list(read(tmp_path / "run/events.jsonl"))[-1]
        if (last["event"], last.get("status")) != ("run_end", fault.end):
            problems.append(f"the record ends with {last}")
        if not seconds <= SERVER_SECONDS:
            problems.append(f"seen after {seconds:.1f} s")
        if not re.search(".*".join(map(re.escape, fault.words.split(" ... "))), said, re.DOTALL):
            problems.append(f"{fault.words!r} is not in {said!r}")
        problems += [f"a process is left: {line}" for line in left_behind("MILES_TEST_RUN", tag)]
        problems += [f"left behind: {path}" for path in kill_resume.leftovers(tmp_path / "run")]
        return Cell(name, mode, seconds, shown(said), fault.end, count, taints, problems)

    if name == "garbage":
        with proxied(request.getfixturevalue("server")) as proxy, tempfile.TemporaryDirectory() as between:
            cell = go(["--hf-checkpoint", models["old"], "--rollout-external", "--rollout-external-engine-addrs",
                       proxy.address, "--weight-sync", "disk", "--update-weight-disk-dir", between],
                      lambda process: proxy.fault("/generate", "garbage"), models["old"])
    else:
        cell = go(["--server-command", *launcher, "--sglang-max-total-tokens", "4096", "--health-check-timeout", "5"],
                  partial(wound, name), tiny / "qwen3")
    print(cell)
    assert not cell.problems
    rows[name, mode] = cell
