"""The layers on Megatron-core's own module, and the loss that trains them and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from miles_megatron import cpu
from miles_megatron.logprob import token_log_probs
from miles_megatron.model import LanguageModel, layer_spec, router_padding, routers_learn
from miles_megatron.module_specs import modules_of
from miles_megatron.packed_layout import packed_rows
from miles_megatron.specs import ModelSpec

from miles_core.columns import Packed, split
from miles_core.errors import ConfigError

cpu.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402 - after install()
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding  # noqa: E402
from megatron.core.transformer import ModuleSpec  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.utils import make_viewless_tensor  # noqa: E402


class EmbeddingFirst(MultiTokenPredictionLayer):
    """Megatron's layer: its projection takes [norm(embedding of the next token), norm(hidden state)]."""

    def _get_embeddings(self, input_ids: torch.Tensor, position_ids: torch.Tensor, embedding: Callable[..., Any],
                        hidden_states: torch.Tensor, packed_seq_params: Any = None) -> tuple[torch.Tensor, ...]:
        """Megatron rolls the tokens by one from layer to layer; here they are given as this layer sees them."""
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        return input_ids, position_ids, embedding(input_ids=input_ids, position_ids=position_ids), hidden_states

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
        ConfigError: the model's last layer has no attention, or no MLP.
    """

    def __init__(self, chunk: LanguageModel, spec: ModelSpec, hidden_first: bool, seed: int):
        config, modules = chunk.config, modules_of(chunk.config)
        last = layer_spec(config, spec, chunk.vp_stage).layer_specs[-1]
        if spec.lone or "attn_mask_type" not in last.submodules.self_attention.params:
            raise ConfigError("multi-token-prediction layers copy the model's last layer, which lacks attention or MLP",
                              code="mtp-last-layer-without-attention", who=f"plugin mtp, {spec.source}",
                              fix="run without the plugin")
        layer = ModuleSpec(
            module=HiddenFirst if hidden_first else EmbeddingFirst,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=modules.norm, hnorm=modules.norm, eh_proj=modules.column, layer_norm=modules.norm,
                transformer_layer=last,
            ),
        )  # fmt: skip
        # The model itself is drawn as it is without them, or not at all: a checkpoint has it, and need not have these.
        with torch.random.fork_rng(devices=[]), _drawn(config):
            torch.default_generator.manual_seed(seed)
            super().__init__(config, MultiTokenPredictionBlockSubmodules([layer] * config.mtp_num_layers),
                             chunk.vp_stage)
        for layer in self.layers:  # Megatron's has no argument for it
            layer.transformer_layer.register_forward_pre_hook(_with_padding, with_kwargs=True)
        self.softcap, self.vocab_size = spec.logit_softcap, spec.vocab_size
        self._chunk = (chunk,)  # in a tuple: not a part of this module
        self._copy: tuple[LanguageModelEmbedding, ...] = ()

    @property
    def chunk(self) -> LanguageModel:
        """The model that they belong to."""
        return self._chunk[0]


    @property
    def embedding(self) -> LanguageModelEmbedding:
        """The model's; where it is on another stage its copy."""
        return self.chunk.embedding if self.chunk.pre_process else self._copy[0]

    def receive_embedding(self, group: dist.ProcessGroup) -> None:
        """Take part in the broadcast of `embedding_on_last_stage`."""
        config = self.config
        with torch.random.fork_rng(devices=[]):
            copy = LanguageModelEmbedding(config, self.vocab_size, 1, position_embedding_type="none")
        copy.to(cpu.device(), self.chunk.output_weight.dtype).requires_grad_(False)
        dist.broadcast(copy.word_embeddings.weight, group=group, group_src=0)
        self._copy = (copy,)

    def drop_embedding(self) -> None:
        """The inverse."""
        self._copy = ()


@contextmanager
def _drawn(config: Any) -> Iterator[None]:
    """Weights that are made inside have numbers, whatever --no-initialization says of the others."""
    before, config.perform_initialization = config.perform_initialization, True
    try:
        yield
    finally:
        config.perform_initialization = before


