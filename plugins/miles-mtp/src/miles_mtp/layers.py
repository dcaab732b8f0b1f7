"""The layers on Megatron-core's own module, and the loss that trains them and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from miles_megatron import cpu
from miles_megatron.logprob import token_log_probs
from miles_megatron.model import LanguageModel, layer_spec
from miles_megatron.module_specs import modules_of
from miles_megatron.packed_layout import packed_rows
from miles_megatron.specs import ModelSpec

from miles_core.columns import Packed
from miles_core.errors import ConfigError

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after install()
from megatron.core.transformer import ModuleSpec  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)


class EmbeddingFirst(MultiTokenPredictionLayer):
    """Megatron's layer: its projection takes [norm(embedding of the next token), norm(hidden state)]."""

    def _checkpointed_forward(self, forward_func: Callable[..., Any], *, hidden_states: torch.Tensor,
                              packed_seq_params: Any, sequence_len_offset: Any, **kwargs: Any) -> Any:
        # Megatron hands everything to an autograd function by position, as if the packing were a tensor; and what has
        # no input with a gradient would be recomputed for none.
        forward_func = functools.partial(forward_func, packed_seq_params=packed_seq_params)
        if not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return super()._checkpointed_forward(forward_func, hidden_states=hidden_states, **kwargs)


class HiddenFirst(EmbeddingFirst):
    """The projection takes [norm(hidden state), norm(embedding)]; `enorm` then is the norm of the hidden state."""

    def _concat_embeddings(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
        return super()._concat_embeddings(decoder_input, hidden_states)


class Predictors(MultiTokenPredictionBlock):
    """`config.mtp_num_layers` layers, made like the model's last one and drawn by the seed.

    Args:
        chunk: the model that they belong to.
        hidden_first: what the projection takes first.

    Raises:
        ConfigError: the model's last layer has no attention.
    """

    def __init__(self, chunk: LanguageModel, spec: ModelSpec, hidden_first: bool, seed: int):
        config, modules = chunk.config, modules_of(chunk.config)
        last = layer_spec(config, spec, chunk.vp_stage).layer_specs[-1]
        if "attn_mask_type" not in last.submodules.self_attention.params:
            raise ConfigError("multi-token-prediction layers copy the model's last layer, which has no attention",
                              code="mtp-last-layer-without-attention", who=f"plugin mtp, {spec.source}",
                              fix="run without the plugin")
        layer = ModuleSpec(
            module=HiddenFirst if hidden_first else EmbeddingFirst,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=modules.norm, hnorm=modules.norm, eh_proj=modules.column, layer_norm=modules.norm,
                transformer_layer=last,
            ),
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):  # the model itself is drawn as it is without them
            torch.default_generator.manual_seed(seed)
            super().__init__(config, MultiTokenPredictionBlockSubmodules([layer] * config.mtp_num_layers))
        self.softcap = spec.logit_softcap
        self._chunk = (chunk,)  # in a tuple: not a part of this module

    @property
    def chunk(self) -> LanguageModel:
        """The model that they belong to."""
        return self._chunk[0]


def token_losses(predictors: Predictors, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Minus the log-probabilities of a micro-batch's N trained tokens, by layers that see what lies before them.

    Layer d = 1, 2, ... at position p knows the tokens up to p + d and predicts the next one (DeepSeek-V3,
    arXiv:2412.19437, section 2.2). A token that has no such position before it in its own sequence counts as 0.

    Args:
        hidden: [T, 1, H] (sequence parallel: [T / tensor, 1, H]) of the model after its final norm, without gradient;
            embedding and output layer get none either.
        packed: the micro-batch's columns, whole sequences.

    Returns:
        [N] means over the layers, with gradient to their parameters alone.
    """
    chunk, device = predictors.chunk, hidden.device
    rows, weight = packed_rows(packed.cu_seqlens), chunk.output_weight.detach()
    trained = np.flatnonzero(packed.rows["loss_mask"])
    first = packed.cu_seqlens[np.searchsorted(packed.cu_seqlens, trained, side="right") - 1]
    index, begin, targets = (torch.from_numpy(np.asarray(x, np.int64)).to(device)
                             for x in (trained, first, packed.rows["targets"][trained]))
    tokens = positions = torch.from_numpy(packed.rows["tokens"]).to(device, torch.int64)[None]
    hidden = hidden.to(weight.dtype)
    total: Any = 0.0  # a tensor from the first layer on
    for depth, layer in enumerate(predictors.layers, 1):
        hidden, tokens, positions = layer(
            input_ids=tokens, position_ids=positions, hidden_states=hidden, attention_mask=None,
            packed_seq_params=rows, embedding=functools.partial(_embedded, chunk),
        )  # fmt: skip
        at = index - depth
        inside = at >= begin
        log_probs, _ = token_log_probs(_whole(hidden, chunk)[:, 0].index_select(0, at.clamp(min=0)), weight, targets,
                                   softcap=predictors.softcap, group=parallel_state.get_tensor_model_parallel_group())
        total = total - torch.where(inside, log_probs, torch.zeros_like(log_probs))
    return total / len(predictors.layers)


@torch.no_grad()
def _embedded(chunk: LanguageModel, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """What the model's own layers get for these tokens."""
    embedded = chunk.embedding(input_ids=input_ids, position_ids=position_ids)
    return embedded * torch.tensor(chunk.embedding_scale, dtype=embedded.dtype, device=embedded.device)


def _whole(hidden: torch.Tensor, chunk: LanguageModel) -> torch.Tensor:
    """All rows on every tensor-parallel rank, which backward gives a share of the gradient."""
    if chunk.config.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
