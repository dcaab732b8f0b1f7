"""The plugin: what it offers. The families are in families.py, imported when a checkpoint needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsQwen2:
    """Qwen2 and Qwen2.5 for the Megatron trainer."""

    @hookimpl("model_spec", name="qwen2")
    def qwen2(self, hf_config: Any) -> Family:
        """Dense Qwen2 and Qwen2.5."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen2.families import qwen2

        return DecoderFamily(qwen2)
