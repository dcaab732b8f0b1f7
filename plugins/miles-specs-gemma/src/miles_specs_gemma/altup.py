"""Gemma 3n, as transformers computes it: layers that predict all streams of a token from each other, compute one of
them, and correct all by what came of it (AltUp: Baykal et al., arXiv:2301.13310), beside what per_layer.py hands up.

What mixes streams every tensor-parallel rank has whole; with sequence parallelism it sees that rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu
from miles_megatron.specs import Attention
from miles_megatron.streams import StreamLayer

from miles_specs_gemma.per_layer import ContextLayer, GatedEmbedding, PerLayerEmbedding, whole

cpu.install()

from megatron.core.parallel_state import get_tensor_model_parallel_world_size  # noqa: E402 - after install()
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402


@dataclass(frozen=True, slots=True)
class Streams:
    """
    Args:
        count: of a token.
        active: which of them layers compute.
        rank: of the shortcut beside attention.
        sparsity: of each layer of the model, the share of the MLP's channels that a Gaussian's quantile switches off.
    """

    count: int
    active: int
    rank: int
    sparsity: tuple[float, ...]


def put_streams(config: TransformerConfig, layer: ModuleSpec, attention: Attention, sparse: bool, modules: Any, *,
                streams: Streams) -> None:
    """A layer that per_layer.reshape has changed becomes an `AltUpLayer`; see ModelSpec.reshape."""
    layer.module = AltUpLayer
    layer.params |= {"altup": streams, "head": lambda config: StreamsHead(config, streams.count)}


class AltUpLayer(ContextLayer, StreamLayer):
    """A layer of several streams, all but the first of which get its token's further embedding.

    Args:
        altup: of the model.
    """

    END = GatedEmbedding

    def __init__(self, config: TransformerConfig, *args: Any, modules: Any, altup: Streams, **kwargs: Any):
        super().__init__(config, *args, modules=modules, **kwargs)
        self.streams, self.active = altup.count, altup.active
        self.altup = AltUp(self.config, altup.count, modules.norm)
        self.laurel = Laurel(self.config, altup.rank, modules.norm)
        if share := altup.sparsity[self.layer_number - 1]:
            self.mlp.activation_func = SparseGeGLU(self.config, share)

    def add(self, hidden_states: torch.Tensor, own: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[t, b, n x H] and [t, b, width] -> [t, b, n x H], of the last layer [t, b, H]."""
        return StreamLayer.forward(self, hidden_states, own=own, **kwargs)[0]

    def mix(self, streams: torch.Tensor, packed_seq_params: Any, **more: Any) -> torch.Tensor:
        """See StreamLayer; `own` of `more` is the further embedding, [t, b, width]."""
        predicted = self.altup.predict(streams, streams[..., self.active, :])
        one = predicted[..., self.active, :]
        corrected = self.altup.correct(predicted, one, self._computed(one, packed_seq_params))
        scaled = corrected[..., self.active, :] * self.altup.output_scale
        first, others = corrected.split((1, self.streams - 1), -2)
        return torch.cat([first, others + self.per_layer_input(scaled, more["own"])[..., None, :]], -2)

    def _computed(self, one: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """[t, b, H] of the active stream -> the same after attention and MLP."""
        normed = self.input_layernorm(one)
        output = self.self_attention(normed, None, packed_seq_params=packed_seq_params)
        attended = self._joined(self.self_attn_bda, output, one)
        attended = (attended + self.laurel(normed)) * 2**-0.5
        output = self.feed(self.pre_mlp_layernorm(attended), packed_seq_params)
        return self._joined(self.mlp_bda, (output, None), attended)

    def _joined(self, addition: torch.nn.Module, output: Any, residual: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = addition(self.training, False)(output, residual, self.hidden_dropout)
        return total


class AltUp(MegatronModule):
    """Coefficients between streams, of what a router makes of one of them.

    They are not clipped, as no engine clips them when it decodes.
    """

    def __init__(self, config: TransformerConfig, streams: int, norm: Callable[..., torch.nn.Module]):
        super().__init__(config)
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.router = whole(config, config.hidden_size, streams)
        self.prediction = whole(config, streams, streams**2)
        self.correction = whole(config, streams, streams)
        scale: Any = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        scale.sequence_parallel = config.sequence_parallel
        self.output_scale = scale

    def predict(self, streams: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """[t, b, n, H] and [t, b, H] -> [t, b, n, H]."""
        shares = self.prediction(self._routed(active)).unflatten(-1, (streams.shape[-2], -1))
        predicted: torch.Tensor = shares @ streams + streams
        return predicted

    def correct(self, predicted: torch.Tensor, active: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """[t, b, n, H], and [t, b, H] of the active stream before and after the layer -> [t, b, n, H]."""
        shares = self.correction(self._routed(computed)) + 1
        corrected: torch.Tensor = predicted + shares[..., None] * (computed - active)[..., None, :]
        return corrected

    def _routed(self, one: torch.Tensor) -> torch.Tensor:
        """[t, b, H] -> [t, b, n]."""
        routed: torch.Tensor = self.router(self.norm(one) * self.config.hidden_size**-1)
        return torch.tanh(routed.float()).type_as(one)


class Laurel(MegatronModule):
    """A shortcut of low rank beside attention: h -> h + norm(right(left(h))) (LAuReL, arXiv:2411.07501)."""

    def __init__(self, config: TransformerConfig, rank: int, norm: Callable[..., torch.nn.Module]):
        super().__init__(config)
        self.left, self.right = whole(config, config.hidden_size, rank), whole(config, rank, config.hidden_size)
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[t, b, H] -> [t, b, H]."""
        total: torch.Tensor = hidden_states + self.norm(self.right(self.left(hidden_states)))
        return total


class SparseGeGLU(MegatronModule):
    """A gated MLP's activation that lets pass what of a token's gates is above a quantile of the Gaussian that has
    their mean and deviation.

    Args:
        share: of the channels below it, were they such.
    """

    def __init__(self, config: TransformerConfig, share: float):
        super().__init__(config)
        self.deviations = NormalDist().inv_cdf(share)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 F] -> [..., F], of this rank's channels."""
        gate, up = x.chunk(2, -1)
        mean = _mean(gate)
        cutoff = mean + self.deviations * _root(_mean((gate - mean).square()))
        return F.gelu(F.relu(gate - cutoff), approximate="tanh") * up


def _mean(channels: torch.Tensor) -> torch.Tensor:
    """[..., F] of this rank -> [..., 1] of the channels of all tensor-parallel ranks, whose gradients add up."""
    part = channels.mean(-1, keepdim=True) / get_tensor_model_parallel_world_size()
    total: torch.Tensor = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(part))
    return total


class StreamsEmbedding(PerLayerEmbedding):
    """Streams of an embedding beside a token's further ones; see ModelSpec.beside_embedding.

    Args:
        streams: how many.
    """

    def __init__(self, config: TransformerConfig, modules: Any, *, vocab: int, width: int, streams: int):
        super().__init__(config, modules, vocab=vocab, width=width)
        self.vocab = vocab
        self.streams = torch.nn.ModuleList(
            whole(config, config.hidden_size, config.hidden_size) for _ in range(streams - 1))

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[b, T] and [t, b, H] -> [t, b, n x H + layers x width]. Words beyond the table have the first's embedding."""
        _, further = super().forward(input_ids.where(input_ids < self.vocab, 0), embedded).split(
            (embedded.shape[-1], self.config.num_layers * self.width), -1)
        streams = (_as_large(projection(embedded), embedded) for projection in self.streams)
        return torch.cat([embedded, *streams, further], -1)


class StreamsHead(MegatronModule):
    """One stream again: [t, b, n, H] -> [t, b, H]."""

    def __init__(self, config: TransformerConfig, streams: int):
        super().__init__(config)
        self.streams = torch.nn.ModuleList(
            whole(config, config.hidden_size, config.hidden_size) for _ in range(streams - 1))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """The mean of the first and of what projections make of the others."""
        first, *others = streams.unbind(-2)
        projected = (_as_large(projection(one), first) for projection, one in zip(self.streams, others, strict=True))
        return torch.stack([first, *projected]).mean(0)


def _as_large(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Rows with the root mean square of others."""
    return rows * _root(like.square().mean(-1, keepdim=True)) / _root(rows.square().mean(-1, keepdim=True), 1e-5)


def _root(squares: torch.Tensor, least: float | None = None) -> torch.Tensor:
    """Of at least so much, so that it has a gradient where rows are zero, as a padding token's are."""
    return squares.clamp(min=torch.finfo(squares.dtype).tiny if least is None else least).sqrt()