def _with_padding(_layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return args, {**kwargs, "padding_mask": kwargs["packed_seq_params"].padding}


class OverRanks(torch.autograd.Function):
    """Sum over ranks; each entry goes into one rank's loss, so its gradient is the sum of all."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def token_losses(predictors: Predictors, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
    """Minus the log-probabilities of a micro-batch's N trained tokens, by layers that see what lies before them.

    Layer d = 1, 2, ... at position p knows the tokens up to p + d and predicts the next one (DeepSeek-V3,
    arXiv:2412.19437, section 2.2). A token that has no such position before it in its own sequence counts as 0.

    Under context parallelism that position may be another rank's, so each rank predicts from the positions that it
    has, and one sum over the ranks brings every token's loss to the rank that trains on it.

    Args:
        hidden: [T, 1, H] (sequence parallel: [T / tensor, 1, H]) of the model after its final norm, without gradient;
            embedding and output layer get none either.
        packed: the micro-batch's columns, this rank's rows.

    Returns:
        [N] means over the layers, with gradient to their parameters alone.
    """
    chunk, device = predictors.chunk, hidden.device
    weight, group = chunk.output_weight.detach(), parallel_state.get_context_parallel_group()
    rows = _WholeRows(packed, group)
    hidden = hidden.to(weight.dtype)
    total = torch.zeros(len(rows.tokens), dtype=torch.float32, device=device)
    padding = _padding(rows, packed, len(predictors.layers)) if routers_learn(chunk.config) else None
    seen = packed_rows(rows.boundaries, padding=router_padding(chunk.config, padding))
    trained = np.flatnonzero(rows.mask)
    first = rows.boundaries[np.searchsorted(rows.boundaries, trained, side="right") - 1]
    for depth, layer in enumerate(predictors.layers, 1):
        ahead = rows.tokens[np.minimum(rows.mine + depth, len(rows.tokens) - 1)]
        tokens = torch.from_numpy(ahead).to(device, torch.int64)[None]
        hidden, _, _ = layer(
            input_ids=tokens, position_ids=tokens, hidden_states=hidden, attention_mask=None,
            packed_seq_params=seen, embedding=functools.partial(_embedded, predictors),
        )  # fmt: skip
        here = rows.local[np.maximum(trained - depth, 0)]
        counts = (trained - depth >= first) & (here >= 0)
        counts[:1] |= not counts.any()  # every rank takes part in every sum, also one that predicts nothing
        at, of = here[counts], trained[counts]
        index, place, targets, real = (torch.from_numpy(x).to(device) for x in (
            np.maximum(at, 0), of, rows.tokens[(of + 1) % len(rows.tokens)].astype(np.int64),
            ((of - depth >= first[counts]) & (at >= 0)).astype(np.float32)))
        log_probs, _ = token_log_probs(_whole(hidden, chunk)[:, 0].index_select(0, index), weight, targets,
                                   softcap=predictors.softcap, group=parallel_state.get_tensor_model_parallel_group())
        total = total.index_add(0, place, -log_probs * real)
    if group.size() > 1:
        total = OverRanks.apply(total, group)
    own = rows.mine[np.flatnonzero(packed.rows["loss_mask"])]
    return total[torch.from_numpy(own).to(device)] / len(predictors.layers)


class _WholeRows:
    """A micro-batch's rows as they are before they are cut among context-parallel ranks.

    Args:
        packed: this rank's rows.
        group: the context-parallel ranks.

    Attributes:
        boundaries: [n+1] where each sample's rows begin.
        mine: [T] which rows these are of them all; local: the inverse, -1 for another rank's.
        tokens, mask: of all rows.
    """

    def __init__(self, packed: Packed, group: dist.ProcessGroup):
        size, tokens = group.size(), packed.rows["tokens"]
        self.boundaries = packed.cu_seqlens.astype(np.int64) * size
        everything = Packed(self.boundaries, packed.lengths, {"place": np.arange(len(tokens) * size)}, {})
        self.mine = split(everything, group.rank(), size).rows["place"]
        self.local = np.full(len(tokens) * size, -1)
        self.local[self.mine] = np.arange(len(tokens))
        both = torch.zeros(2, len(self.local), dtype=torch.int64)
        both[:, self.mine] = torch.from_numpy(np.stack([tokens, packed.rows["loss_mask"] > 0]).astype(np.int64))
        if size > 1:
            both = both.to(cpu.device())
            dist.all_reduce(both, group=group)
        self.tokens, self.mask = both.cpu().numpy()


def _padding(rows: _WholeRows, packed: Packed, layers: int) -> torch.Tensor:
    """[T] padding of this rank's rows, and the last tokens of a sample, which see what lies behind it: both are no
    business of routers."""
    owner = np.searchsorted(rows.boundaries, rows.mine, side="right") - 1
    behind = rows.mine + layers >= rows.boundaries[owner] + np.array([*packed.lengths, 0])[owner]
    return torch.from_numpy(packed.rows["padding"] | behind).to(cpu.device())


@torch.no_grad()
def _embedded(predictors: Predictors, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """What the model's own layers get for these tokens."""
    embedded = predictors.embedding(input_ids=input_ids, position_ids=position_ids)
    return embedded * torch.tensor(predictors.chunk.embedding_scale, dtype=embedded.dtype, device=embedded.device)


@contextmanager
def embedding_on_last_stage(chunks: Sequence[LanguageModel], predictors: Predictors | None) -> Iterator[None]:
    """Inside, the layers have a copy of the embedding, which is on the first pipeline stage; every rank calls it.

    The copy has no gradient, so it is none of the model's parameters, and of one step.
    """
    group = parallel_state.get_embedding_group(check_initialized=False)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and group and (
            dist.get_rank() in dist.get_process_group_ranks(group)):
        if predictors is None:
            source = chunks[0].embedding.word_embeddings
            for hook in source._forward_pre_hooks.values():  # DDP may still be gathering its weight
                hook(source, ())
            dist.broadcast(source.weight.detach(), group=group, group_src=0)
        else:
            predictors.receive_embedding(group)
    try:
        yield
    finally:
        if predictors is not None:
            predictors.drop_embedding()


def _whole(hidden: torch.Tensor, chunk: LanguageModel) -> torch.Tensor:
    """All rows on every tensor-parallel rank, which backward gives a share of the gradient."""
    if chunk.config.sequence_parallel:
        return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
