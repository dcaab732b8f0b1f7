"""Recipes: blocks, scales and names of FP8 weights, and which tensors of a model have them. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_megatron.specs import TOWERS

from miles_core.errors import CheckpointError, ConfigError

RECIPES = ("blockwise", "tensorwise", "mxfp8")
NVFP4 = "nvfp4"
"""The recipe in four bits (nvfp4.py)."""
SCALES = ("weight_scale_inv", "weight_scale")
"""Last parts of the names of scales."""
READ = (*SCALES, "scale")
"""The same of files that others wrote; the last is DeepSeek-V4's."""
SCALE_OF_SCALES = "weight_scale_2"
"""That of the one which NVFP4 has beside."""
OF_ACTIVATIONS = (".input_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales that say nothing of weights."""

_LINEAR = re.compile(
    rf"^(?!{TOWERS})"
    r"(?:.*\.)?(?:mtp_)?layers\.\d+\.(?:.+\.)?(?:"
    r"[qkvo]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|down_proj|w[123]"  # attention, dense MLPs, experts
    r"|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|wq_b|wk"  # latent attention and its indexer
    r"|in_proj_qkvz?|in_proj_z|out_proj"  # linear attention
    r")\.weight$"
)
"""Weights that FP8 checkpoints hold in FP8: the linear layers of decoder and multi-token-prediction layers. Norms,
embeddings, routers, gates of shared experts, the output layer, biases, and towers for images or sound are none of
them."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a matrix is cut for scales.

    Args:
        rows, columns: of a tile; None for one tile that is the whole matrix.
        powers: scales are powers of two, rounded up.
        four_bits: values are E2M1 and scales E4M3.
    """

    rows: int | None = None
    columns: int | None = None
    powers: bool = False
    four_bits: bool = False


WEIGHTS = {"blockwise": Tiles(128, 128), "tensorwise": Tiles(), "mxfp8": Tiles(1, 32, powers=True)}
ROWS = {"blockwise": Tiles(1, 128), "tensorwise": Tiles(), "mxfp8": Tiles(1, 32, powers=True)}
"""Of activations and gradients, [tokens, channels]."""
FOUR_BITS = Tiles(1, 16, four_bits=True)


def tiles(recipe: str, table: Mapping[str, Tiles] | None = None) -> Tiles:
    """Of a recipe, of WEIGHTS or ROWS; NVFP4 has the same in both."""
    return FOUR_BITS if recipe == NVFP4 else (table or WEIGHTS)[recipe]


def linear(name: str) -> bool:
    """Whether a checkpoint's tensor is the weight of a linear layer that FP8 is for."""
    return _LINEAR.search(name) is not None


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor belongs to."""
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return int(match[1]) if match and not re.search(r"(?:^|\.)mtp\.layers\.", name) else None


@dataclass(frozen=True, slots=True)
class Held:
    """The weights of an engine or of a checkpoint.

    Args:
        tiles: of each weight.
        recipe: which of RECIPES that is, for names and dtypes.
        excluded: modules that stay as they are, by name, by a name that they lie within, or by the end of theirs.
        scaled: names of all scales, where a checkpoint says them; it is then followed to the letter.
        layers: decoder layers that are quantised; None for all.
    """

    tiles: Tiles
    recipe: str = "blockwise"
    excluded: tuple[str, ...] = ()
    scaled: frozenset[str] | None = None
    layers: frozenset[int] | None = None

    def scale(self, name: str) -> str:
        """What the scale of a weight is called."""
        return name.removesuffix("weight") + SCALES[self.recipe in ("tensorwise", NVFP4)]

    def quantises(self, name: str, shape: Sequence[int]) -> bool:
        """Whether this tensor of the plain model is held in FP8."""
        if not name.endswith(".weight") or len(shape) != 2 or (self.tiles.four_bits and shape[1] % 16):
            return False
        if self.scaled is not None:
            return self.scale(name) in self.scaled
        layer = layer_of(name)
        if not linear(name) or (self.layers is not None and layer is not None and layer not in self.layers):
            return False
        return not is_excluded(name.removesuffix(".weight"), self.excluded)

    @property
    def config(self) -> dict[str, object]:
        """What config.json says of it, but for the modules that are not converted."""
        if self.recipe == NVFP4:
            weights = {"num_bits": 4, "type": "float", "group_size": FOUR_BITS.columns, "dynamic": False}
            return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": FOUR_BITS.columns,
                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
        entry: dict[str, object] = {"quant_method": "mxfp8" if self.recipe == "mxfp8" else "fp8", "fmt": "e4m3",
                                   "activation_scheme": "dynamic"}
        if self.recipe != "tensorwise":
            entry["weight_block_size"] = [self.tiles.rows, self.tiles.columns]
        if self.recipe == "mxfp8":
            entry["scale_fmt"] = "ue8m0"
        return entry


def plain_key(recipe: str) -> str:
    """What config.json calls the modules that are not converted."""
    return "ignore" if recipe == NVFP4 else "modules_to_not_convert"


def is_excluded(module: str, modules: Sequence[str]) -> bool:
    """Whether a list such as modules_to_not_convert names a module; "model." in front makes no difference."""
    module = module.removeprefix("model.")
    for one in modules:
        one = one.removeprefix("model.").rstrip(".")
        if module == one or module.startswith(f"{one}.") or module.endswith(f".{one}"):
            return True
    return False


def writes(quantization: Mapping[str, object], folder: Path) -> bool:
    """Whether a quantization_config is of FP8 or NVFP4; another method is another plugin's.

    Raises:
        ConfigError: FP8 of a kind that this plugin does not write.
    """
    method = quantization.get("quant_method")
    if method == "modelopt" and quantization.get("quant_algo") == "NVFP4":
        return True
    if method not in ("fp8", "mxfp8", "modelopt"):
        return False
    known = {"quant_method": ("fp8", "mxfp8"), "quant_algo": (None,), "activation_scheme": (None, "dynamic"),
             "fmt": (None, "e4m3", "float8_e4m3fn")}  # the last is MiniMax's
    if wrong := {key: quantization[key] for key, words in known.items() if quantization.get(key) not in words}:
        raise ConfigError("the engine's checkpoint is in an FP8 format that this plugin does not write",
                          code="fp8-format-unsupported", got=wrong, who=str(folder / "config.json"),
                          fix="create one with miles convert hf-to-fp8")
    return True


def of_checkpoint(quantization: Mapping[str, object], folder: Path) -> Held | None:
    """How a checkpoint holds its weights, by the quantization_config of its config.json and the names of its tensors.

    Returns:
        None where they are quantised by other means than FP8.

    Raises:
        ConfigError: FP8 of a kind that this plugin does not write.
        CheckpointError: the index or the headers of its files cannot be read.
    """
    if not writes(quantization, folder):
        return None
    method = quantization.get("quant_method")
    if method == "modelopt":
        left: Any = quantization.get("ignore") or ()
        return Held(FOUR_BITS, NVFP4, tuple(left), _scaled(folder))
    block: Any = quantization.get("weight_block_size")
    if method == "mxfp8":
        recipe, tiles = "mxfp8", WEIGHTS["mxfp8"]
    elif block is None:
        recipe, tiles = "tensorwise", WEIGHTS["tensorwise"]
    else:
        rows, columns = block
        recipe, tiles = "blockwise", Tiles(rows, columns, powers=quantization.get("scale_fmt") == "ue8m0")
    listed: Any = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    return Held(tiles, recipe, tuple(listed), _scaled(folder))


def _scaled(folder: Path) -> frozenset[str] | None:
    """Names of scales in a folder's files; None where it holds a configuration alone."""
    if not any(folder.glob("*.safetensors")):
        return None
    from miles_megatron.shards import tensor_files

    scales = frozenset(name for name in tensor_files(folder) if name.endswith((*SCALES, ".scale")))
    if not scales:
        raise CheckpointError("config.json says FP8, but no tensor has a scale", code="fp8-scales-missing",
                              who=str(folder),
                              fix="fetch the checkpoint again, or take quantization_config out of config.json")
    return scales


def plain_modules(names: Collection[str]) -> list[str]:
    """modules_to_not_convert of a checkpoint: every module with a matrix that stays, which engines look up by name.

    Experts that are one tensor, which is not called a weight, are one module.
    """
    modules = {name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] for name in names}
    return sorted(module for module in modules if f"{module}.weight" in names or module.endswith(".experts"))
