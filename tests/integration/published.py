"""Tiny checkpoints laid out as published ones are: keys of config.json, names, dtypes and files of tensors.

published.json has what is known of each, under the key it has there:

    repository, model_type, files
                the name on the hub, and how many files its tensors are in
    config      config.json, written down by hand; sizes that make a model large are replaced (SIZES, and `sizes`)
    generation_config
                generation_config.json
    like, inside
                see parity.Case
    drafts      names of its layers for multi-token prediction: "nextn", "mtp" or "mimo"
    quantised   "fp8" (blocks with weight_scale_inv), "int4" (compressed-tensors), "mxfp4", or "fp8-mxfp4" (DeepSeek-V4)
    float32     ends of names of tensors that are float32 in a checkpoint of another dtype
    beside      further tensors, by their shapes
    head_beside_tie, frequencies, consolidated, packed, transposed
                lm_head.weight beside tied embeddings; rotary_emb.inv_freq in each layer; all weights once more in
                consolidated.safetensors; the experts of a layer in two tensors; the rows
                and columns of these the other way round than transformers writes them
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from miles_fp8.recipe import WEIGHTS, Tiles, linear
from miles_fp8.rounding import quantise as to_fp8
from miles_int4_qat import quantise as int4
from miles_megatron.shards import shard_name, write_index
from miles_megatron.testing.checkpoints import packed_experts
from miles_megatron.testing.parity import inside_name
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "arithmetic"
SIZES: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "first_k_dense_replace": 1, "num_experts": 8,
    "n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 24,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "query_pre_attn_scalar": 32, "initializer_range": 0.1,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32, "depth": 1,
         "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
"""The same of a vision tower."""
IDS = {"eos_token_id": (258, 256, 257), "bos_token_id": (257,), "pad_token_id": (256,)}
"""Special tokens of the tokenizer of the tiny checkpoints, in the places of the published ones."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """One entry of published.json."""

    repository: str
    model_type: str
    files: int
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    like: str = ""
    inside: str = ""
    drafts: str = ""
    quantised: str = ""
    float32: tuple[str, ...] = ()
    beside: Mapping[str, list[int]] = field(default_factory=dict)
    head_beside_tie: bool = False
    frequencies: bool = False
    consolidated: bool = False
    packed: bool = False
    transposed: bool = False

    def __str__(self) -> str:
        return self.repository.partition("/")[2]

    @property
    def hf_config(self) -> dict[str, Any]:
        """config.json of the tiny one."""
        return _tiny(self.config, SIZES, self.sizes)


def published() -> list[Published]:
    """All of them."""
    entries = json.loads((HERE / "published.json").read_text(encoding="utf-8"))
    return [Published(**{**one, "float32": tuple(one.get("float32", ()))}) for one in entries]


def write(one: Published, folder: Path, *, plain: bool = False) -> dict[str, torch.Tensor]:
    """Write a random checkpoint; its tensors as they are in the files.

    Args:
        plain: not quantised, though the published one is.
    """
    folder.mkdir(parents=True)
    hf_config = one.hf_config
    if plain:
        for keys in (hf_config, hf_config.get("text_config", {})):
            keys.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(_tiny(one.generation_config, {}, {}), indent=2))
    for file in (EXAMPLES / "tiny-qwen3").glob("*token*"):
        shutil.copy(file, folder)
    tensors = _tensors(one, folder)
    if one.quantised and not plain:
        tensors = {"fp8": _fp8, "int4": _int4, "mxfp4": _mxfp4, "fp8-mxfp4": _fp8_mxfp4}[one.quantised](tensors)
    _write_files(one, folder, tensors)
    return tensors


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by the index, or of the one file."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def _tiny(keys: Mapping[str, Any], sizes: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    for key, value in keys.items():
        if key == "text_config":
            tiny[key] = _tiny(value, sizes, own.get(key, {}))
        elif key == "vision_config":
            tiny[key] = {name: TOWER.get(name, each) for name, each in value.items()}
        elif key in IDS and value is not None:
            tiny[key] = list(IDS[key])[:len(value)] if isinstance(value, list) else IDS[key][0]
        elif key.endswith(("_token_index", "_token_id")) and value is not None:
            tiny[key] = 263
        else:
            tiny[key] = sizes.get(key, value)
    return tiny | {key: value for key, value in own.items() if key != "text_config"} | (
        {"text_config": {**tiny["text_config"], **own["text_config"]}} if "text_config" in own else {})


def _tensors(one: Published, folder: Path) -> dict[str, torch.Tensor]:
    """As the published files have them but for quantisation, bfloat16 or as config.json says."""
    whole = {inside_name(one.inside, name): tensor for name, tensor in _model(one, folder).items()}
    if one.packed:
        whole = packed_experts(whole)
    if one.transposed:
        whole = {name: tensor.mT.contiguous() if tensor.dim() == 3 else tensor for name, tensor in whole.items()}
    draw = torch.Generator().manual_seed(1)
    whole |= {name: torch.randn(shape, generator=draw) for name, shape in one.beside.items()}
    if one.drafts:
        whole |= _drafts(one, whole, draw)
    if one.head_beside_tie:
        whole["lm_head.weight"] = whole["model.embed_tokens.weight"].clone()
    text = one.config.get("text_config", one.config)
    dtype = getattr(torch, text.get("dtype") or text.get("torch_dtype") or one.config.get("torch_dtype", "bfloat16"))
    whole = {name: tensor.to(torch.float32 if one.float32 and name.endswith(one.float32) else dtype)
             if tensor.is_floating_point() else tensor for name, tensor in whole.items()}
    if one.frequencies:
        whole |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.rand(8) for n in range(2)}
    return whole


def _model(one: Published, folder: Path) -> dict[str, torch.Tensor]:
    """Of transformers' random model of config.json, under the names that transformers saves."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    hf_config = json.loads((folder / "config.json").read_text())
    hf_config.pop("quantization_config", None)
    hf_config.pop("auto_map", None)
    text = hf_config.get("text_config", hf_config) if one.like else hf_config
    text.pop("quantization_config", None)
    text.pop("auto_map", None)
    config = AutoConfig.for_model(one.like or text.pop("model_type"), **{
        key: value for key, value in text.items() if key != "model_type"})
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_floating_point():  # experts of each token
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, :tensor.shape[1]])
            elif tensor.dim() == 1:
                tensor.add_(0.1 * torch.randn_like(tensor))
    saved = folder / "saved"
    model.save_pretrained(saved)
    tensors = load_file(saved / "model.safetensors")
    shutil.rmtree(saved)
    return tensors


