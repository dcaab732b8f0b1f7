"""What sees, beside the embedding of Megatron's language model: transformers' own modules, which train as it does."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from miles_local import repairs  # noqa: F401 - models are built here
from miles_megatron import hf_config
from miles_megatron.disk_names import carried_files
from miles_megatron.specs import Rule, WeightMap
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.modeling_outputs import MoeModelOutputWithPast

from miles_core.types import images_of
from miles_vision.checks import BUILT

if TYPE_CHECKING:
    from miles_megatron.model import LanguageModel

    from miles_core.types import Sample
    from miles_vision.seen import Seen

_OURS = "tower.body."
"""Beginning of the names of its parameters in Megatron's model."""


class _Text(torch.nn.Module):
    """In the text model's place: embeds every token as zeros, and hands on what it gets instead of computing on.

    What the tower has for the outputs of the first layers lies behind the embeddings, [1, L, (1 + layers) x H].
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def get_input_embeddings(self) -> Any:
        return lambda tokens: torch.zeros(*tokens.shape, self.width, device=tokens.device)

    def forward(self, inputs_embeds: torch.Tensor, visual_pos_masks: torch.Tensor | None = None,
                deepstack_visual_embeds: Sequence[torch.Tensor] = (), **_: Any) -> MoeModelOutputWithPast:
        nothing = torch.zeros_like(inputs_embeds)
        behind = [nothing.masked_scatter(cast("torch.Tensor", visual_pos_masks)[..., None], one.to(nothing))
                  for one in deepstack_visual_embeds]
        return MoeModelOutputWithPast(last_hidden_state=torch.cat([inputs_embeds, *behind], -1))


def _whole(folder: Path) -> Any:
    """A checkpoint's model as transformers has it, without weights."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


_skeleton = functools.cache(_whole)
"""The same, for who changes nothing of it."""


def _seeing(whole: Any) -> dict[str, torch.nn.Module]:
    """Those parts of a model that are not the text model or around it, by name."""
    text = whole.get_decoder()
    return {name: part for name, part in whole.base_model.named_children()
            if all(one is not text for one in part.modules())}


def mapped(weight_map: WeightMap, folder: Path) -> WeightMap:
    """The map with rules for what the checkpoint has beside the text model.

    Args:
        folder: with config.json.
    """
    if hf_config.read(folder).model_type not in BUILT:
        return weight_map
    whole = _skeleton(folder)
    stored = {theirs.removeprefix(f"{whole.base_model_prefix}."): theirs for theirs in weight_map.carried}
    named = {key: theirs + key.removeprefix(begun)
             for name, part in _seeing(whole).items() for key in part.state_dict(prefix=f"{name}.")
             for begun, theirs in stored.items() if key.startswith(begun)}
    named |= _read_as(whole, folder, weight_map)
    rules = [Rule(_OURS + ours, (theirs,)) for ours, theirs in named.items()]
    own = tuple((theirs, theirs) for theirs in weight_map.carried)  # not renamed as the text model's are
    return replace(weight_map, rules=(*weight_map.rules, *rules), renamed=(*own, *weight_map.renamed), carried=())


def _read_as(whole: Any, folder: Path, weight_map: WeightMap) -> dict[str, str]:
    """Names of the module's tensors beside the text model -> those of the files that transformers reads them from."""
    built, begun = whole.state_dict(), f"{whole.base_model_prefix}."
    renamings = [one for one in get_model_conversion_mapping(whole) if isinstance(one, WeightRenaming)]
    names = {rename_source_key(theirs, renamings, [], whole.base_model_prefix, built)[0]: theirs
             for theirs in carried_files(folder, weight_map)}
    return {ours.removeprefix(begun): theirs for ours, theirs in names.items() if ours in built}


