"""The core attention of Llama 4; see llama4.Llama4Attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from miles_megatron.attention import PackedAttention
from miles_megatron.packed_layout import Bucket, PackedLayout, seen
from miles_megatron.specs import Attention

from miles_specs_llama.llama4 import Llama4Attention


def spec(wanted: Llama4Attention, attention: Attention, rope: Any, modules: Any) -> ModuleSpec:
    """What takes the place of a layer's `self_attention`. No kernel of Transformer Engine's has such masks."""
    core = ModuleSpec(module=ChunkedAttention,
                      params={"rope": rope, "warming": attention.warming, "wanted": wanted})
    return ModuleSpec(
        module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=modules.column, core_attention=core, linear_proj=modules.row),
    )  # fmt: skip


class ChunkedAttention(PackedAttention):
    """PackedAttention within chunks; takes packed rows alone.

    Args:
        wanted: what the checkpoint says.
    """

    def __init__(self, *args: Any, wanted: Llama4Attention, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.wanted = wanted

    def _placed(self, query: torch.Tensor, key: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
        query, key = super()._placed(query, key, layout)
        if self.wanted.epsilon is not None:
            query, key = (F.rms_norm(x, x.shape[-1:], eps=self.wanted.epsilon) for x in (query, key))
        return query, key

    def _mask(self, bucket: Bucket, queries: slice, keys: slice, index: Any) -> torch.Tensor | None:
        chunk = self.wanted.chunk
        if chunk is None or bucket.keys <= chunk:
            return bucket.mask()
        other = torch.arange(bucket.keys, device=bucket.positions.device) // chunk
        return seen(bucket.positions, bucket.keys, None) & (bucket.positions[:, None] // chunk == other)

    def _batched(self, *_: Any) -> torch.Tensor:
        raise ValueError("attention within chunks takes packed rows")
