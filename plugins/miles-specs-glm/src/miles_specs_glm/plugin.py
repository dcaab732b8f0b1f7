"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsGlm:
    """Dense GLM-4 for the Megatron trainer."""

    provides = ("model_spec:glm4:norms_after=2",)

    @hookimpl("model_spec", name="glm4")
    def glm4(self, hf_config: Any) -> Family:
        """Dense GLM-4-0414 and GLM-Z1."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_glm.families import glm4

        return DecoderFamily(glm4)
