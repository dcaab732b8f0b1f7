"""The plugin: what it offers. The family is in families.py, imported when a checkpoint needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsGptOss:
    """gpt-oss for the Megatron trainer."""

    @hookimpl("model_spec", name="gpt_oss")
    def gpt_oss(self, hf_config: Any) -> Family:
        """Gpt-oss-20b and -120b."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_gptoss.families import gpt_oss

        return DecoderFamily(gpt_oss)
