"""A torch_dist checkpoint as Megatron-LM and Miles's converter write it: Megatron-core alone, nothing of this project.

    python plain_megatron.py HF_FOLDER OUT '{"tensor": 2}'

in one process per rank, which RANK, WORLD_SIZE and MEET tell where it is. Weights are those of a Hugging Face Qwen3 or
Qwen3-MoE, so that whoever reads the checkpoint has something to compare with.
"""

import argparse
import io
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def fused_spec(sparse):
    """The layer under Transformer Engine's names: a norm is part of the linear layer that follows it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class NormThenLinear(ColumnParallelLinear):
        def __init__(self, input_size, output_size, **options):
            super().__init__(input_size, output_size, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)

    made = get_gpt_layer_local_spec(num_experts=4 if sparse else None, qk_layernorm=True, normalization="RMSNorm")
    inside = made.submodules
    inside.sharded_state_dict_keys_map = {}
    inside.input_layernorm = IdentityOp
    inside.self_attention.submodules.linear_qkv = NormThenLinear
    if not sparse:
        inside.pre_mlp_layernorm = IdentityOp
        inside.mlp.submodules.linear_fc1 = NormThenLinear
    return made


def build(hf, tensor, options):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = hf["num_experts"]
    mixture = {"num_moe_experts": experts, "moe_router_topk": 2,
               "moe_ffn_hidden_size": hf["moe_intermediate_size"]} if experts else {}
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"], num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"], ffn_hidden_size=hf["intermediate_size"], gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, normalization="RMSNorm", qk_layernorm=True,
        use_cpu_initialization=True, perform_initialization=False, tensor_model_parallel_size=tensor,
        params_dtype=torch.float32, hetereogenous_dist_checkpoint=options.get("apart", False),
        gradient_accumulation_fusion=False, add_bias_linear=False, **mixture)
    spec = fused_spec(bool(experts)) if options.get("fused") else get_gpt_layer_local_spec(
        num_experts=experts, qk_layernorm=True, normalization="RMSNorm")
    multiple = options.get("divisible", 128) * tensor
    padded = -(-hf["vocab_size"] // multiple) * multiple
    return GPTModel(config, spec, padded, 256, position_embedding_type="rope", parallel_output=True,
                    share_embeddings_and_output_weights=hf["tie_word_embeddings"],
                    pre_process=parallel_state.is_pipeline_first_stage(),
                    post_process=parallel_state.is_pipeline_last_stage())


def whole(name, hf, tensors):
    """A parameter of the whole model by Megatron's name of it."""
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return tensors["model.embed_tokens.weight" if name.startswith("emb") else "lm_head.weight"]
    if name == "decoder.final_layernorm.weight":
        return tensors["model.norm.weight"]
    number, _, rest = name.removeprefix("decoder.layers.").partition(".")
    layer = f"model.layers.{number}."
    plain = {"input_layernorm.weight": "input_layernorm",
             "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
             "pre_mlp_layernorm.weight": "post_attention_layernorm", "mlp.router.weight": "mlp.gate",
             "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm",
             "self_attention.q_layernorm.weight": "self_attn.q_norm",
             "self_attention.linear_proj.weight": "self_attn.o_proj",
             "self_attention.k_layernorm.weight": "self_attn.k_norm", "mlp.linear_fc2.weight": "mlp.down_proj"}
    if rest in plain:
        return tensors[f"{layer}{plain[rest]}.weight"]
    if rest == "self_attention.linear_qkv.weight":
        groups, size, width = hf["num_key_value_heads"], hf["head_dim"], hf["hidden_size"]
        q, k, v = (tensors[f"{layer}self_attn.{one}_proj.weight"].view(groups, -1, size, width) for one in "qkv")
        return torch.cat([q, k, v], 1).reshape(-1, width)
    expert = layer + "mlp."
    if "local_experts" in rest:
        expert += f"experts.{rest.split('.')[3]}."
        if rest.endswith("linear_fc2.weight"):
            return tensors[expert + "down_proj.weight"]
    return torch.stack([tensors[f"{expert}{part}_proj.weight"] for part in ("gate", "up")])


def fill(model, hf, tensors, rank, tensor):
    for name, parameter in model.named_parameters():
        value = whole(name, hf, tensors)
        if value.dim() == 3:  # both halves of a gated layer are cut
            value = value.chunk(tensor, 1)[rank].reshape(-1, value.shape[-1])
        elif "word_embeddings" in name or name == "output_layer.weight":
            padded = torch.randn(parameter.shape[0] * tensor, value.shape[1])
            padded[: len(value)] = value
            value = padded.chunk(tensor)[rank]
        elif cut := [dim for dim, size in enumerate(parameter.shape) if size != value.shape[dim]]:
            value = value.chunk(tensor, cut[0])[rank]
        parameter.data.copy_(value)


def save(folder, out, options):
    """Rank and groups are there; writes `out` as Megatron-LM's save_checkpoint does."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    hf, tensor = json.loads((Path(folder) / "config.json").read_text()), options.get("tensor", 1)
    hf["num_experts"] = hf.get("num_experts", hf.get("num_local_experts"))
    tensors = {name: one for file in Path(folder).glob("*.safetensors") for name, one in load_file(file).items()}
    model = build(hf, tensor, options)
    fill(model, hf, tensors, dist.get_rank(), tensor)
    metadata = {"singleton_local_shards": options.get("singleton", False), "chained_optim_avoid_prefix": True}
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    extra = io.BytesIO(b"whatever Transformer Engine keeps")
    state["model"]["decoder.layers.0.self_attention.core_attention._extra_state"] = ShardedObject(
        "decoder.layers.self_attention.core_attention._extra_state", extra, (1,), (0,), replica_id=dist.get_rank())
    state["rng_state"] = ShardedObject("rng_state", [{"np_rng_state": ("MT19937", 1)}], (1,), (0,),
                                       replica_id=dist.get_rank())
    state |= {"args": argparse.Namespace(num_layers=2, path=Path("/x"), params_dtype=torch.bfloat16),
              "checkpoint_version": 3.0, "iteration": options.get("iteration", 0), "content_metadata": metadata}
    if "iteration" in options:
        state["optimizer"] = {"param_groups": [{"lr": 1e-5}]}
    where = Path(out) / options.get("folder", "iter_0000000")
    if dist.get_rank() == 0:
        where.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(where))
    if dist.get_rank() == 0:
        (Path(out) / "latest_checkpointed_iteration.txt").write_text(options.get("tracker", "0"))
    dist.barrier()


if __name__ == "__main__":
    import torch.distributed as dist
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # All that saving wants of a GPU.
        torch.cuda.synchronize, torch.cuda.current_device = lambda *_: None, lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    parallel_state.initialize_model_parallel(json.loads(sys.argv[3]).get("tensor", 1))
    save(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
