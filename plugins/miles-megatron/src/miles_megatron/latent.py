"""Latent attention: keys and values of all heads are made of one narrow vector per token. The description; no torch.

DeepSeek-V2 (arXiv:2405.04434, section 2.1): a key is a part of its head's own, made of the latent, and a part that
carries the position and is the same in all heads. The module is in latent_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_megatron.decoder import Decoder, every_layer, rotary, warming, yarn_magnitude
from miles_megatron.specs import Attention, Rule

_OURS, _THEIRS = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."

_ROPE = {"rotary_scaling_factor": "factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
         "beta_fast": "beta_fast", "beta_slow": "beta_slow",
         "original_max_position_embeddings": "original_max_position_embeddings"}
"""Options of Megatron-LM's -> keys of rope_parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """Which keys a query attends to: those of the highest scores, of small heads of their own (DeepSeek-V3.2,
    arXiv:2512.02556). Its parameters get no gradient of a loss and stay as they are.

    Args:
        heads, size: of the small heads, and channels of one, of which the first are turned.
        chosen: keys of a query.
        interleaved: which channels are turned together; see Rotary. It need not be those of the attention's heads.
    """

    heads: int
    size: int
    chosen: int
    interleaved: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Sizes of latent attention; as `Attention.mixer` it makes the layers' module.

    A head's queries and keys have `turned + plain` channels: that is the model's kv_channels, of which the rope's
    `fraction` is turned.

    Args:
        query_rank: width of the latent of queries; None where they are made of the hidden state itself.
        rank: width of the latent of keys and values.
        plain, turned: channels of a query's and a key's head without and with its position.
        value: channels of a value's head.
        epsilon: of the norms of both latents.
        bias: the projections to the latents and of the output have biases.
        indexer: queries see some keys alone; None for all before them.
        gated: the output of each head is multiplied with the sigmoid of a number that the hidden state gives.
    """

    query_rank: int | None
    rank: int
    plain: int
    turned: int
    value: int
    epsilon: float = 1e-6
    bias: bool = False
    indexer: Indexer | None = None
    gated: bool = False

    @property
    def head_dim(self) -> int:
        """Channels of a query's head."""
        return self.plain + self.turned

    @property
    def also(self) -> dict[str, tuple[object, ...]]:
        """Options of Megatron's own latent attention that say the same; see ModelSpec."""
        return {
            "multi_latent_attention": (True,), "q_lora_rank": (self.query_rank,), "kv_lora_rank": (self.rank,),
            "qk_head_dim": (self.plain,), "qk_pos_emb_head_dim": (self.turned,), "v_head_dim": (self.value,),
            "kv_channels": (self.turned, self.plain, self.value), "qk_layernorm": (True,), "rotary_percent": (1.0,),
        }  # fmt: skip

    def __call__(self, config, attention, rope, modules):
        """See specs.Attention.mixer."""
        from miles_megatron import latent_attention, sparse_latent

        made = latent_attention if self.indexer is None else sparse_latent
        return made.spec(self, config, attention, rope, modules)

    def decoder(self, hf, *, interleaved: bool, **parts) -> Decoder:
        """A decoder all of whose layers have it, by the keys of config.json that architectures share since DeepSeek-V2.

        Args:
            interleaved: pairs of the rope are neighbours.
            parts: more of the decoder.

        Raises:
            ConfigError: an unknown scaling of the rope.
        """
        rope = rotary(hf, fraction=self.turned / self.head_dim, interleaved=interleaved)
        parameters, layers = hf.rope_parameters, tuple(range(hf.num_hidden_layers))
        stretched = (parameters.get("mscale_all_dim") or 0) * (rope.scaling != "default")
        scale = self.head_dim**-0.5 * yarn_magnitude(rope.factor, stretched) ** 2
        also = {"rope_type": ("yarn" if rope.scaling == "yarn" else "rope",)} | {
            ours: (parameters[theirs],) for ours, theirs in _ROPE.items() if theirs in parameters}
        return Decoder(
            hf=hf, attention=every_layer(hf, Attention(rope, warming=warming(hf), mixer=self)),
            mixing=self.rules(layers), softmax_scale=scale, constants={"kv_channels": self.head_dim},
            also=self.also | also, **parts,
        )  # fmt: skip

    def rules(self, layers: tuple[int, ...]) -> tuple[Rule, ...]:
        """Of the layers' attention, under the names that checkpoints share since DeepSeek-V2."""
        pairs = [("q_up", "q_proj")] if self.query_rank is None else [
            ("q_down", "q_a_proj"), ("q_norm", "q_a_layernorm"), ("q_up", "q_b_proj")]
        pairs += [("kv_down", "kv_a_proj_with_mqa"), ("kv_norm", "kv_a_layernorm"), ("kv_up", "kv_b_proj"),
                  ("linear_proj", "o_proj")]
        biased = {"q_down", "kv_down", "linear_proj"} if self.bias else set()
        if self.gated:
            pairs.append(("gate", "g_proj"))
        if self.indexer is not None:
            pairs += [("indexer.q_up", "indexer.wq_b"), ("indexer.key", "indexer.wk"),
                      ("indexer.norm", "indexer.k_norm"), ("indexer.share", "indexer.weights_proj")]
            biased.add("indexer.norm")
        return tuple(
            Rule(f"{_OURS}{ours}.{kind}", (f"{_THEIRS}{theirs}.{kind}",), layers=layers)
            for ours, theirs in pairs for kind in ("weight", *(["bias"] if ours in biased else []))
        )
