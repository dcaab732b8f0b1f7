"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsQwen2:
    """Qwen2, Qwen2.5, Qwen2.5-VL, Qwen3-VL, Qwen2-MoE and MiMo for the Megatron trainer."""

    @hookimpl("model_spec", name="qwen2")
    def qwen2(self, hf_config: Any) -> Family:
        """Dense Qwen2 and Qwen2.5."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen2

        return DecoderFamily(qwen2)

    @hookimpl("model_spec", name="qwen2_moe")
    def qwen2_moe(self, hf_config: Any) -> Family:
        """Qwen1.5-MoE and Qwen2-57B-A14B."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen2_moe

        return DecoderFamily(qwen2_moe)

    @hookimpl("model_spec", name="qwen2_5_vl")
    def qwen2_5_vl(self, hf_config: Any) -> Family:
        """The text model of Qwen2.5-VL, with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen2_5_vl

        return DecoderFamily(qwen2_5_vl)

    @hookimpl("model_spec", name="qwen3_vl")
    def qwen3_vl(self, hf_config: Any) -> Family:
        """The text model of Qwen3-VL, with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen3_vl

        return DecoderFamily(qwen3_vl)

    @hookimpl("model_spec", name="qwen3_vl_moe")
    def qwen3_vl_moe(self, hf_config: Any) -> Family:
        """The text model of Qwen3-VL-30B-A3B and -235B-A22B, with a vision tower."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen3_vl_moe

        return DecoderFamily(qwen3_vl_moe)

    @hookimpl("model_spec", name="mimo")
    def mimo(self, hf_config: Any) -> Family:
        """MiMo-7B."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import mimo

        return DecoderFamily(mimo)
