"""Adapters on the linear layers of a module of transformers, which is whole: y = W x + scale B A x, W frozen.

Whoever shards the module afterwards finds A and B beside W as `lora_A` and `lora_B`, which is what PEFT calls them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from miles_megatron.shards import tensor_files
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from miles_core.errors import CheckpointError, ConfigError
from miles_core.reading import parse_json
from miles_lora import peft
from miles_lora.merging import Stream
from miles_lora.targets import LINEAR, PEFT, Switch, adapter_of, by_itself, called_as, choice, last

_NUMBERED = re.compile(r"\.\d+\.")
"""In the names of what belongs to one of several layers; the embedding and the output layer have no number."""
_OURS = re.compile(r"\.lora_[AB]\.weight$")


def attach(model: PreTrainedModel, folder: Path, wanted: Sequence[str], excluded: Sequence[str], shape: peft.Shape,
           seed: int, switch: Switch) -> None:
    """Freeze a module and add fresh adapters: A drawn by the seed and the layer's name, B 0.

    Args:
        folder: where it comes from.
        wanted, excluded: see `targets.chosen`.

    Raises:
        ConfigError: a layer that the module does not have, or that can have no adapter.
    """
    model.requires_grad_(False)
    text = set(model.get_decoder().modules())  # not a tower beside it, as with Megatron's layers
    layers = {name: part for name, part in model.named_modules()
              if isinstance(part, torch.nn.Linear) and _NUMBERED.search(name) and part in text}
    experts = _stacked(model, folder)
    chosen = choice({*layers, *experts}, wanted, excluded)
    if stacked := sorted({*map(last, chosen & experts)}):
        raise ConfigError("experts that are one tensor can have no adapters", got=", ".join(stacked),
                          who=f"plugin lora, {type(model).__name__}", code="lora-experts-stacked",
                          fix=f"add --exclude-modules {','.join(stacked)}, or train with --trainer megatron")
    for name, layer in layers.items():
        if name in chosen:
            _on_layer(layer, shape, peft.drawn(shape.rank, layer.in_features, f"{seed}/{name}"), switch)


def fill(model: PreTrainedModel, folder: Path) -> None:
    """The adapters of a module from the tensors of a folder.

    Raises:
        CheckpointError: adapters of other layers, or of another rank.
    """
    def by_layer(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        adapters = ((adapter_of(name), tensor) for name, tensor in tensors)
        return {f"{by_itself(one[0])}, {one[1]}": tensor for one, tensor in adapters if one is not None}

    stored = by_layer(peft.tensors(folder))
    own = by_layer((name, one) for part, one in model.named_parameters() if _OURS.search(part)
                   for name, _ in named(revert_weight_conversion(model, {part: one}).items()))
    differing = sorted(stored.keys() ^ own.keys()) or [
        name for name, one in own.items() if one.shape != stored[name].shape]
    if differing:
        raise CheckpointError("the initial adapters do not match the run", who=str(folder), got=differing[0],
                              fix="use the layers and the rank of the directory", code="lora-initial-adapters-differ")
    with torch.no_grad():
        for name, one in own.items():
            one.copy_(stored[name])


def inside(folder: Path) -> Callable[[str], str]:
    """What a folder's files call a weight -> what transformers' module calls it, by which PEFT knows its adapter.

    They differ where a text model lies in one that sees, and the release called it otherwise.
    """
    constants = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    if constants["model_type"] not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return str
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return called_as(AutoModelForImageTextToText.from_config(config).state_dict())


def has_adapters(folder: Path) -> bool:
    """Whether there are adapters among the weights of a folder, as `miles convert dist-to-hf` leaves them."""
    return any(folder.glob("*.safetensors")) and any(adapter_of(name) is not None for name in tensor_files(folder))


def named(stream: Iterable[tuple[str, torch.Tensor]]) -> Stream:
    """The same with adapters under PEFT's names."""
    for name, tensor in stream:
        yield f"{PEFT}{name}" if _OURS.search(name) and adapter_of(name) is None else name, tensor


def _stacked(model: PreTrainedModel, folder: Path) -> set[str]:
    """The names that experts have on disk, if the module holds those of a layer as one tensor."""
    if not any(one.dim() == 3 and _NUMBERED.search(name) for name, one in model.named_parameters()):
        return set()
    return {name for name in tensor_files(folder) if ".experts." in name and LINEAR.search(last(name))}


def _on_layer(layer: torch.nn.Linear, shape: peft.Shape, first: torch.Tensor, switch: Switch) -> None:
    """
    Args:
        first: [rank, inputs], what A begins as.
    """
    like: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
    down = torch.nn.utils.skip_init(torch.nn.Linear, layer.in_features, shape.rank, **like)
    up = torch.nn.utils.skip_init(torch.nn.Linear, shape.rank, layer.out_features, **like)
    with torch.no_grad():
        down.weight.copy_(first)
        up.weight.zero_()
    layer.lora_A, layer.lora_B = down, up

    def adapted(_layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + shape.scale * up(down(inputs[0])) if switch.on else output

    layer.register_forward_hook(adapted)
