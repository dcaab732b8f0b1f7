"""What several tests do with an engine."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from miles_core.stages.rollout import Request, SamplingParams

PROMPT = (256, 10, 20, 30, 40)


def ask(name: object, tokens: int, *, want: tuple[str, ...] = (), **sampling) -> Request:
    """A request for this many tokens, the end-of-sequence id ignored unless `sampling` says otherwise."""
    params = SamplingParams(**{"max_new_tokens": tokens, "ignore_eos": True, **sampling})
    return Request(f"train-{name}", PROMPT, params, key=1, want=frozenset(want))


async def sync(engine, model: Path, version: int) -> None:
    """What a weight sync does, with SGLang's own reading from disk as the transfer."""
    await engine.pause(engine._config.rollout.pause_generation_mode)
    await update(engine, model, version)
    await engine.resume()


async def update(engine, model: Path, version: int) -> None:
    """Bring stale servers up to date."""
    stale = engine.stale(version)
    for server in stale:
        await server.client.call("/update_weights_from_disk", {
            "model_path": str(model), "weight_version": str(version), "flush_cache": False}, timeout=120)
    await engine.confirm(stale, version)


def mark(**environment: str) -> None:
    """Let whatever this process starts be found by its environment."""
    os.environ.update(environment)


def left_behind(name: str, value: str, seconds: float = 10) -> list[str]:
    """Command lines of the processes that are marked so, and have not ended by then."""
    until = time.monotonic() + seconds
    while (running := _marked(name, value)) and time.monotonic() < until:
        time.sleep(0.2)
    return running


def _marked(name: str, value: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found
