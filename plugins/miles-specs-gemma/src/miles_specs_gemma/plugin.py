"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsGemma:
    """Gemma 2 and the text models of Gemma 3, 3n and 4 for the Megatron trainer."""

    provides = (
        "model_spec:gemma2:tie_word_embeddings=1:norms_after=2",
        "model_spec:gemma3_text:tie_word_embeddings=1:norms_after=2:vocab_size=262208:num_attention_heads=8"
        ":num_key_value_heads=4:head_dim=256",
        "model_spec:gemma3:tie_word_embeddings=1:norms_after=2:vocab_size=262208:num_attention_heads=8"
        ":num_key_value_heads=4:head_dim=256",
        "model_spec:gemma3n_text:tie_word_embeddings=1:norms_after=2:global_head_dim=head_dim",
        "model_spec:gemma3n:tie_word_embeddings=1:norms_after=2:global_head_dim=head_dim",
        "model_spec:gemma4_text:tie_word_embeddings=1:norms_after=2:global_head_dim=512"
        ":num_experts_per_tok=top_k_experts:shared_expert_intermediate_size=intermediate_size",
        "model_spec:gemma4:tie_word_embeddings=1:norms_after=2:global_head_dim=512"
        ":num_experts_per_tok=top_k_experts:shared_expert_intermediate_size=intermediate_size",
        "model_spec:gemma4_unified:tie_word_embeddings=1:norms_after=2:global_head_dim=512",
    )

    @hookimpl("model_spec", name="gemma2")
    def gemma2(self, hf_config: Any) -> Family:
        """Gemma 2."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma2

        return DecoderFamily(gemma2)

    @hookimpl("model_spec", name="gemma3_text")
    def gemma3_text(self, hf_config: Any) -> Family:
        """The text models of Gemma 3."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma3_text

        return DecoderFamily(gemma3_text)

    @hookimpl("model_spec", name="gemma3")
    def gemma3(self, hf_config: Any) -> Family:
        """The text model of a Gemma 3 with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma3

        return DecoderFamily(gemma3)

    @hookimpl("model_spec", name="gemma3n_text")
    def gemma3n_text(self, hf_config: Any) -> Family:
        """The text models of Gemma 3n."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma3n_text

        return DecoderFamily(gemma3n_text)

    @hookimpl("model_spec", name="gemma3n")
    def gemma3n(self, hf_config: Any) -> Family:
        """The text model of a Gemma 3n with a vision and an audio tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma3n

        return DecoderFamily(gemma3n)

    @hookimpl("model_spec", name="gemma4_text")
    def gemma4_text(self, hf_config: Any) -> Family:
        """The text models of Gemma 4."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma4_text

        return DecoderFamily(gemma4_text)

    @hookimpl("model_spec", name="gemma4")
    def gemma4(self, hf_config: Any) -> Family:
        """The text model of a Gemma 4 with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma4

        return DecoderFamily(gemma4)

    @hookimpl("model_spec", name="gemma4_unified")
    def gemma4_unified(self, hf_config: Any) -> Family:
        """The text model of a Gemma 4 that embeds images and sound without a tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gemma.families import gemma4

        return DecoderFamily(gemma4)
