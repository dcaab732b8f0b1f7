"""The plugin: what it offers. The families are in families.py and llama4.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsLlama:
    """Llama 2 to 4, Mistral, SmolLM3, Granite, Phi-3 and 4, and OLMo 2 and 3 for the Megatron trainer."""

    provides = (
        "model_spec:smollm3:tie_word_embeddings=1",
        "model_spec:llama4:intermediate_size=intermediate_size_mlp:moe_intermediate_size=intermediate_size"
        ":shared_expert_intermediate_size=intermediate_size:decoder_sparse_step=interleave_moe_layer_step",
        "model_spec:llama4_text:intermediate_size=intermediate_size_mlp:moe_intermediate_size=intermediate_size"
        ":shared_expert_intermediate_size=intermediate_size:decoder_sparse_step=interleave_moe_layer_step",
        "computed-by:olmo3:5.13", "computed-by:mistral4:5.15",
    )

    @hookimpl("model_spec", name="llama")
    def llama(self, hf_config: Any) -> Family:
        """Llama 2, 3, 3.1 and later."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import llama

        return DecoderFamily(llama)

    @hookimpl("model_spec", name="mistral")
    def mistral(self, hf_config: Any) -> Family:
        """Mistral, with or without a sliding window."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.mistral import mistral

        return DecoderFamily(mistral)

    @hookimpl("model_spec", name="ministral")
    def ministral(self, hf_config: Any) -> Family:
        """Ministral, with a window in some layers."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.mistral import ministral

        return DecoderFamily(ministral)

    @hookimpl("model_spec", name="ministral3")
    def ministral3(self, hf_config: Any) -> Family:
        """The text model of Ministral 3 alone."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.mistral import mistral

        return DecoderFamily(mistral)

    @hookimpl("model_spec", name="mistral3")
    def mistral3(self, hf_config: Any) -> Family:
        """The text model of Mistral Small 3.1 and later, and of Ministral 3, with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.mistral import mistral3

        return DecoderFamily(mistral3)

    @hookimpl("model_spec", name="mistral4")
    def mistral4(self, hf_config: Any) -> Family:
        """The text model of Mistral Small 4 alone."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.mistral import mistral4

        return DecoderFamily(mistral4)

    @hookimpl("model_spec", name="smollm3")
    def smollm3(self, hf_config: Any) -> Family:
        """SmolLM3."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import smollm3

        return DecoderFamily(smollm3)

    @hookimpl("model_spec", name="granite")
    def granite(self, hf_config: Any) -> Family:
        """Granite 3, dense."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import granite

        return DecoderFamily(granite)

    @hookimpl("model_spec", name="phi3")
    def phi3(self, hf_config: Any) -> Family:
        """Phi-3, Phi-3.5 and Phi-4."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import phi3

        return DecoderFamily(phi3)

    @hookimpl("model_spec", name="olmo2")
    def olmo2(self, hf_config: Any) -> Family:
        """OLMo 2."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import olmo2

        return DecoderFamily(olmo2)

    @hookimpl("model_spec", name="olmo3")
    def olmo3(self, hf_config: Any) -> Family:
        """OLMo 3."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.families import olmo3

        return DecoderFamily(olmo3)

    @hookimpl("model_spec", name="llama4_text")
    def llama4_text(self, hf_config: Any) -> Family:
        """The text model of Llama 4 alone."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.llama4 import llama4_text

        return DecoderFamily(llama4_text)

    @hookimpl("model_spec", name="llama4")
    def llama4(self, hf_config: Any) -> Family:
        """The text model of a Llama 4 with a vision model."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_llama.llama4 import llama4

        return DecoderFamily(llama4)
