"""The two token mixers: the gated delta net, over packed rows and under every layout of the trainer, and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu
from miles_megatron.packed_layout import packed_layout_of
from miles_megatron.recurrent import Again, by_sequence, causal_convolution, sharded_entries

from miles_core.errors import ConfigError
from miles_specs_qwen3next.delta import gated_delta_rule, gated_norm

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region  # noqa: E402
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402

_CUT = ("conv_weight", "A_log", "dt_bias")
"""Parameters of which a tensor-parallel rank has those of its heads."""


class GatedAttention(SelfAttention):
    """Megatron's, whose config asks for gates of the output; Megatron compiles the product with them."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """[T, 1, heads x size] twice, the gate in any shape of it."""
        return Again.apply(_gated, x, gate.reshape(x.shape))


def _gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x * gate.float().sigmoid()).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Projections, a short causal convolution over queries, keys and values, the gated delta rule, a gated norm.

    Heads are cut among tensor-parallel ranks. Sequences are computed apart, in the buckets of the attention's layout:
    neither state nor convolution goes from one to the next. Context-parallel ranks each gather all rows of their
    heads and keep the results of their own, which repeats work but changes no result.

    Args:
        column, row: linear layers cut along their outputs and along their inputs (module_specs.LayerModules).
        stacked: the projections' rows are all queries, then all keys, values, gates; otherwise key head by key head.

    Raises:
        ConfigError: key heads that do not divide among tensor-parallel ranks.
    """

    by_channel = False
    activation: Callable[[torch.Tensor], torch.Tensor] = staticmethod(F.silu)

    def __init__(self, config: TransformerConfig, layer_number: int, cp_comm_type: Any = None,
                 pg_collection: Any = None, *, column: type, row: type, stacked: bool = False,
                 **_: Any):  # fmt: skip
        super().__init__(config)
        self.layer_number, self.stacked = layer_number, stacked
        self.tensor_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        self.context_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        ranks = self.tensor_group.size()
        if config.linear_num_key_heads % ranks:
            raise ConfigError("the key heads of linear attention do not divide by the tensor-parallel size",
                              code="linear-attention-heads-not-divisible",
                              got=f"{config.linear_num_key_heads} / {ranks}", who="linear_num_key_heads",
                              fix="choose a tensor-parallel size that divides them")
        self.key_heads, self.heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        self.key_size, self.size = config.linear_key_head_dim, config.linear_value_head_dim
        key, value = (config.linear_num_key_heads * self.key_size, config.linear_num_value_heads * self.size)
        self.sections = (key // ranks, key // ranks, value // ranks)
        fading = config.linear_num_value_heads * (self.key_size if self.by_channel else 1)
        self.fading = fading // ranks

        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tensor_group}
        inward = {**linear, "init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        self.in_proj_qkvz = build_module(column, config.hidden_size, 2 * key + 2 * value, tp_comm_buffer_name="fc1",
                                         **inward)
        self.in_proj_ba = build_module(column, config.hidden_size, config.linear_num_value_heads + fading,
                                       tp_comm_buffer_name="fc1", **inward)
        self.out_proj = build_module(row, value, config.hidden_size, init_method=config.output_layer_init_method,
                                     input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="fc2", **linear)

        width, dtype = config.linear_conv_kernel_dim, config.params_dtype
        drawn = torch.empty(2 * key + value, 1, width).uniform_(-(width**-0.5), width**-0.5)
        mine = [part.chunk(ranks)[self.tensor_group.rank()] for part in drawn.split((key, key, value))]
        decays = torch.empty(config.linear_num_value_heads).uniform_(0.01, 16).log()
        self.conv_weight = torch.nn.Parameter(torch.cat(mine).to(dtype))
        self.A_log = torch.nn.Parameter(decays.chunk(ranks)[self.tensor_group.rank()].to(dtype, copy=True))
        self.dt_bias = torch.nn.Parameter(torch.ones(self.fading, dtype=dtype))
        self.norm_weight = torch.nn.Parameter(torch.ones(self.size, dtype=dtype))
        for name in _CUT:
            set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None,
                **_: Any) -> Any:
        """[T, 1, H] (sequence parallel: [T / tensor, 1, H]) -> the same, and no bias.

        Raises:
            ValueError: rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("a gated delta net takes packed rows: without their boundaries its state would go from "
                             "one sequence to the next")
        qkvz, ba = (layer(hidden_states)[0][:, 0] for layer in (self.in_proj_qkvz, self.in_proj_ba))
        if self.stacked:
            qkv, gate = qkvz.split((sum(self.sections), self.sections[-1]), 1)
            rows = torch.cat([qkv, ba], 1)
        else:
            each = self.heads // self.key_heads  # value heads that a key head serves
            q, k, v, gate = qkvz.unflatten(1, (self.key_heads, -1)).split(
                (self.key_size, self.key_size, each * self.size, each * self.size), 2)
            b, a = ba.unflatten(1, (self.key_heads, -1)).split((each, each), 2)
            rows = torch.cat([x.flatten(1) for x in (q, k, v, b, a)], 1)
        layout = packed_layout_of(packed_seq_params, rows, self.context_group)
        mixed = by_sequence(rows, layout, self.context_group, lambda each: Again.apply(
            self._mix, each, self.conv_weight, self.A_log, self.dt_bias))
        # A rank's heads give a part of the gradient of the norm that all heads share; this sums them.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, self.tensor_group)
        gate = gate.reshape(len(rows), self.heads, self.size)
        normed = Again.apply(self._norm, mixed.view_as(gate), gate, weight)
        return self.out_proj(normed.flatten(1)[:, None])

    def _norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gated_norm(x, gate, weight, self.config.layernorm_epsilon, self.activation)

    def _mix(self, rows: torch.Tensor, conv_weight: torch.Tensor, decay: torch.Tensor,
             bias: torch.Tensor) -> torch.Tensor:
        """[B, L, q | k | v | b | a] -> [B, L, heads x size]."""
        qkv, b, a = rows.split((sum(self.sections), self.heads, self.fading), -1)
        q, k, v = causal_convolution(qkv, conv_weight).split(self.sections, -1)
        g = self._decays(decay.float().exp(), a.float() + bias)
        q, k = (x.unflatten(-1, (self.key_heads, self.key_size)) for x in (q, k))
        return gated_delta_rule(q, k, v.unflatten(-1, (self.heads, self.size)), g, b.sigmoid()).flatten(2)

    def _decays(self, rate: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """rate [heads], step [B, L, ...] -> logarithms of the decays."""
        return -rate * F.softplus(step)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (),
                           metadata: Any = None, tp_group: Any = None) -> dict[str, Any]:
        """See miles_megatron.recurrent.sharded_entries."""
        joined: dict[str, tuple[str, tuple[int, ...]]] = {"conv_weight": ("qkv", self.sections)}
        if self.stacked:
            joined |= {"in_proj_qkvz.weight": ("qkvz", (*self.sections, self.sections[-1])),
                       "in_proj_ba.weight": ("ba", (self.heads, self.fading))}
        return sharded_entries(self, prefix, sharded_offsets, metadata, _CUT, joined)


class ChannelDeltaNet(GatedDeltaNet):
    """Kimi Delta Attention (arXiv:2510.26692) as Ling 3.0 has it: each channel of a key decays by itself.

    Args:
        floor: logarithm of the fastest decay, which is between that and 0; None for decays without one.
    """

    by_channel = True
    activation = staticmethod(torch.sigmoid)

    def __init__(self, *args: Any, floor: float | None, **kwargs: Any):
        super().__init__(*args, stacked=True, **kwargs)
        self.floor = floor

    def _decays(self, rate: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        step, rate = step.unflatten(-1, (self.heads, self.key_size)), rate[:, None]
        return super()._decays(rate, step) if self.floor is None else self.floor * torch.sigmoid(rate * step)
