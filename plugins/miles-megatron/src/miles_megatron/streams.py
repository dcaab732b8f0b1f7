"""A residual of several streams (hyper-connections: Zhu et al., arXiv:2409.19606) instead of Megatron's one.

The streams of a token lie side by side in its hidden states, [t, b, streams x H]. Megatron's block, recomputation and
pipelines hand these on as they are: a stage sends the shape first. What the first layer sees is made of the embedding,
and the last layer makes one stream of them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from miles_megatron import cpu

cpu.install()

from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402 - after install()
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402
from megatron.core.utils import make_viewless_tensor  # noqa: E402


class Copies(torch.nn.Module):
    """As many streams as wanted of one; see ModelSpec.beside_embedding."""

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[t, b, H] -> [t, b, streams x H]."""
        return embedded.repeat(1, 1, self.streams)


def put_streams(layer: ModuleSpec, connection: Callable[[TransformerConfig], torch.nn.Module],
                head: Callable[[TransformerConfig], torch.nn.Module],
                kind: type[ConnectedLayer] | None = None) -> None:
    """A layer gets a residual of several streams; for ModelSpec.reshape.

    Args:
        connection: makes a module that is called with streams [t, b, n, H] and a function of [t, b, H], attention or
            MLP, and gives streams again.
        head: see StreamLayer.
        kind: of the layer.
    """
    layer.module, layer.params = kind or ConnectedLayer, {"connection": connection, "head": head}


class StreamLayer(TransformerLayer):
    """Megatron's, with streams in the place of one residual; what becomes of them in it is a subclass's.

    Args:
        head: makes a module that the last layer of the model ends with: [t, b, n, H] -> [t, b, H].
    """

    def __init__(self, *args: Any, head: Callable[[TransformerConfig], torch.nn.Module], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.streams_head = head(self.config) if self.layer_number == self.config.num_layers else None

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor | None = None, *,
                packed_seq_params: Any = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, b, n x H] -> the same, [t, b, H] of the last layer; and the context as it is."""
        streams = self.mix(hidden_states.unflatten(-1, (-1, self.config.hidden_size)), packed_seq_params, **more)
        rows = streams.flatten(2) if self.streams_head is None else self.streams_head(streams)
        # Pipelines free what they have sent, which a view would keep.
        return make_viewless_tensor(rows, requires_grad=rows.requires_grad, keep_graph=True), context

    def mix(self, streams: torch.Tensor, packed_seq_params: Any, **more: Any) -> torch.Tensor:
        """[t, b, n, H] -> the same.

        Args:
            more: what else the layer was called with.
        """
        raise NotImplementedError

    def feed(self, normed: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """The MLP: [t, b, H] -> [t, b, H]."""
        output: torch.Tensor = self.mlp(normed, padding_mask=getattr(packed_seq_params, "padding", None))[0]
        return output


class ConnectedLayer(StreamLayer):
    """With a connection around attention and one around the MLP in the place of Megatron's additions.

    Args:
        connection: see put_streams.
    """

    def __init__(self, *args: Any, connection: Callable[[TransformerConfig], torch.nn.Module], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.attention_streams, self.mlp_streams = connection(self.config), connection(self.config)

    def mix(self, streams: torch.Tensor, packed_seq_params: Any, **more: Any) -> torch.Tensor:
        """See StreamLayer."""
        streams = self.attention_streams(streams, lambda one: self.self_attention(
            self.input_layernorm(one), packed_seq_params=packed_seq_params)[0])
        mixed: torch.Tensor = self.mlp_streams(
            streams, lambda one: self.feed(self.pre_mlp_layernorm(one), packed_seq_params))
        return mixed
