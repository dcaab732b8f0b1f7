"""What token mixers with a state share, whatever their rule: each packed sequence by itself, from an empty state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from miles_megatron import cpu
from miles_megatron.packed_layout import PackedLayout, Pick, Unpick

cpu.install()

from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402 - after install()
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from megatron.core.transformer.utils import (  # noqa: E402
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

CHUNK = 64
"""Tokens computed at once: products are as large as a tile of a GPU, and those of its tokens with each other small."""


class Again(torch.autograd.Function):
    """function(*tensors), of which only the tensors are kept: the backward pass computes the rest once more.

    What a chunk's tokens have to do with each other is several times as large as the tokens.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(wanted)
                  for x, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        grads = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grad))
        return None, *(next(grads) if x.requires_grad else None for x in inputs)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [B, L, C], weight [C, 1, K], bias [C] -> silu(conv) [B, L, C]: position p sees the K positions up to itself,
    zeros before the first."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    return F.silu(F.conv1d(padded, weight, bias, groups=len(weight))).transpose(1, 2)


def in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """[B, L, heads, ...] -> [B, heads, chunks, size, ...], wide; after the end come zeros, which change nothing."""
    x = wide(x).transpose(1, 2)
    short = -x.shape[2] % size
    if short:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, short))
    return x.unflatten(2, (-1, size))


def wide(x: torch.Tensor) -> torch.Tensor:
    """In fp32, unless it has more."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_sequence(rows: torch.Tensor, layout: PackedLayout, context_group: Any,
                mix: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """[T, C] of this rank's rows -> [T, D], each sequence from an empty state.

    Sequences of similar length are computed side by side, in the buckets of the attention's layout. Context-parallel
    ranks each gather all rows and keep the results of their own, which repeats work but changes no result.

    Args:
        mix: [B, L, C] of whole sequences, with padding after their ends -> [B, L, D].
    """
    if context_group.size() > 1:
        rows = gather_from_sequence_parallel_region(rows, True, context_group)
    if layout.key_rows is not None:
        rows = Pick.apply(rows, layout.key_rows, layout.key_back)
    out, end = [], 0
    for bucket in layout.buckets:
        start, end = end, end + bucket.sequences * bucket.keys
        mixed = mix(rows[start:end].unflatten(0, (bucket.sequences, -1)))
        out.append((mixed if bucket.whole else mixed[:, bucket.positions]).flatten(0, 1))
    joined = out[0] if len(out) == 1 else torch.cat(out)
    return joined if layout.query_rows is None else Unpick.apply(joined, layout.query_back)


def sharded_entries(mixer: Any, prefix: str, offsets: tuple[Any, ...], metadata: Any, cut: Iterable[str],
                    joined: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """Megatron's sharded_state_dict of a mixer: what a checkpoint keeps, independent of the layout.

    Args:
        mixer: a module with a `tensor_group`.
        cut: its own parameters that are cut among tensor-parallel ranks, along their first axis.
        joined: name -> names and sections of a tensor of several, as `apart` takes them.
    """
    own: dict[str, torch.Tensor] = {}
    mixer._save_to_state_dict(own, "", keep_vars=True)
    entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        own, prefix, dict.fromkeys(cut, 0), offsets, tp_group=mixer.tensor_group, dp_cp_group=metadata["dp_cp_group"])
    for child, module in mixer.named_children():
        entries |= sharded_state_dict_default(module, f"{prefix}{child}.", offsets, metadata,
                                              tp_group=mixer.tensor_group)
    for name, (names, sections) in joined.items():
        entries[prefix + name] = apart(entries[prefix + name], names, sections)
    return entries


def apart(entry: ShardedTensor, names: str, sections: tuple[int, ...]) -> ShardedTensorFactory:
    """A tensor of several that are each cut among ranks, as so many tensors of the checkpoint.

    Args:
        names: a letter for each.
        sections: rows that this rank has of each.
    """
    bare = entry.without_data()

    @torch.no_grad()
    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        whole = replace(bare, key=key, data=tensor, dtype=tensor.dtype, replica_id=replica_id,
                        flattened_range=flattened_range)
        starts = (sum(sections[:i]) for i in range(len(sections)))
        parts = [whole.narrow(0, start, size)[0] for start, size in zip(starts, sections, strict=True)]
        return [replace(part, key=f"{key}.{name}") for part, name in zip(parts, names, strict=True)]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(parts)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id, entry.flattened_range)
