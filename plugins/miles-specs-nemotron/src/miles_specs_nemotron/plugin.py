"""The plugin: what it offers. The family is in families.py, imported when a checkpoint needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miles_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from miles_megatron.specs import Family


class SpecsNemotron:
    """Nemotron 3 and Nemotron-H for the Megatron trainer."""

    provides = (
        "model_spec:nemotron_h:layer_types=hybrid_override_pattern:layer_types=layers_block_type"
        ":linear_num_key_heads=n_groups:linear_num_value_heads=mamba_num_heads:linear_key_head_dim=ssm_state_size"
        ":linear_value_head_dim=mamba_head_dim:shared_expert_intermediate_size=moe_shared_expert_intermediate_size",
    )

    @hookimpl("model_spec", name="nemotron_h")
    def nemotron_h(self, hf_config: Any) -> Family:
        """Mamba-2, attention, an MLP or a mixture of experts, one of them in each layer."""
        from miles_megatron.decoder import DecoderFamily

        from miles_specs_nemotron.families import nemotron_h

        return DecoderFamily(nemotron_h)