def _drafts(one: Published, whole: Mapping[str, torch.Tensor], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """A layer like the model's last, and what joins it to the model."""
    hidden = SIZES["hidden_size"]
    last = max((name for name in whole if ".layers.1." in name and "visual" not in name), key=len)
    last = last[:last.index(".layers.1.")] + ".layers.1."
    place, vectors, matrix = {
        "nextn": ("model.layers.2.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj"),
        "mtp": ("mtp.layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), "fc"),
        "mimo": ("model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "final_layernorm"), "input_proj"),
    }[one.drafts]
    layer = {name.replace(last, place): tensor + 0.02 * torch.randn(tensor.shape, generator=draw)
             for name, tensor in whole.items() if name.startswith(last)}
    prefix = "mtp." if one.drafts == "mtp" else place
    layer |= {f"{prefix}{name}.weight": torch.rand(hidden, generator=draw) for name in vectors}
    layer[f"{prefix}{matrix}.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=draw)
    if one.drafts == "nextn":
        layer |= {place + "embed_tokens.weight": whole["model.embed_tokens.weight"].clone(),
                  place + "shared_head.head.weight": whole["lm_head.weight"].clone()}
    return layer


def _fp8(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in whole.items():
        if linear(name) and "weights_proj" not in name and not name.endswith(("eh_proj.weight", "mlp.gate.weight")):
            tensors[name], tensors[name + "_scale_inv"] = to_fp8(tensor, WEIGHTS["blockwise"])
        else:
            tensors[name] = tensor
    return tensors


def _int4(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in whole.items():
        if ".mlp.experts." in name:
            values, scale = int4.quantise(tensor, 32, torch.bfloat16)
            tensors |= {name + "_packed": int4.pack(values), name + "_scale": scale,
                        name + "_shape": torch.tensor(tensor.shape, dtype=torch.int32)}
        else:
            tensors[name] = tensor
    return tensors


def _mxfp4(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors, draw = {}, torch.Generator().manual_seed(2)
    for name, tensor in whole.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32)
            tensors[name + "_blocks"] = torch.randint(256, (*shape, 16), generator=draw, dtype=torch.uint8)
            tensors[name + "_scales"] = torch.randint(118, 124, shape, generator=draw, dtype=torch.uint8)
        else:
            tensors[name] = tensor
    return tensors


def _fp8_mxfp4(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Linear layers in FP8 with powers of two, experts in MXFP4."""
    tensors, draw = {}, torch.Generator().manual_seed(2)
    for name, tensor in whole.items():
        scale = name.removesuffix("weight") + "scale"
        if ".ffn.experts." in name:
            shape = (len(tensor), tensor.shape[1] // 2)
            tensors[name] = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
            exponents = torch.randint(118, 124, (len(tensor), tensor.shape[1] // 32), generator=draw, dtype=torch.uint8)
            tensors[scale] = exponents.view(torch.float8_e8m0fnu)
        elif name.endswith(("wq_a.weight", "wq_b.weight", "wkv.weight", "wo_b.weight")) or ".shared_experts." in name:
            tensors[name], powers = to_fp8(tensor, Tiles(128, 128, powers=True))
            tensors[scale] = powers.to(torch.float8_e8m0fnu)
        else:
            tensors[name] = tensor
    return tensors


def _write_files(one: Published, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """As many files as the published one has, some of them empty where the tiny one has fewer tensors."""
    names = [list(tensors)[i::one.files] for i in range(one.files)]
    for number, few in enumerate(names):
        save_file({name: tensors[name].contiguous() for name in few}, folder / shard_name(number, one.files),
                  {"format": "pt"})
    write_index(folder, names, sum(tensor.nbytes for tensor in tensors.values()))
    if one.consolidated:
        save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()},
                  folder / "consolidated.safetensors", {"format": "pt"})
