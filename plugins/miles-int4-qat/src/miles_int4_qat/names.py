"""Which weights are int4, and how a directory says so: compressed-tensors' "pack-quantized". No torch here.

https://github.com/vllm-project/compressed-tensors; a weight X.weight is stored as X.weight_packed, X.weight_scale and
X.weight_shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from miles_megatron import hf_config
from miles_megatron.specs import TOWERS

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import reading

PARTS = ("packed", "scale", "shape")
GROUPS = (32, 64, 128)
"""Group sizes that SGLang's kernels take."""
USUAL = 32

_EXPERT = re.compile(r"\.layers\.\d+\.(?:[\w.]*\.)?experts\.\d+\.(?:gate|up|down|gate_up)_proj\.weight$"
                     r"|\.layers\.\d+\.(?:[\w.]*\.)?experts\.\d+\.w[123]\.weight$")
_LINEAR = re.compile(rf"^(?!{TOWERS})" r".*\.layers\.\d+\."
                     r"(?:self_attn\.(?:[qkvo]|qkv)_proj|(?:[\w.]*\.)?(?:gate|up|down|gate_up)_proj)\.weight$")
_FUSED_EXPERTS = re.compile(r"(\.layers\.\d+\.(?:[\w.]*\.)?experts)\.\w+$")
"""Experts that are one tensor, which is not called a weight."""
_TABLE = re.compile(r"embed(?!.*proj)")
"""Embeddings, which are no linear layers; what projects them is one."""
_NUMBER = re.compile(r"(?<=\\\.)\d+(?=\\\.)")
_FUSED = {"gate_proj": "(gate|gate_up)_proj", "up_proj": "(up|gate_up)_proj"}
"""Engines that keep two projections as one look that name up, too."""


@dataclass(frozen=True, slots=True)
class Stated:
    """What config.json says about weights that are stored as int4.

    Args:
        group_size: weights that share a scale.
        ignore: names of modules that are not, or regular expressions behind "re:".
    """

    group_size: int
    ignore: tuple[str, ...]


def chosen(names: Collection[str], targets: str) -> frozenset[str]:
    """Of a model's tensors, the weights to quantise.

    Args:
        targets: "experts" for routed experts, "linears" for these and the projections of attention and MLPs, shared
            experts included; "auto" for experts where there are any, else linears. Never a router, a norm, an
            embedding, the output layer or what a tower for images or sound has, nor experts that are one tensor.
    """
    experts = frozenset(name for name in names if _EXPERT.search(name))
    if targets == "experts" or (targets == "auto" and (experts or any(map(_FUSED_EXPERTS.search, names)))):
        return experts
    return experts | {name for name in names if _LINEAR.search(name)}


def stated(folder: Path) -> Stated | None:
    """What a Hugging Face directory says; None where its weights are plain.

    Raises:
        CheckpointError: config.json cannot be read.
        ConfigError: they are quantised in another way.
    """
    path = folder / "config.json"
    quantization = hf_config.quantization(folder)
    if not quantization:
        return None
    with reading(str(path), CheckpointError):
        groups = list((quantization.get("config_groups") or {}).values())
        weights = [group.get("weights") or {} for group in groups]
        kinds = {(one.get("num_bits"), one.get("type", "int"), one.get("symmetric", True), one.get("strategy"),
                  one.get("group_size"), bool(one.get("actorder"))) for one in weights}
        plain = len(kinds) == 1 and not any(group.get("input_activations") for group in groups)
        bits, kind, symmetric, strategy, size, reordered = next(iter(kinds)) if plain else (None,) * 6
        method, layout = quantization.get("quant_method"), quantization.get("format")
        ours = (method == "compressed-tensors" and layout == "pack-quantized" and plain
                and (bits, kind, symmetric, strategy, reordered) == (4, "int", True, "group", False))
        if not ours or not isinstance(size, int):
            raise ConfigError("the checkpoint's weights are quantised in a way that plugin int4-qat does not train",
                              got=f"{method}, format {layout}, weights {weights}", code="int4-format-unsupported",
                              who=str(path), fix="use a directory that `miles convert hf-to-int4` wrote")
        return Stated(size, tuple(quantization.get("ignore") or ()))


