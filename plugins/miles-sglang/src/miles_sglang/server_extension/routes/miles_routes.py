"""A plugin of SGLang's where answers have routes: they leave the scheduler as narrow as their numbers allow.

An answer's routes go through four processes and a text of base64, all of it in int32, and are nearly all of its bytes.
Where many answers end at once, that is seconds after the last token.

SGLang finds the entry point in the folder beside this file, which is on a server's PYTHONPATH in these runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    """SGLang calls it in each of its processes, before a model is made."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register(f"{processor}._maybe_collect_routed_experts", collect, HookType.AROUND)


def collect(original: Callable, processor: Any, req: Any) -> None:
    """The routes of a request that has ended, narrowed."""
    original(processor, req)
    if req.routed_experts is not None:
        req.routed_experts = narrowed(req.routed_experts)


def narrowed(routes: torch.Tensor) -> torch.Tensor:
    """As bytes: an int32 that is the number of no expert, -1 - bytes of a number, and the numbers themselves.

    Args:
        routes: int32, of any shape; -1 for none.

    Returns:
        [4 + numbers x bytes of one] uint8; numbers that need the room stay int32 without anything before them.
    """
    low, high = (int(one) for one in torch.aminmax(routes)) if routes.numel() else (0, 0)
    if low >= 0 and high < 2**8:
        kind = torch.uint8
    else:
        kind = torch.int16 if low >= -1 and high < 2**15 - 1 else torch.int32
    numbers = routes.to(kind).flatten().view(torch.uint8)
    if kind == torch.int32:
        return numbers
    return torch.cat([torch.tensor([-1 - kind.itemsize], dtype=torch.int32).view(torch.uint8), numbers])
