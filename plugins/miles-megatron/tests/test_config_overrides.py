"""Every option of megatron-core that a run accepts reaches the class that takes it, or is refused with a reason."""

import dataclasses
import os

import pytest

from miles_core.errors import ConfigError

FIELDS = {
    "TransformerConfig": {"attention_dropout": 0.25, "moe_router_bias_update_rate": 0.5, "init_method_std": 0.5,
                          "recompute_granularity": "full", "deterministic_mode": True,
                          "attention_softmax_in_fp32": True, "attention_backend": "unfused"},
    "OptimizerConfig": {"decoupled_lr": 0.5, "decoupled_min_lr": 0.25, "apply_wd_to_qk_layernorm": True,
                        "decoupled_weight_decay": False, "sgd_momentum": 0.5, "use_distributed_optimizer": False,
                        "log_num_zeros_in_grad": True},
    "DistributedDataParallelConfig": {"bucket_size": 1000, "overlap_grad_reduce": True, "grad_reduce_in_fp32": False,
                                      "check_for_large_grads": True, "use_distributed_optimizer": False,
                                      "align_param_gather": False},
}  # fmt: skip


def forget():
    """Megatron notes the attention backend in the environment, and refuses another one later."""
    for name in ("FLASH", "FUSED", "UNFUSED"):
        os.environ.pop(f"NVTE_{name}_ATTN", None)


@pytest.fixture(scope="module")
def parts(megatron, hf_model):
    """(Megatron fields) -> (TransformerConfig, DDP config, OptimizerConfig) as the trainer makes them."""
    from megatron.core.transformer import TransformerConfig
    from miles_megatron import families, model, optimizer
    from miles_megatron.config_overrides import overrides_for

    hf = hf_model().config
    spec = families.FAMILIES[hf.model_type].model_spec(hf)

    def make(**given):
        layout = model.transformer_config(spec, overrides_for(TransformerConfig, given))
        options = optimizer.OptimizerOptions(megatron=given)
        forget()
        chunk = model.build(layout, spec)
        forget()
        [wrapped] = optimizer.wrap([chunk], layout, options)
        made, _ = optimizer.make_optimizer([wrapped], options)
        return layout, wrapped.ddp_config, made.config

    return make


@pytest.mark.parametrize("owner", FIELDS)
def test_what_somebody_set_arrives(parts, owner):
    place = {"TransformerConfig": 0, "DistributedDataParallelConfig": 1, "OptimizerConfig": 2}[owner]
    found = parts(**FIELDS[owner])[place]
    for name, value in FIELDS[owner].items():
        arrived = getattr(found, name)
        assert getattr(arrived, "name", arrived) == value, name


def test_the_defaults_are_those_of_megatron_lms_scripts(parts):
    """Where they differ from the dataclass's, unless the layers that run here have no use for the switch."""
    from miles_megatron.flags import megatron_lm_defaults
    from miles_megatron.model import ALWAYS_OFF

    configs = parts()
    reached = set()
    for name, value in megatron_lm_defaults().items():
        for config in configs:
            if name in {field.name for field in dataclasses.fields(config)} and name not in ALWAYS_OFF:
                assert getattr(config, name) == value, name
                reached.add(name)
    assert reached == {"attention_softmax_in_fp32", "deallocate_pipeline_outputs", "optimizer_offload_fraction",
                       "align_param_gather"}


def test_every_accepted_field_has_a_class_that_takes_it(megatron):
    """No owner of the surface is without a reader; the architecture's own are compared with the checkpoint."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig
    from miles_megatron.surface import surface

    from miles_core.config.tables import Optimizer

    names = {f.name for kind in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
             for f in dataclasses.fields(kind)}
    left = {name for name, field in surface().items()
            if name not in names and field.owner not in ("GPTModel", "MLATransformerConfig")}
    assert left == {"lr_decay_style"} and hasattr(Optimizer(), "lr_decay_style")


@pytest.mark.parametrize("given", [
    {"rotary_base": 10000}, {"share_embeddings_and_output_weights": True}, {"position_embedding_type": "none"},
    {"activation_func": "gelu"}, {"q_lora_rank": 64}, {"rope_scaling": True}, {"rope_scaling_factor": 2.0},
], ids=lambda given: next(iter(given)))  # fmt: skip
def test_what_the_checkpoint_decides_cannot_be_set_otherwise(hf_model, given):
    from miles_megatron import families
    from miles_megatron.config_overrides import check_architecture

    hf = hf_model(False, False).config
    with pytest.raises(ConfigError, match=next(iter(given))):
        check_architecture(given, families.FAMILIES[hf.model_type].model_spec(hf))


def test_what_agrees_with_the_checkpoint_is_accepted(hf_model):
    """The architecture section of a Megatron-LM launch script, as it is usually written."""
    from miles_megatron import families
    from miles_megatron.config_overrides import check_architecture

    hf = hf_model(False, False).config
    spec = families.FAMILIES[hf.model_type].model_spec(hf)
    check_architecture({"rotary_base": int(spec.rotary.theta), "share_embeddings_and_output_weights": False,
                        "position_embedding_type": "rope", "activation_func": "silu"}, spec)


@pytest.mark.parametrize("given", [{"average_in_collective": True}, {"use_precision_aware_optimizer": True},
                                   {"main_grads_dtype": "fp7"}], ids=lambda given: next(iter(given)))
def test_what_megatron_refuses_is_an_error_of_the_configuration(parts, given):
    with pytest.raises(ConfigError):
        parts(**given)


def test_reductions_that_overlap_the_backward_pass_wait_for_the_last_micro_batch(parts):
    layout, ddp, _ = parts(overlap_grad_reduce=True)
    assert ddp.overlap_grad_reduce and layout.no_sync_func is not None