def attach(chunk: LanguageModel, folder: Path, weight_map: WeightMap) -> None:
    """Give the part of a model that has the embedding a `tower`, if its map has one.

    Args:
        folder: with config.json.
    """
    if not any(rule.megatron.startswith(_OURS) for rule in weight_map.rules):
        return
    chunk.tower = Tower(folder, chunk.config.recompute_granularity == "full")
    for parameter in chunk.tower.parameters():
        parameter.sequence_parallel = chunk.config.sequence_parallel


class Tower(torch.nn.Module):
    """A checkpoint's model without its text model, randomly initialised.

    Args:
        folder: with config.json.
        recompute: what is seen once more in the backward pass, instead of keeping activations.
    """

    def __init__(self, folder: Path, recompute: bool = False):
        super().__init__()
        whole = _whole(folder)
        config, seeing = whole.config, _seeing(whole)
        self.body, size = whole.base_model, config.get_text_config().hidden_size
        for name, part in [*self.body.named_children()]:  # once more, for buffers that are in no file
            own = type(part)(getattr(part, "config", config)) if name in seeing else _Text(size)
            setattr(self.body, name, own)
        layers = sum(len(cast("Any", part).deepstack_merger_list) for part in seeing.values()
                     if hasattr(part, "deepstack_merger_list"))
        self._width = (1 + layers) * size
        self.eval()
        self.recompute = recompute

    def forward(self, sample: Sample, seen: Seen) -> dict[int, torch.Tensor]:
        """See the hook embedding_rows."""
        trained = [one for one in self.parameters() if one.requires_grad]
        if not images_of(sample.prompt, sample):
            # No rows, of which every parameter has a gradient, of zero: Megatron may wait for it to add up ranks'.
            none = [one.flatten()[:0] for one in trained]
            return {0: torch.cat(none).view(0, self._width)} if none and torch.is_grad_enabled() else {}
        device = next(self.parameters()).device
        inputs = {name: one.to(device) for name, one in seen.of_sample(self.body, sample).items()}
        places = (inputs["input_ids"] == seen.placeholders[0]).nonzero()[:, 0]
        arguments = {name: one[..., None, :] if name.endswith("_ids") else one for name, one in inputs.items()}
        again = self.recompute and trained and torch.is_grad_enabled()
        whole = checkpoint(self._see, arguments, use_reentrant=False) if again else self._see(arguments)
        runs = _runs(places)
        return dict(zip(runs, whole[places].split([*runs.values()]), strict=True))

    def _see(self, arguments: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """[L, H] of a sequence of tokens, zeros where nothing is seen."""
        rows: torch.Tensor = self.body(**arguments, use_cache=False).to_tuple()[0][0]  # Llama 4's calls them logits
        return rows


def _runs(places: torch.Tensor) -> dict[int, int]:
    """Of rising numbers, those that follow one another: the first -> how many."""
    begins = (places.diff(prepend=places.new_tensor([-2])) != 1).nonzero()[:, 0].tolist()
    sizes = [end - begin for begin, end in zip(begins, [*begins[1:], len(places)], strict=True)]
    return dict(zip(places[begins].tolist(), sizes, strict=True))


def rope_positions(folder: Path, sample: Sample, seen: Seen) -> dict[int, torch.Tensor]:
    """See the hook of that name.

    Args:
        folder: with config.json.
    """
    body = _skeleton(folder).base_model
    if not images_of(sample.prompt, sample) or not hasattr(body, "get_rope_index"):
        return {}
    return {0: seen.of_sample(body, sample)["position_ids"]}


def attention_blocks(folder: Path, sample: Sample, seen: Seen) -> dict[int, int]:
    """See the hook of that name: the images of a model that takes `token_type_ids` to know them.

    Args:
        folder: with config.json.
    """
    body = _skeleton(folder).base_model
    if not images_of(sample.prompt, sample) or "token_type_ids" not in inspect.signature(body.forward).parameters:
        return {}
    return _runs(seen.of_sample(body, sample)["token_type_ids"].nonzero()[:, 0])
