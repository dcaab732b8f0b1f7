"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsLlama:
    """Llama 2 and 3 and Mistral for the Megatron trainer."""

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

        from miles_specs_llama.families import mistral

        return DecoderFamily(mistral)
