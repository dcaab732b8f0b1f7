"""The plugin: what it offers. The family is in families.py, imported when a checkpoint needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsQwen3Next:
    """Qwen3-Next for the Megatron trainer."""

    @hookimpl("model_spec", name="qwen3_next")
    def qwen3_next(self, hf_config: Any) -> Family:
        """Gated delta nets and gated attention in turn, a mixture of experts with a shared one."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_qwen3next.families import qwen3_next

        return DecoderFamily(qwen3_next)
