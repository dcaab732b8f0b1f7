"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsMoe:
    """DeepSeek-V3 to -V4, Kimi K2, GLM-4.5 to 5, MiniMax-M2 and Hy3 for the Megatron trainer."""

    provides = ("computed-by:glm_moe_dsa:5.13", "computed-by:deepseek_v32:5.13", "computed-by:minimax_m2:5.18",
                "read-by:deepseek_v4:5.23", "model_spec:hy_v3:n_shared_experts=num_shared_experts")

    @hookimpl("model_spec", name="deepseek_v3")
    def deepseek_v3(self, hf_config: Any) -> Family:
        """DeepSeek-V3, -R1 and -V3.1."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import deepseek_v3

        return DecoderFamily(deepseek_v3)

    @hookimpl("model_spec", name="deepseek_v32")
    def deepseek_v32(self, hf_config: Any) -> Family:
        """DeepSeek-V3.2."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import deepseek_v32

        return DecoderFamily(deepseek_v32)

    @hookimpl("model_spec", name="deepseek_v4")
    def deepseek_v4(self, hf_config: Any) -> Family:
        """DeepSeek-V4."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.deepseek_v4 import deepseek_v4

        return DecoderFamily(deepseek_v4)

    @hookimpl("model_spec", name="kimi_k2")
    def kimi_k2(self, hf_config: Any) -> Family:
        """Kimi K2."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import kimi_k2

        return DecoderFamily(kimi_k2)

    @hookimpl("model_spec", name="kimi_k25")
    def kimi_k25(self, hf_config: Any) -> Family:
        """The text model of Kimi K2.5."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import kimi_k25

        return DecoderFamily(kimi_k25)

    @hookimpl("model_spec", name="glm4_moe")
    def glm4_moe(self, hf_config: Any) -> Family:
        """GLM-4.5, -4.6 and -4.7."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import glm4_moe

        return DecoderFamily(glm4_moe)

    @hookimpl("model_spec", name="glm4_moe_lite")
    def glm4_moe_lite(self, hf_config: Any) -> Family:
        """GLM-4.7-Flash."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import glm4_moe_lite

        return DecoderFamily(glm4_moe_lite)

    @hookimpl("model_spec", name="glm_moe_dsa")
    def glm_moe_dsa(self, hf_config: Any) -> Family:
        """GLM-5."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import glm_moe_dsa

        return DecoderFamily(glm_moe_dsa)

    @hookimpl("model_spec", name="minimax_m2")
    def minimax_m2(self, hf_config: Any) -> Family:
        """MiniMax-M2."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import minimax_m2

        return DecoderFamily(minimax_m2)

    @hookimpl("model_spec", name="hy_v3")
    def hy_v3(self, hf_config: Any) -> Family:
        """Hy3."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_moe.families import hy_v3

        return DecoderFamily(hy_v3)