def packed_names(folder: Path, statement: Stated, names: Collection[str]) -> frozenset[str]:
    """The weights that a directory stores as int4: those in its files; without files, what its config.json implies.

    Args:
        names: of all tensors of the model.

    Raises:
        CheckpointError: the files hold scales for groups of another size than config.json says.
    """
    from miles_megatron.shards import stored_tensors, tensor_files

    if not any(folder.glob("*.safetensors")):
        return frozenset(name for name in chosen(names, "linears") if not _ignored(name, statement.ignore))
    files = tensor_files(folder)
    bases = [name.removesuffix("_packed") for name in files if name.endswith(".weight_packed")]
    if bases:
        packed, scale = (stored_tensors(files[name])[name].shape
                         for name in (f"{bases[0]}_packed", f"{bases[0]}_scale"))
        if packed[-1] * 8 != scale[-1] * statement.group_size:
            raise CheckpointError(f"config.json says groups of {statement.group_size}", code="int4-group-size-mismatch",
                                  got=f"{bases[0]}: {scale[-1]} scales for {packed[-1] * 8} weights", who=str(folder),
                                  fix="convert the checkpoint again")
    return frozenset(bases)


def quantization_config(names: Collection[str], packed: Collection[str], group_size: int) -> dict[str, object]:
    """The key quantization_config of config.json.

    Args:
        names: of all tensors of the checkpoint.
        packed: those of them that are stored as int4.
    """
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size,
               "dynamic": False, "actorder": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "kv_cache_scheme": None, "ignore": ignored(names, packed)}


def ignored(names: Collection[str], packed: Collection[str]) -> list[str]:
    """Regular expressions for the modules that stay as they are, as few as tell them from the packed ones.

    A block without packed weights, such as attention, is one expression: an engine may fuse what is in it.
    """
    quantised = [name.removesuffix(".weight") for name in packed]
    patterns = {"lm_head": None}
    for name in names:
        fused = _FUSED_EXPERTS.search(name)
        module = name[: fused.end(1)] if fused else name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        if name in packed or not (fused or name.endswith(".weight")) or "norm" in leaf or _TABLE.match(leaf):
            continue
        if not any(re.match(pattern.removeprefix("re:"), module) for pattern in patterns):
            patterns[_pattern(module, quantised)] = None
    return list(patterns)


def _pattern(module: str, quantised: Collection[str]) -> str:
    """The widest expression for a module that matches no quantised one.

    What stands in front is left open: engines and transformers have other names for the model around a decoder.
    """
    path = module.split(".")
    first = path.index("layers") if "layers" in path else len(path) - 1
    ends = [f"{re.escape(word)}\\..*" for word in path[:first]]
    ends += [f"{_of_any_number('.'.join(path[first:length]))}\\..*" for length in range(first + 3, len(path))]
    block = "".join(f"{_of_any_number(word)}\\." for word in [".".join(path[first:-1])] if word)
    ends += [f"{block}{_FUSED.get(path[-1], re.escape(path[-1]))}$"]
    ends += [f"{re.escape('.'.join(path[first:]))}$"]  # only some layers: these alone
    for end in ends:
        if not any(re.match(f"(.*\\.)?{end}", one) for one in quantised):
            return f"re:(.*\\.)?{end}"
    return f"re:{re.escape(module)}$"


def _of_any_number(path: str) -> str:
    return _NUMBER.sub(lambda _: r"\d+", re.escape(path) + r"\.")[:-2]


def _ignored(name: str, ignore: Collection[str]) -> bool:
    module = name.removesuffix(".weight")
    return any(re.match(one[3:], module) if one.startswith("re:") else one == module for one in ignore)


def check_width(name: str, width: int, group_size: int, ranks: int = 1) -> None:
    """
    Args:
        width: of this rank's part of the input axis.
        ranks: among how many it is cut.

    Raises:
        ConfigError: groups do not divide it.
    """
    if width % group_size:
        among = f" on each of {ranks} tensor-parallel ranks" if ranks > 1 else ""
        fits = [size for size in GROUPS if width % size == 0]
        fix = f"groups of {' or '.join(map(str, fits))} would fit" if fits else (
            "use fewer tensor-parallel ranks" if ranks > 1 else "choose other targets, or leave the weight as it is")
        raise ConfigError(f"groups of {group_size} do not divide the input axis of {name}", got=f"{width}{among}",
                          who="plugin int4-qat", code="int4-group-not-divisible", fix=fix)


def differing(option: str, wanted: Collection[str], stored: Collection[str], who: str) -> None:
    """
    Raises:
        ConfigError: the run names other layers than the engine's checkpoint has in int4.
    """
    from miles_megatron.shards import few

    if wanted := set(wanted) ^ set(stored):
        raise ConfigError("the engine's checkpoint has other layers in int4 than the run trains for",
                          code="int4-layers-differ", got=few(sorted(wanted), 3), who=f"{option}, {who}",
                          fix=f"leave {option} out")
