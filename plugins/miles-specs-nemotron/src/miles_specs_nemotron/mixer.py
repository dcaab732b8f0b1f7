"""The Mamba-2 mixer over packed rows, under every layout of the trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from miles_megatron import cpu
from miles_megatron.packed_layout import packed_layout_of
from miles_megatron.recurrent import Again, by_sequence, causal_convolution, sharded_entries, wide

from miles_core.errors import ConfigError
from miles_specs_nemotron.mamba import Mamba
from miles_specs_nemotron.scan import gated_norm, state_space

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402


class MambaMixer(MegatronModule):
    """A projection, a short causal convolution, the state space, a norm of the gated output, a projection.

    Groups, and with them their heads, are cut among tensor-parallel ranks. Sequences are computed apart: neither state
    nor convolution goes from one to the next (recurrent.by_sequence).

    Args:
        sizes: of the whole mixer.
        column, row: linear layers cut along their outputs and along their inputs (module_specs.LayerModules).

    Raises:
        ConfigError: groups that do not divide among tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, cp_comm_type: Any = None,
                 pg_collection: Any = None, *, sizes: Mamba, column: type, row: type, **_: Any):  # fmt: skip
        super().__init__(config)
        self.layer_number = layer_number
        self.tensor_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        self.context_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        ranks, rank = self.tensor_group.size(), self.tensor_group.rank()
        if sizes.groups % ranks:
            raise ConfigError("the groups of Mamba's heads do not divide by the tensor-parallel size",
                              code="mamba-groups-not-divisible", got=f"{sizes.groups} / {ranks}", who="n_groups",
                              fix="choose a tensor-parallel size that divides them")
        self.groups, self.heads, self.head_dim = sizes.groups // ranks, sizes.heads // ranks, sizes.head_dim
        self.projected = tuple(width // ranks for width in sizes.projected)
        self.convolved = tuple(width // ranks for width in sizes.convolved)

        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tensor_group}
        self.in_proj = build_module(column, config.hidden_size, sum(sizes.projected), init_method=config.init_method,
                                    gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1", **linear)
        self.out_proj = build_module(row, sizes.inner, config.hidden_size, init_method=config.output_layer_init_method,
                                     input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="fc2", **linear)

        def mine(drawn: torch.Tensor, sections: tuple[int, ...]) -> torch.nn.Parameter:
            parts = torch.cat([part.chunk(ranks)[rank] for part in drawn.split(sections)])
            parameter = torch.nn.Parameter(parts.to(config.params_dtype))
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            return parameter

        channels, bound = sum(sizes.convolved), sizes.kernel**-0.5
        self.conv_weight = mine(torch.empty(channels, 1, sizes.kernel).uniform_(-bound, bound), sizes.convolved)
        if sizes.bias:
            self.conv_bias = mine(torch.empty(channels).uniform_(-bound, bound), sizes.convolved)
        steps = torch.empty(sizes.heads).uniform_(-6.9, -2.3).exp()  # 0.001 to 0.1
        self.A_log = mine(torch.arange(1, sizes.heads + 1).float().log(), (sizes.heads,))
        self.dt_bias = mine(steps + torch.log(-torch.expm1(-steps)), (sizes.heads,))
        self.D = mine(torch.ones(sizes.heads), (sizes.heads,))
        self.norm_weight = mine(torch.ones(sizes.inner), (sizes.inner,))

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None,
                **_: Any) -> Any:
        """[T, 1, H] (sequence parallel: [T / tensor, 1, H]) -> the same, and no bias.

        Raises:
            ValueError: rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("a Mamba mixer takes packed rows: without their boundaries its state would go from one "
                             "sequence to the next")
        gate, rows = self.in_proj(hidden_states)[0][:, 0].split((self.projected[0], sum(self.projected[1:])), 1)
        layout = packed_layout_of(packed_seq_params, rows, self.context_group)
        parameters = (self.conv_weight, self.A_log, self.dt_bias, self.D, *self._conv_bias())
        mixed = by_sequence(rows, layout, self.context_group, lambda each: Again.apply(self._mix, each, *parameters))
        return self.out_proj(Again.apply(self._norm, mixed, gate, self.norm_weight)[:, None])

    def _conv_bias(self) -> tuple[torch.Tensor, ...]:
        return (self.conv_bias,) if hasattr(self, "conv_bias") else ()

    def _norm(self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gated_norm(x, gate, weight, self.groups, self.config.layernorm_epsilon)

    def _mix(self, rows: torch.Tensor, conv_weight: torch.Tensor, decay: torch.Tensor, dt_bias: torch.Tensor,
             skip: torch.Tensor, conv_bias: torch.Tensor | None = None) -> torch.Tensor:
        """[B, L, x | b | c | dt] -> [B, L, heads x head_dim]."""
        xbc, dt = rows.split((sum(self.convolved), self.heads), -1)
        x, b, c = causal_convolution(xbc, conv_weight, conv_bias).split(self.convolved, -1)
        b, c = (part.unflatten(-1, (self.groups, -1)) for part in (b, c))
        steps = F.softplus(wide(dt) + dt_bias)
        return state_space(x.unflatten(-1, (self.heads, -1)), steps, -wide(decay).exp(), b, c, skip).flatten(2)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (),
                           metadata: Any = None, tp_group: Any = None) -> dict[str, Any]:
        """See miles_megatron.recurrent.sharded_entries."""
        joined = {"in_proj.weight": ("zxbct", self.projected), "conv_weight": ("xbc", self.convolved)}
        if hasattr(self, "conv_bias"):
            joined["conv_bias"] = ("xbc", self.convolved)
        own = dict(self.named_parameters(recurse=False))
        return sharded_entries(self, prefix, sharded_offsets, metadata, own, joined)
