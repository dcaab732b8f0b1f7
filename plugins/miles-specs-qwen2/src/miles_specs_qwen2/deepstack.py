"""What a vision tower has for the first layers of a decoder, and not for its embedding alone (DeepStack,
arXiv:2406.04334).

Rows of the embedding are as much wider as there are layers with such features. Those are handed up from layer to layer
in the argument of Megatron's layers for what decoders attend to, `context` [t, b, layers x H], which recomputation
keeps and differentiates; from stage to stage they lie behind the hidden states. Rows of texts are as wide as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from miles_megatron import cpu
from miles_megatron.specs import Attention

cpu.install()

from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402 - after install()
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402


def reshape(config: TransformerConfig, layer: ModuleSpec, attention: Attention, sparse: bool, modules: Any) -> None:
    """A layer becomes a `DeepstackLayer`; see ModelSpec.reshape."""
    layer.module = DeepstackLayer


class DeepstackLayer(TransformerLayer):
    """Megatron's, to whose output the next features of `context` are added, while there are any."""

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int = 1, *args: Any,
                 vp_stage: int | None = None, **kwargs: Any):
        super().__init__(config, submodules, layer_number, *args, vp_stage=vp_stage, **kwargs)
        self.last = layer_number == get_num_layers_to_build(config, vp_stage=vp_stage)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor | None = None, **kwargs: Any
                ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, b, H] and [t, b, channels] of `context` -> the same; of the first and the last of a stage, together."""
        size = self.config.hidden_size
        if context is None:
            hidden_states, context = hidden_states[..., :size].contiguous(), hidden_states[..., size:]
        hidden_states, _ = super().forward(hidden_states, **kwargs)
        if context.shape[-1]:
            hidden_states, context = hidden_states + context[..., :size], context[..., size:]
        if self.last and self.layer_number < self.config.num_layers:
            hidden_states = torch.cat([hidden_states, context], -1)
        return hidden_states, None if self.last else context
