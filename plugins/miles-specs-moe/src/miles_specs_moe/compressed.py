"""The layers of DeepSeek-V4: transformers' own attention and hyper-connections, Megatron's experts behind new routers.

Attention and hyper-connections are a fiftieth of the parameters. Every tensor-parallel rank has them whole; with
sequence parallelism it mixes streams of its own rows and attends with all of them, of which it keeps its own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu
from miles_megatron.packed_layout import packed_layout_of, seen
from miles_megatron.recurrent import Again, by_sequence
from miles_megatron.specs import Attention
from miles_megatron.streams import ConnectedLayer, put_streams

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after install()
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from transformers import AttentionInterface  # noqa: E402
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (  # noqa: E402
    DeepseekV4Attention,
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    DeepseekV4IndexerScorer,
    DeepseekV4RotaryEmbedding,
)

BLOCK = 512
"""Queries that are computed at once, with the keys of their windows and all compressed ones."""


def reshape(config: TransformerConfig, layer: ModuleSpec, attention: Attention, sparse: bool, modules: Any, *,
            hf: Any) -> None:
    """See ModelSpec.reshape."""
    by_table = attention.mixer.by_table  # type: ignore[union-attr]
    put_streams(layer, functools.partial(HyperConnection, hf), functools.partial(HyperHead, hf),
                TableLayer if by_table else ConnectedLayer)
    router = functools.partial(TableRouter, vocab=hf.vocab_size) if by_table else Router
    layer.submodules.mlp.submodules.router = router


def _trained(module: torch.nn.Module, config: TransformerConfig) -> None:
    """A module of transformers' becomes one of the trainer's, whole on every tensor-parallel rank."""
    module.to(config.params_dtype)
    for part in module.modules():
        part.__class__ = _OURS.get(type(part), type(part))
    parameter: Any
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel
        if parameter.dim() > 1 and config.perform_initialization:
            config.init_method(parameter)
        else:  # transformers leaves some of them as memory was
            torch.nn.init.ones_(parameter)


class _Frequencies(DeepseekV4RotaryEmbedding):
    """In fp32 also where a model is cast: rounded, far positions would be others."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return super()._apply(lambda buffer: buffer.to(fn(buffer).device), recurse)


