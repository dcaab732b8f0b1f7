"""Latent attention as a layer's token mixer; see latent.py.

Both latents are computed whole on every tensor-parallel rank, of its own rows under sequence parallelism; the heads are
made of them by column-parallel layers. A head's channels are put in another order than the checkpoint's, those with the
position first, which changes no score: so the core attention turns them as it does any partial rope.
"""

from __future__ import annotations

import torch

from miles_megatron import cpu
from miles_megatron.latent import Latent
from miles_megatron.module_specs import LayerModules
from miles_megatron.rope import Rope
from miles_megatron.specs import Attention

cpu.install()

from megatron.core import tensor_parallel  # noqa: E402 - after install()
from megatron.core.transformer import ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import build_module  # noqa: E402


def spec(latent: Latent, config: TransformerConfig, attention: Attention, rope: Rope,
         modules: LayerModules) -> ModuleSpec:
    """What takes the place of a layer's `self_attention`."""
    params = {"latent": latent, "modules": modules, "core": modules.attention(config, attention, rope),
              "attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=LatentAttention, params=params)


class Whole(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank has whole."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias, dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(self.weight)
        for parameter in self.parameters():
            # Under sequence parallelism a rank's gradient is of its own rows; Megatron then adds them up.
            parameter.sequence_parallel = config.sequence_parallel


class Projection(Whole):
    """The same, made and called as Transformer Engine's linear layers are: (output, bias)."""

    def __init__(self, inputs: int, outputs: int, *, config: TransformerConfig, bias: bool, **_):
        super().__init__(config, inputs, outputs, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class LatentAttention(MegatronModule):
    """hidden states [s / tensor or s, b, H] -> the same.

    Args:
        core: the core attention, which turns the first channels of each head.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, attn_mask_type=None, cp_comm_type=None,
                 pg_collection=None, *, latent: Latent, modules: LayerModules, core: ModuleSpec):  # fmt: skip
        super().__init__(config)
        self.latent, heads = latent, config.num_attention_heads
        if latent.query_rank is not None:
            self.q_down = Whole(config, config.hidden_size, latent.query_rank, latent.bias)
            self.q_norm = modules.norm(config=config, hidden_size=latent.query_rank, eps=latent.epsilon)
        self.kv_down = Whole(config, config.hidden_size, latent.rank + latent.turned, latent.bias)
        self.kv_norm = modules.norm(config=config, hidden_size=latent.rank, eps=latent.epsilon)

        def up(inputs: int, each: int) -> torch.nn.Module:
            return modules.column(inputs, heads * each, config=config, init_method=config.init_method,
                                gather_output=False, bias=False, skip_bias_add=False, is_expert=False)

        self.q_up = up(latent.query_rank or config.hidden_size, latent.head_dim)
        self.kv_up = up(latent.rank, latent.plain + latent.value)
        self.linear_proj = modules.row(
            heads * latent.value, config.hidden_size, config=config, init_method=config.output_layer_init_method,
            bias=latent.bias, input_is_parallel=True, skip_bias_add=True, is_expert=False,
        )  # fmt: skip
        if latent.gated:
            self.gate = up(config.hidden_size, 1)
        self.core_attention = build_module(
            core, config=config, layer_number=layer_number, attn_mask_type=attn_mask_type, attention_type="self",
            softmax_scale=config.softmax_scale, k_channels=latent.head_dim, v_channels=latent.value,
            cp_comm_type=cp_comm_type, pg_collection=pg_collection,
        )  # fmt: skip
        self.again = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, *_args, packed_seq_params=None, **_):
        """Megatron's protocol of a layer's self-attention; (output, bias).

        Raises:
            ValueError: rows that are not packed, where the core attention takes no others.
        """
        query = hidden_states if self.latent.query_rank is None else self.q_norm(self.q_down(hidden_states))
        heads, more = self._heads(hidden_states, query), self._more(hidden_states, query)
        if packed_seq_params is not None:
            heads = [x.squeeze(1) for x in heads]

        def attend(query, key, value):
            return self.core_attention(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **more)

        out = tensor_parallel.checkpoint(attend, False, *heads) if self.again and self.training else attend(*heads)
        out = out if packed_seq_params is None else out[:, None]
        return self.linear_proj(self._gated(out, hidden_states) if self.latent.gated else out)

    def _gated(self, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[s, b, n x value] of this rank's heads, each times its gate."""
        gate = self.gate(hidden)[0].float().sigmoid().to(out.dtype)
        return (out.unflatten(-1, (-1, self.latent.value)) * gate[..., None]).flatten(-2)

    def _more(self, hidden: torch.Tensor, query: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the core attention is told beside queries, keys and values."""
        return {}

    def _heads(self, hidden: torch.Tensor, query: torch.Tensor) -> list[torch.Tensor]:
        """[rows, b, H] -> q and k [s, b, n, turned + plain], v [s, b, n, value], n this rank's heads.

        Args:
            query: [rows, b, ...], what queries are made of: their latent or the hidden states.
        """
        latent = self.latent
        query = self.q_up(query)[0].unflatten(-1, (-1, latent.head_dim))
        plain, turned = query.split((latent.plain, latent.turned), -1)
        query = torch.cat((turned, plain), -1)
        compressed, place = self.kv_down(hidden).split((latent.rank, latent.turned), -1)
        made = self.kv_up(self.kv_norm(compressed))[0].unflatten(-1, (-1, latent.plain + latent.value))
        plain, value = made.split((latent.plain, latent.value), -1)
        place = self._for_all_heads(place)[..., None, :].expand(*plain.shape[:-1], -1)
        return [query, torch.cat((place, plain), -1), value]

    def _for_all_heads(self, place: torch.Tensor) -> torch.Tensor:
        """[rows, b, turned] of all rows on every tensor-parallel rank, whose heads' gradients are added up."""
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(place, tensor_parallel_output_grad=True)
        return tensor_parallel.copy_to_tensor_model_parallel_region(place)

