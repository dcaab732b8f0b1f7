"""Kernels for log-probs on a CPU, by Triton's interpreter, against torch's way; tests/gpu compiles them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = [pytest.mark.skipif(find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
                                  reason="needs Triton, and TRITON_INTERPRET=1 before it is imported"),
               pytest.mark.filterwarnings("ignore:invalid value encountered")]
"""Marks of such tests: numpy, which interprets, minds products of 0 and infinity that the kernels mask away."""

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""(hidden [7, 16], weight [150, 16], targets [7]) -> (log-probs [7], entropy [7] or None)."""


def compare(ours: Way, theirs: Way, *, entropy_gradient: bool) -> None:
    """Values, and gradients to the rounding of logits' gradients to bfloat16, these a second time, as a graph that is
    kept allows. Logits are in several blocks, the last not full, where a test has made blocks small.

    Raises:
        AssertionError: they differ.
    """
    draw, outcomes = torch.Generator().manual_seed(0), []
    hidden, weight = (torch.randn(size, 16, generator=draw).bfloat16().requires_grad_() for size in (7, 150))
    targets, directions = torch.randint(0, 150, (7,), generator=draw), torch.randn(2, 7, generator=draw)
    for way in (ours, theirs):
        log_probs, spread = way(hidden, weight, targets)
        loss = log_probs @ directions[0]
        if entropy_gradient and spread is not None:
            loss = loss + spread @ directions[1]
        gradients = [torch.autograd.grad(loss, (hidden, weight), retain_graph=again) for again in (True, False)]
        outcomes.append((log_probs, spread, *gradients[0], *gradients[1]))
    for one, other in zip(*outcomes, strict=True):
        if one is None or other is None:
            assert one is other
        elif other.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
        else:
            assert (one.float() - other.float()).norm() <= 8e-3 * other.float().norm()
