"""The plugin: what it offers. The family is in families.py, imported when a checkpoint needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsQwen3Next:
    """Qwen3-Next, Qwen3.5, Qwen3.6 and Ling 3.0 for the Megatron trainer."""

    provides = (
        "model_spec:qwen3_next:attn_output_gate=1",
        "model_spec:qwen3_5_text:attn_output_gate=1",
        "model_spec:qwen3_5_moe_text:attn_output_gate=1",
        "model_spec:qwen3_5:attn_output_gate=1:full_attention_interval=4:linear_num_key_heads=16"
        ":linear_num_value_heads=32:linear_key_head_dim=128:linear_value_head_dim=128",
        "model_spec:qwen3_5_moe:attn_output_gate=1:full_attention_interval=4:linear_num_key_heads=16"
        ":linear_num_value_heads=32:linear_key_head_dim=128:linear_value_head_dim=128",
        "model_spec:bailing_hybrid:num_experts_per_tok=num_experts_per_token:n_shared_experts=num_shared_experts"
        ":full_attention_interval=layer_group_size:linear_num_key_heads=num_attention_heads"
        ":linear_num_value_heads=num_attention_heads:linear_key_head_dim=head_dim:linear_value_head_dim=head_dim",
        "read-by:bailing_hybrid:5.20",
    )

    @hookimpl("model_spec", name="qwen3_next")
    def qwen3_next(self, hf_config: Any) -> Family:
        """Gated delta nets and gated attention in turn, a mixture of experts with a shared one."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen3next.families import qwen3_next

        return DecoderFamily(qwen3_next)

    @hookimpl("model_spec", name="qwen3_5")
    def qwen3_5(self, hf_config: Any) -> Family:
        """Qwen3.5 and 3.6, dense, of the release with a vision tower."""
        return _qwen3_5()

    @hookimpl("model_spec", name="qwen3_5_text")
    def qwen3_5_text(self, hf_config: Any) -> Family:
        """The same, of text alone."""
        return _qwen3_5()

    @hookimpl("model_spec", name="qwen3_5_moe")
    def qwen3_5_moe(self, hf_config: Any) -> Family:
        """Qwen3.5 and 3.6 with experts, of the release with a vision tower."""
        return _qwen3_5()

    @hookimpl("model_spec", name="qwen3_5_moe_text")
    def qwen3_5_moe_text(self, hf_config: Any) -> Family:
        """The same, of text alone."""
        return _qwen3_5()

    @hookimpl("model_spec", name="bailing_hybrid")
    def bailing_hybrid(self, hf_config: Any) -> Family:
        """Ling 3.0: delta nets that decay by channel, gated latent attention, experts with a shared one."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen3next.ling import bailing_hybrid

        return DecoderFamily(bailing_hybrid)


def _qwen3_5() -> Family:
    from miles_megatron.decoder import DecoderFamily

    from miles_specs_qwen3next.families import qwen3_5

    return DecoderFamily(qwen3_5)
