"""Latent attention of which each query sees a few keys alone; see latent.Indexer.

Scores of the indexer choose and do not weigh, so no gradient comes to it: its parameters are frozen. Every
tensor-parallel rank chooses for all heads, of all rows; context-parallel ranks gather the indexer's keys as they do the
attention's.
"""

from __future__ import annotations

import torch

from miles_megatron import cpu
from miles_megatron.attention import PackedAttention
from miles_megatron.latent import Latent
from miles_megatron.latent_attention import LatentAttention, Whole
from miles_megatron.module_specs import LayerModules
from miles_megatron.packed_layout import Pick, packed_layout_of, seen
from miles_megatron.rope import Rope, Rotate
from miles_megatron.specs import Attention

cpu.install()

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402 - after install()
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402

_EPSILON = 1e-6
"""Of the norm of the indexer's keys."""


def spec(latent: Latent, config: TransformerConfig, attention: Attention, rope: Rope,
         modules: LayerModules) -> ModuleSpec:
    """What takes the place of a layer's `self_attention`. No kernel of Transformer Engine's has such masks."""
    core = ModuleSpec(module=SparseAttention, params={"rope": rope, "indexer": latent.indexer})
    params = {"latent": latent, "modules": modules, "core": core, "attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=SparseLatentAttention, params=params)


class Index(torch.nn.Module):
    """hidden states and latents of queries [rows, b, ...] -> [rows, b, queries | key | a number for each head]."""

    def __init__(self, config: TransformerConfig, latent: Latent):
        super().__init__()
        heads, size = latent.indexer.heads, latent.indexer.size
        self.q_up = Whole(config, latent.query_rank, heads * size, False)
        self.key = Whole(config, config.hidden_size, size, False)
        self.norm = torch.nn.LayerNorm(size, eps=_EPSILON, dtype=config.params_dtype)
        self.share = Whole(config, config.hidden_size, heads, False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_up(query), self.norm(self.key(hidden)), self.share(hidden)], -1)


class SparseLatentAttention(LatentAttention):
    """LatentAttention with an indexer; takes packed rows alone."""

    def __init__(self, config: TransformerConfig, *args, latent: Latent, **kwargs):
        super().__init__(config, *args, latent=latent, **kwargs)
        self.indexer = Index(config, latent)

    def _more(self, hidden: torch.Tensor, query: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.indexer(hidden, query)
        with torch.no_grad():
            return {"index": gather_from_sequence_parallel_region(rows) if self.config.sequence_parallel else rows}


class SparseAttention(PackedAttention):
    """PackedAttention in which a query sees the keys that its indexer scores highest.

    Args:
        indexer: latent.Indexer.
    """

    def __init__(self, config, *args, rope: Rope, indexer, **kwargs):
        super().__init__(config, *args, rope=rope, **kwargs)
        self.indexer = indexer

    def forward(self, query, key, value, attention_mask=None, *args, packed_seq_params=None, index=None, **kwargs):
        """As PackedAttention's.

        Args:
            index: [T, 1, ...] of Index.

        Raises:
            ValueError: rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("attention with an indexer takes packed rows")
        with torch.no_grad():
            index = self._picked(index[:, 0], packed_layout_of(packed_seq_params, query, self.group))
        return super().forward(query, key, value, attention_mask, *args, packed_seq_params=packed_seq_params,
                               index=index, **kwargs)

    def _picked(self, index, layout):
        """Turned queries [N, heads, size], keys [M, size] and shares [N, heads], in the order of the buckets."""
        heads, size = self.indexer.heads, self.indexer.size
        query, key, share = index.split((heads * size, size, heads), -1)
        tables = layout.tables(self.rope, index.dtype)
        query, key = (Rotate.apply(x.unflatten(-1, (-1, size)), *tables, self.indexer.interleaved)
                      for x in (query, key))
        if self.group.size() > 1:
            key = gather_from_sequence_parallel_region(key.contiguous(), True, self.group)
        if layout.query_rows is not None:
            query, share = (Pick.apply(x, layout.query_rows, layout.query_back) for x in (query, share))
        if layout.key_rows is not None:
            key = Pick.apply(key, layout.key_rows, layout.key_back)
        return query.float(), key[:, 0].float(), share.float() * heads**-0.5

    @torch.no_grad()
    def _mask(self, bucket, queries, keys, index):
        chosen = self.indexer.chosen
        if bucket.keys <= chosen:
            return bucket.mask()
        query, key, share = (x[rows].unflatten(0, (bucket.sequences, -1))
                             for x, rows in zip(index, (queries, keys, queries), strict=True))
        before = seen(bucket.positions, bucket.keys, None)
        scores = query.new_zeros(*query.shape[:2], bucket.keys)
        for head in range(query.shape[2]):  # one at a time: [sequences, queries, keys] of each would be much
            products = torch.bmm(query[:, :, head], key.mT).mul_(self.indexer.size**-0.5).relu_()
            scores.addcmul_(products, share[:, :, head, None])
        best = scores.masked_fill_(~before, -torch.inf).topk(chosen).indices
        return (torch.zeros_like(scores, dtype=torch.bool).scatter_(2, best, True) & before)[:, None]
