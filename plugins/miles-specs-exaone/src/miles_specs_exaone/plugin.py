"""The plugin: what it offers. The family is in families.py, imported when a checkpoint needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsExaone:
    """EXAONE 4 for the Megatron trainer."""

    @hookimpl("model_spec", name="exaone4")
    def exaone4(self, hf_config: Any) -> Family:
        """EXAONE 4.0, with windows in three of four layers and without."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_exaone.families import exaone4

        return DecoderFamily(exaone4)
