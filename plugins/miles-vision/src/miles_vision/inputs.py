"""What the model takes beside tokens: pixels, and positions by the architecture's own rule. One function of the same
token ids and the same files for engine and trainer."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.errors import EngineError
from miles_vision.images import opened

if TYPE_CHECKING:
    import torch

Pixels = dict[str, "torch.Tensor"]


class PixelCache:
    """What the processor makes of images, the latest first, up to so many bytes.

    Args:
        process: transformers' image processor.
    """

    def __init__(self, process: Any, size: int):
        self._process, self._size, self._used = process, size, 0
        self._of: OrderedDict[str, Pixels] = OrderedDict()

    def __call__(self, name: str, read: Callable[[str], bytes]) -> Pixels:
        """Tensors [n, ...] by keyword of the model; `read` gives the file where they have to be made."""
        if name in self._of:
            self._of.move_to_end(name)
            return self._of[name]
        made: Pixels = dict(self._process(images=[opened(read(name))], return_tensors="pt"))
        self._of[name], self._used = made, self._used + _bytes(made)
        while self._used > self._size and len(self._of) > 1:
            self._used -= _bytes(self._of.popitem(last=False)[1])
        return made


def _bytes(pixels: Pixels) -> int:
    return sum(one.numel() * one.element_size() for one in pixels.values())


def sequence_inputs(model: Any, tokens: Sequence[int], pixels: Sequence[Pixels], images: Sequence[bool],
                    ) -> dict[str, torch.Tensor]:
    """See the hooks prefill_inputs and forward_inputs.

    Args:
        tokens: [L].
        images: [L] whether a token stands for a part of an image.
    """
    import torch
    from miles_local.inputs import joined

    takes = inspect.signature(model.forward).parameters
    names = dict.fromkeys(name for one in pixels for name in one)
    whole = {name: joined([one[name] for one in pixels]) for name in names}
    kinds = torch.tensor(images, dtype=torch.int64)
    # Llama 4's processor gives bfloat16, and its model takes pixels as they are.
    inputs = {name: one.to(model.dtype) if one.is_floating_point() else one
              for name, one in whole.items() if name in takes}
    owner = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
    if owner is not None:
        inputs["position_ids"] = _positions(owner, torch.tensor(list(tokens)), kinds, pixels)
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = kinds
    return inputs


def _positions(owner: Any, tokens: torch.Tensor, kinds: torch.Tensor, pixels: Sequence[Pixels]) -> torch.Tensor:
    """[axes, L] by the model's own rule, which goes on after an image from its largest position.

    It takes a run of tokens of one kind for one image. Where images touch it is asked image by image, each with the
    text before it.

    Args:
        owner: what has get_rope_index.
        tokens: [L].
        kinds: [L] 1 where a token stands for a part of an image, else 0.
    """
    import torch

    wanted = inspect.signature(owner.get_rope_index).parameters
    pieces = [(len(tokens), pixels)]
    if int((kinds.diff(prepend=kinds.new_zeros(1)) == 1).sum()) != len(pixels):
        pieces = [*zip(_ends(owner, kinds, pixels), ([one] for one in pixels), strict=True), (len(tokens), [])]
    parts: list[torch.Tensor] = []
    begin = 0
    for end, seen in pieces:
        if begin < end:
            grids = {name: torch.cat([one[name] for one in seen]) for name in wanted if seen and name in seen[0]}
            rows, _ = owner.get_rope_index(tokens[None, begin:end], mm_token_type_ids=kinds[None, begin:end], **grids)
            parts.append(rows[:, 0] + (parts[-1].max() + 1 if parts else 0))
        begin = end
    return torch.cat(parts, -1)


def _ends(owner: Any, kinds: torch.Tensor, pixels: Sequence[Pixels]) -> list[int]:
    """Where each image's tokens end, by their number.

    Raises:
        EngineError: the images have another number of tokens in all.
    """
    import torch

    merged = owner.config.vision_config.spatial_merge_size ** 2
    sizes = [int(one["image_grid_thw"].prod()) // merged for one in pixels]
    places = kinds.nonzero()[:, 0]
    if sum(sizes) != len(places):
        raise EngineError("tokens and images of a sequence do not belong together", code="vision-images-differ",
                          got=f"{len(places)} tokens of images, for images of {sizes}",
                          fix="a generator keeps the tokens of images as they are, and ends with one that is drawn")
    return (places[torch.tensor(sizes).cumsum(0) - 1] + 1).tolist()
