"""Self-attention of a layer whose heads are not those of the model's config, or whose values are made otherwise."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

from miles_megatron import cpu
from miles_megatron.specs import Attention

cpu.install()

from megatron.core.tensor_parallel.mappings import (  # noqa: E402 - after install()
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.transformer import TransformerConfig  # noqa: E402 - after install()
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules  # noqa: E402


class LayersOwnAttention(SelfAttention):
    """Megatron's, by what `attention` says of its heads and values; see specs.Attention.

    Where keys are values, `linear_qkv` gives a group's queries and its key, [T, b, groups x (n / groups + 1) x d];
    where keys are another layer's, queries alone.
    """

    lent: tuple[torch.Tensor, torch.Tensor] | None = None
    """Keys, before the rope, and values, [T, b, groups, d] of this rank's heads: what a layer that lends leaves here,
    and what one that borrows looks for."""

    def __init__(self, config: TransformerConfig, submodules: SelfAttentionSubmodules, layer_number: int, *args,
                 attention: Attention, **kwargs):  # fmt: skip
        config = copy.copy(config)  # what is inside reads its sizes there too
        config.kv_channels = attention.head_dim or config.kv_channels
        config.num_query_groups = attention.groups or config.num_query_groups
        missing = (2 if attention.borrows else 1 if attention.key_is_value else 0) * config.num_query_groups
        if missing:
            submodules = replace(submodules, linear_qkv=functools.partial(
                _narrower, submodules.linear_qkv, missing * config.kv_channels))
        if attention.borrows:
            submodules = replace(submodules, k_layernorm=None)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self.attention = attention

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, ...]:
        """[T, b, H] -> q [T, b, n, d], k and v [T, b, groups, d], of this rank's heads."""
        if self.attention.borrows:
            query = self.linear_qkv(hidden_states)[0].unflatten(-1, (-1, self.hidden_size_per_attention_head))
            return (query if self.q_layernorm is None else self.q_layernorm(query), *self.lent)
        if self.attention.key_is_value:
            query, key, value = self._from_two(hidden_states)
        else:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self.attention.value_norm:
            value = F.rms_norm(value.float(), value.shape[-1:], eps=self.config.layernorm_epsilon).type_as(value)
        self.lent = (key, value) if self.attention.lends else None
        return query, key, value

    def _from_two(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size, both = self.hidden_size_per_attention_head, self.linear_qkv(hidden_states)[0]
        sharing, rank = self.world_size // self.config.num_query_groups, self.pg_collection.tp.rank()
        if sharing > 1:  # ranks cut the projection anywhere: as in Megatron, it is joined, and this rank's group taken
            both = all_gather_last_dim_from_tensor_parallel_region(both)
            both = both.chunk(self.config.num_query_groups, -1)[rank // sharing]
        both = both.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, key = both.split((both.shape[-1] - size, size), -1)
        value, query = key, query.reshape(*query.shape[:2], -1, size)
        if sharing > 1:
            query = query.chunk(sharing, 2)[rank % sharing]
        query = query if self.q_layernorm is None else self.q_layernorm(query)
        return query, key if self.k_layernorm is None else self.k_layernorm(key), value


def _narrower(column, values: int, inputs: int, outputs: int, **kwargs) -> torch.nn.Module:
    """The projection without rows of keys or values."""
    return column(inputs, outputs - values, **kwargs)
