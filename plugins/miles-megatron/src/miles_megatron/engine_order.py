"""The local engine's order of operations for a whole forward pass: what --true-on-policy-mode computes with.

Short attention and shallow products have the engine's bits anyway (attention.py). Of deeper products matrix libraries
choose the order of the sum by the number of rows, of a router's few outputs by the place where they begin, and long
attention is a fused kernel's. Inside of EngineOrder the engine's own functions answer such calls, which takes longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from miles_megatron.attention import written_out
from miles_megatron.packed_layout import seen

QUERIES = 256
"""Of a sequence that attend at once; their scores are not kept for the backward pass, but computed again."""


class EngineOrder(TorchFunctionMode):
    """Inside, products of rows with a matrix and attention have the local engine's bits. Gradients are as ever."""

    def __init__(self) -> None:
        super().__init__()
        from miles_local import products  # who runs with it has that engine

        self._products = products

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer a call of torch's; other modes and subclasses see what it is answered with."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attended(*args, **kwargs)
        if func in (torch.matmul, torch.mm, F.linear) and len(args) == 2 and not kwargs and args[1].dim() == 2:
            x, weight = args
            return self._product(x, weight if func is F.linear else weight.t())
        return func(*args, **kwargs)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[..., in], [out, in] -> [..., out], with whole kernels of rows and of outputs."""
        rows, out, unit = x.reshape(-1, x.shape[-1]), weight.shape[0], self._products.ROWS
        count = len(rows)
        rows, weight = F.pad(rows, (0, 0, 0, -count % unit)), F.pad(weight, (0, 0, 0, -out % unit))
        return self._products.linear(rows, weight)[:count, :out].unflatten(0, x.shape[:-1])


def _attended(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch's function of that name: [B, n, q, d], [B, g, k, d], [B, g, k, e] -> [B, n, q, e]."""
    count, keys, parts = query.shape[2], key.shape[2], []
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is None:
        attn_mask = seen(torch.arange(count), keys, None)
    for start in range(0, count, QUERIES):
        few = slice(start, start + QUERIES)
        mask = attn_mask[..., few, :]
        parts.append(checkpoint(written_out, query[:, :, few], key, value, mask, scale, None, dropout_p,
                                use_reentrant=False))
    return torch.cat(parts, 2)
