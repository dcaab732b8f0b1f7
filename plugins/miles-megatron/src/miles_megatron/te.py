"""The layers on GPUs: Transformer Engine's linear layers, norms, activations, grouped experts and fused attention.

Norms are submodules of their own instead of being fused into the linear layer behind them: the names of parameters stay
those of the local layers (module_specs.py). Imported only where there is a GPU.
"""

from __future__ import annotations

import copy
import functools

import torch

from miles_core.errors import ConfigError
from miles_megatron import cpu
from miles_megatron.attention import PackedAttention
from miles_megatron.grouped_experts import GroupedExperts, sort_once
from miles_megatron.layers import ClampedSiLU, ClampedSwiGLU, SquaredReLU
from miles_megatron.module_specs import LayerModules, fits, packed_attention
from miles_megatron.rope import Rope, Rotate
from miles_megatron.specs import Attention

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.extensions import transformer_engine as te  # noqa: E402
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.moe.experts import TEGroupedMLP  # noqa: E402


@functools.cache
def layer_modules() -> LayerModules:
    """Transformer Engine's.

    Raises:
        ConfigError: it is installed, but cannot be imported.
    """
    if not te.HAVE_TE:
        raise ConfigError("Transformer Engine is installed, but importing it fails", who="transformer_engine",
                          fix="see why with python -c 'import transformer_engine.pytorch', or write "
                          "--transformer-impl local", code="transformer-engine-import-failed")
    return LayerModules(
        te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm,
        {"silu": Activation, "gelu_pytorch_tanh": Activation, "clamped_swiglu": ClampedSwiGLU,
         "clamped_silu": ClampedSiLU, "relu2": SquaredReLU}, attention,
        (ExpertsSideBySide, te.TEColumnParallelGroupedLinear, te.TERowParallelGroupedLinear), accumulate_in_products,
    )  # fmt: skip


class ExpertsSideBySide(GroupedExperts, TEGroupedMLP):
    """Transformer Engine's grouped layers, by one product each where that is possible."""


class Activation(MegatronModule):
    """A gated MLP's activation in one kernel each way; Megatron's config says which. Its GELU is the tanh one."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        self.op = te.TEActivationOp(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., 2 F] -> [..., F]."""
        return self.op(x)


def attention(config: TransformerConfig, wanted: Attention, rope: Rope | None) -> ModuleSpec:
    """The core attention of layers of one kind."""
    if not fits(config, wanted):
        return packed_attention(config, wanted, rope)
    return ModuleSpec(module=FusedAttention, params={"rope": rope, "window": wanted.window})


class FusedAttention(te.TEDotProductAttention):
    """Causal self-attention over packed rows: the rope in one kernel, then Transformer Engine's fused attention.

    Under context parallelism keys and values travel round the ring of ranks while they are computed with.

    Args:
        rope, window: as of attention.PackedAttention.
    """

    def __init__(self, config, *args, rope: Rope, window: int | None = None, **kwargs):
        if window is not None:
            config = copy.copy(config)
            # Keys to the left and to the right of the query's own.
            config.window_size, config.window_attn_skip_freq = (window - 1, 0), None
        super().__init__(config, *args, **kwargs)
        self.rope = rope
        self.ahead = PackedAttention(config, *args, rope=rope, window=window, **kwargs)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None):  # fmt: skip
        """q [T, n, d], k [T, g, d], v [T, g, e] -> [T, n*e].

        Raises:
            ValueError: rows that are not packed.
        """
        if packed_seq_params is None:
            raise ValueError("Transformer Engine's layers need packed rows")
        if getattr(packed_seq_params, "last", None) is not None:  # the kernels have no such mask for packed rows
            return self.ahead(query, key, value, packed_seq_params=packed_seq_params)
        group = parallel_state.get_context_parallel_group()
        rows = packed_seq_params.on_device(query.device, query.shape[0] * group.size(), group.size())
        if self.rope is not None and getattr(packed_seq_params, "positions", None) is not None:
            tables = packed_seq_params.tables(self.rope, query.dtype)  # the kernel counts positions by itself
            query, key = (Rotate.apply(x, *tables, self.rope.interleaved) for x in (query, key))
        elif self.rope is not None:
            angles = self.rope.angles(rows.max_seqlen_q, query.device)
            query, key = (_turned(x, rows, angles, self.rope.interleaved, group) for x in (query, key))
        out = super().forward(query, key, value, attention_mask, attn_mask_type, packed_seq_params=rows)
        return out.reshape(out.shape[0], -1)


def _turned(x: torch.Tensor, rows, angles: torch.Tensor, interleaved: bool, group) -> torch.Tensor:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return apply_rotary_pos_emb(x, angles, tensor_format="thd", interleaved=interleaved, fused=True,
                                cu_seqlens=rows.cu_seqlens_q, cp_size=group.size(), cp_rank=group.rank())


def finish(model: torch.nn.Module) -> None:
    """A whole model of these layers: experts' second layers are cut along their inputs, and tokens are sorted once.

    Transformer Engine, which Megatron lets know nothing of the ranks that share out an expert, says that both layers
    are cut along their outputs.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name and ".linear_fc2." in name and parameter.dim() == 2:
            parameter.partition_dim = 1
    sort_once(model)


def accumulate_in_products(model: torch.nn.Module) -> None:
    """Have linear layers add gradients to `main_grad` inside of the product that makes them, in its precision.

    Only those whose forward is their own: what substitutes a weight (substitute.py) wants the gradient of its value.
    Megatron's switch of that name asks for Apex as well, for layers that are not called here.
    """
    for module in model.modules():
        own = getattr(module, "fuse_wgrad_accumulation", None) is not None and "forward" not in vars(module)
        weights = [one for one in module._parameters.values() if one is not None and one.dim() == 2]
        if own and weights and all(hasattr(weight, "main_grad") for weight in weights):
            module.fuse_wgrad_accumulation = True