class _Scorer(DeepseekV4IndexerScorer):
    """Products of a block of queries at a time; they choose and do not weigh, so no gradient comes to them."""

    @torch.no_grad()
    def forward(self, q: torch.Tensor, compressed_kv: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, L, heads, size], [B, means, size] and [B, L, H] -> [B, L, means]."""
        blocks = zip(q.split(BLOCK, 1), hidden_states.split(BLOCK, 1), strict=True)
        return torch.cat([super(_Scorer, self).forward(one, compressed_kv, hidden) for one, hidden in blocks], 1)


_OURS: dict[type, Any] = {DeepseekV4RotaryEmbedding: _Frequencies, DeepseekV4IndexerScorer: _Scorer}


class HyperConnection(DeepseekV4HyperConnection):
    """transformers', around a function of one stream."""

    def __init__(self, hf: Any, config: TransformerConfig):
        super().__init__(hf)
        _trained(self, config)

    def forward(self, streams: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[t, b, n, H] -> [t, b, n, H]."""
        spread, mixed, one = super().forward(streams)
        output: torch.Tensor = spread.to(streams.dtype)[..., None] * block(one)[..., None, :]
        return output + mixed.to(streams.dtype).mT @ streams


class HyperHead(DeepseekV4HyperHead):
    """transformers': [t, b, n, H] -> [t, b, H]."""

    def __init__(self, hf: Any, config: TransformerConfig):
        super().__init__(hf)
        _trained(self, config)


class CompressedAttention(DeepseekV4Attention):
    """transformers', of packed sequences each by itself; it takes the place of a layer's `self_attention`.

    Context-parallel ranks each gather all rows and keep the results of their own.

    Args:
        hf: the checkpoint's config.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, cp_comm_type: Any = None,
                 pg_collection: Any = None, *, hf: Any):
        hf = copy.copy(hf)
        hf._attn_implementation = _IN_BLOCKS
        super().__init__(hf, layer_number - 1)
        self.turning = DeepseekV4RotaryEmbedding(hf)
        _trained(self, config)
        if getattr(self.compressor, "indexer", None) is not None:
            self.compressor.indexer.requires_grad_(False)
        # A stretch of padding, which nothing sees, gives a compressor its gradient of 0 where samples are shorter.
        self.shortest = getattr(self.compressor, "compress_rate", 1)
        self.rows_are_cut = config.sequence_parallel
        self.again = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        self.context_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None,
                **_: Any) -> tuple[torch.Tensor, None]:
        """[T, 1, H] (sequence parallel: [T / tensor, 1, H]) -> the same, and no bias.

        Raises:
            ValueError: rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("compressed attention takes packed rows: without their boundaries it would compress keys "
                             "of several sequences into one")
        rows = hidden_states[:, 0]
        if self.rows_are_cut:
            rows = tensor_parallel.gather_from_sequence_parallel_region(rows)
        layout = packed_layout_of(packed_seq_params, rows, self.context_group)
        mixed = by_sequence(rows, layout, self.context_group, self._checkpointed if self.again else self._mix)
        return _own(mixed, self.rows_are_cut)[:, None], None

    def _checkpointed(self, rows: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = tensor_parallel.checkpoint(self._mix, False, rows)
        return mixed

    def _mix(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, L, H] of whole sequences -> the same."""
        length = rows.shape[1]
        rows = F.pad(rows, (0, 0, 0, max(self.shortest - length, 0)))
        positions = torch.arange(rows.shape[1], device=rows.device)
        turning = {self.rope_layer_type: self.turning(rows, positions[None], layer_type=self.rope_layer_type)}
        # A mask of no keys, which becomes that of compressed ones.
        mask = None if self.compressor is None else rows.new_zeros(len(rows), 1, len(positions), 0)
        mixed: torch.Tensor = super().forward(rows, turning, positions[None], mask)[0]
        return mixed[:, :length]


def in_blocks(module: CompressedAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, *, scaling: float, sliding_window: int, s_aux: torch.Tensor,
              **_: Any) -> tuple[torch.Tensor, None]:
    """transformers' protocol of a function of attention, whose keys are values, with sinks.

    Args:
        query: [B, heads, L, size].
        key: [B, 1, L + compressed, size].
        attention_mask: [B, 1, L, compressed] what is added to scores of compressed keys; None where there are none.
    """
    length, outputs = query.shape[2], []
    window, compressed = key[:, 0].split((length, key.shape[2] - length), 1)
    mask = query.new_zeros(1, 1, length, 0) if attention_mask is None else attention_mask
    for first in range(0, length, BLOCK):
        last, begin = min(first + BLOCK, length), max(first - sliding_window + 1, 0)
        positions = torch.arange(first - begin, last - begin, device=query.device)
        before = torch.zeros(len(positions), last - begin, dtype=query.dtype, device=query.device)
        before = before.masked_fill(~seen(positions, last - begin, sliding_window), -torch.inf)
        attend = functools.partial(_attend, scaling, before)
        outputs.append(Again.apply(attend, query[:, :, first:last], window[:, begin:last], compressed,
                                   mask[:, :, first:last], s_aux))
    return torch.cat(outputs, 2).transpose(1, 2), None


def _attend(scaling: float, before: torch.Tensor, query: torch.Tensor, window: torch.Tensor, compressed: torch.Tensor,
            mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """One block: [B, heads, queries, size]."""
    keys = torch.cat([window, compressed], 1)[:, None]
    masks = torch.cat([before.expand(*mask.shape[:2], -1, -1), mask], -1)
    scores = (query @ keys.mT) * scaling + masks
    sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, sinks], -1).softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return shares[..., :-1].to(keys.dtype) @ keys


_IN_BLOCKS = "miles_in_blocks"
AttentionInterface.register(_IN_BLOCKS, in_blocks)


def _own(rows: torch.Tensor, cut: bool) -> torch.Tensor:
    """This tensor-parallel rank's rows of all, with sequence parallelism."""
    ranks = parallel_state.get_tensor_model_parallel_world_size() if cut else 1
    return rows.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()] if ranks > 1 else rows


class Router(TopKRouter):
    """Megatron's, whose scores are roots of softplus; those of a token's experts are made to add up to 1."""

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """[t, b, experts] -> weights [t x b, experts], 0 of those that are not chosen, and which are."""
        scores = F.softplus(logits.flatten(0, 1)).sqrt()
        chosen = self._chosen(scores)
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * (self.config.moe_router_topk_scaling_factor or 1)
        routed = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
        self._apply_expert_bias(routed, None if padding_mask is None else padding_mask.flatten())
        return torch.zeros_like(scores).scatter(1, chosen, weights), routed

    def _chosen(self, scores: torch.Tensor) -> torch.Tensor:
        """Experts [T, topk]."""
        biased = scores + self.expert_bias if self.enable_expert_bias else scores
        chosen: torch.Tensor
        if self.router_replay is None:
            _, chosen = self._best(biased, self.topk)
        else:
            _, chosen = self.router_replay.get_replay_topk(biased, self.topk, None, None, self._best)
        return chosen

    def _best(self, scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [T, topk] and experts [T, topk] of a free choice."""
        return scores.topk(topk, -1)


class TableRouter(Router):
    """A table from the id of a token chooses; scores weigh.

    Args:
        vocab: rows of the table.
    """

    def __init__(self, config: TransformerConfig, *args: Any, vocab: int, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        del self.expert_bias, self.local_tokens_per_expert  # Megatron moves every bias that is there
        self.enable_expert_bias = False
        self.tokens: torch.Tensor | None = None
        self.register_buffer("table", torch.arange(self.topk).repeat(vocab, 1))

    def _best(self, scores: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = self.table[self.tokens]
        return scores.gather(1, chosen), chosen


class TableLayer(ConnectedLayer):
    """Hands a TableRouter the tokens of its rows, also where the experts are computed again."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.again, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False

    def feed(self, normed: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """See StreamLayer."""
        tokens = _own(packed_seq_params.tokens.flatten(), self.config.sequence_parallel)

        def experts(normed: torch.Tensor) -> torch.Tensor:
            self.mlp.router.tokens = tokens
            return super(TableLayer, self).feed(normed, packed_seq_params)

        if self.again and self.training:
            output: torch.Tensor = tensor_parallel.checkpoint(experts, False, normed)
            return output
        return experts(normed)
