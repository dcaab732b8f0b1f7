"""Gemma 4 E2B and E4B, and Gemma 3n: further embeddings of the tokens, one for each layer, and layers that attend to
the keys and values of lower ones.

Both are handed up from layer to layer in the argument of Megatron's layers for what decoders attend to, `context`,
which recomputation keeps and differentiates. Its rows are this rank's, [t, b, channels]: the embeddings for the layers
that follow, then keys and values of those that lend theirs. From stage to stage it lies behind the hidden states.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu
from miles_megatron.specs import Attention

cpu.install()

from megatron.core.tensor_parallel import VocabParallelEmbedding  # noqa: E402 - after install()
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402


def reshape(config: TransformerConfig, layer: ModuleSpec, attention: Attention, sparse: bool, modules: Any, *,
            width: int, lenders: tuple[Attention, ...], widening: int) -> None:
    """A layer becomes a `ContextLayer`; see ModelSpec.reshape.

    Args:
        width: channels of a layer's further embedding.
        lenders: of the layers that lend keys and values, in their order.
        widening: by how much the MLP of a layer that borrows is wider.
    """
    layer.module = ContextLayer
    layer.params = {"modules": modules, "width": width, "lenders": lenders,
                    "widening": widening if attention.borrows else 1}


class GatedEmbedding(MegatronModule):
    """A token's further embedding, gated by what a layer gives: h -> norm(up(gelu(down(h)) * e))."""

    def __init__(self, config: TransformerConfig, width: int, modules: Any):
        super().__init__(config)
        self.gate = whole(config, config.hidden_size, width)
        self.projection = whole(config, width, config.hidden_size)
        self.norm = modules.norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[t, b, H] and [t, b, width] -> [t, b, H]."""
        gated = F.gelu(self.gate(hidden_states), approximate="tanh") * own
        normed: torch.Tensor = self.norm(self.projection(gated))
        return normed


class PerLayerInput(GatedEmbedding):
    """A layer's end: its token's further embedding joins what it gives; then the layer's number multiplies the sum."""

    def __init__(self, config: TransformerConfig, width: int, modules: Any):
        super().__init__(config, width, modules)
        self.register_buffer("scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, hidden_states: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """As GatedEmbedding."""
        total: torch.Tensor = (hidden_states + super().forward(hidden_states, own)) * self.scalar
        return total


class ContextLayer(TransformerLayer):
    """Megatron's, which takes its part of `context`, or adds to it.

    Args:
        modules, width, lenders, widening: as of `reshape`, the last of this layer.
    """

    END: type[GatedEmbedding] = PerLayerInput
    streams = 1
    """Of H channels each, in the hidden states."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int = 1, *args: Any, modules: Any,
                 width: int, lenders: tuple[Attention, ...], widening: int, vp_stage: int | None = None, **kwargs: Any):
        config = copy.copy(config)
        config.ffn_hidden_size *= widening
        super().__init__(config, submodules, layer_number, *args, vp_stage=vp_stage, **kwargs)
        self.width, self.lenders = width, lenders
        self.last = layer_number == get_num_layers_to_build(config, vp_stage=vp_stage)
        self.per_layer_input = self.END(config, width, modules)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor | None = None, **kwargs: Any
                ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, b, H] and [t, b, channels] of `context` -> the same; of the first and the last of a stage, together."""
        if context is None:
            hidden_states, context = _split(hidden_states, self.streams * self.config.hidden_size)
            hidden_states = hidden_states.contiguous()
        own, context = _split(context, self.width)
        mixer: Any = self.self_attention
        if mixer.attention.borrows:
            mixer.lent = self._borrowed(context)
        hidden_states = self.add(hidden_states, own, **kwargs)
        lent, mixer.lent = mixer.lent, None
        if mixer.attention.lends:
            rows = (x.flatten(2).unflatten(0, (len(context), -1)).transpose(1, 2).flatten(2) for x in lent)
            context = torch.cat([context, *rows], -1)
        if self.last and self.layer_number < self.config.num_layers:
            hidden_states = torch.cat([hidden_states, context], -1)
        return hidden_states, None if self.last else context

    def add(self, hidden_states: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """What the layer does: [t, b, H] and [t, b, width] -> [t, b, H]."""
        total: torch.Tensor = self.per_layer_input(super().forward(hidden_states, **kwargs)[0], own)
        return total

    def _borrowed(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the layer that lends to this one, [T, b, groups, d], of this rank's heads."""
        config, attention = self.config, self.self_attention.attention
        times = config.tensor_model_parallel_size if config.sequence_parallel else 1  # rows of keys to one of context
        shapes = [(times, max(one.groups // config.tensor_model_parallel_size, 1), one.head_dim)
                  for one in self.lenders]
        first = self.lenders.index(replace(attention, lends=True, borrows=False))
        sizes = [2 * times * groups * size for times, groups, size in shapes]
        behind = context.shape[-1] - sum(sizes[first:])
        both = context[..., behind:behind + sizes[first]].chunk(2, -1)
        # Whole rows side by side, as kernels want them.
        key, value = (x.unflatten(2, shapes[first]).transpose(1, 2).flatten(0, 1).contiguous() for x in both)
        return key, value


class PerLayerEmbedding(MegatronModule):
    """The further embeddings of tokens, and what a projection makes of the first; see ModelSpec.beside_embedding.

    Args:
        vocab: rows of the table, which is cut among tensor-parallel ranks.
        width: channels of one of `config.num_layers` embeddings.
    """

    def __init__(self, config: TransformerConfig, modules: Any, *, vocab: int, width: int):
        super().__init__(config)
        self.width, channels = width, config.num_layers * width
        self.tokens = VocabParallelEmbedding(vocab, channels, init_method=config.embedding_init_method, config=config,
                                             reduce_scatter_embeddings=config.sequence_parallel)
        self.projection = whole(config, config.hidden_size, channels)
        self.norm = modules.norm(config, width, config.layernorm_epsilon)

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[b, T] and [t, b, H] -> [t, b, H + layers x width]."""
        tokens = self.tokens(input_ids) * self.width**0.5
        tokens = tokens if self.config.sequence_parallel else tokens.transpose(0, 1)
        projected = self.projection(embedded) * self.config.hidden_size**-0.5
        projected = self.norm(projected.unflatten(-1, (-1, self.width))).flatten(-2)
        return torch.cat([embedded, (projected + tokens) * 2**-0.5], -1)


def whole(config: TransformerConfig, inputs: int, outputs: int) -> torch.nn.Linear:
    """A projection that every tensor-parallel rank has whole; with sequence parallelism it sees that rank's rows."""
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=config.params_dtype)
    weight: Any = linear.weight  # Megatron reads attributes of it
    weight.sequence_parallel = config.sequence_parallel
    return linear


def _split(rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many channels, and those behind."""
    one, other = rows.split((first, rows.shape[-1] - first), -1)
    return one, other
