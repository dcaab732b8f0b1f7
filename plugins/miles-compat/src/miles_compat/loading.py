"""What Miles's functions load: functions by path, tokenizers; and how plain functions wait for coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

LOOP: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("the loop that the engine belongs to", default=None)


def load_function(path: str | None, **named: object) -> Any:
    """What package.module.name, package.module:name or ./file.py:name names; None of None.

    Raises:
        HookError: it cannot be imported, or there is nothing of that name.
    """
    from miles_compat.paths import anything_at

    return None if path is None else anything_at(path, "load_function")


def load_tokenizer(name: str, chat_template_path: str | None = None, **named: object) -> Any:
    """A tokenizer of transformers; the code of a checkpoint is never run."""
    from pathlib import Path

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if chat_template_path and Path(chat_template_path).is_file():
        tokenizer.chat_template = Path(chat_template_path).read_text(encoding="utf-8")
    return tokenizer


def load_processor(name: str, **named: object) -> None:
    """None: this version of Miles trains on text."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine from a plain function, which runs in a thread of its own."""
    loop = LOOP.get()
    if loop is not None:
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    return asyncio.run(work)


async def eager_create_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has begun."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def as_completed_async(tasks: Iterable[Any]) -> AsyncIterator[Any]:
    """Results in the order in which they come."""
    for task in asyncio.as_completed(list(tasks)):
        yield await task


class SingletonMeta(type):
    """Classes of which a process has one object: the first call makes it."""

    _made: dict[type, Any] = {}
    _lock = threading.Lock()

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._made:
                SingletonMeta._made[cls] = super().__call__(*arguments, **named)
        return SingletonMeta._made[cls]

    @staticmethod
    def clear_all_instances() -> None:
        """Forget them."""
        SingletonMeta._made.clear()


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first of so many ports of this machine that nobody listens on."""
    import socket

    def free(port: int) -> bool:
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) != 0

    ports = range(start_port, 65536 - consecutive)
    return next(port for port in ports if all(free(one) for one in range(port, port + consecutive)))


LORA_ADAPTER_NAME = "miles_lora"
"""What functions name as the adapter of a request; the run names its own."""


def is_lora_enabled(args: Any) -> bool:
    """Whether the run trains adapters."""
    return bool(args.lora_rank)


lora_rollout_enabled = is_lora_enabled
