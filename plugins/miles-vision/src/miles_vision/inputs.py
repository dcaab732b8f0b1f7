"""What the model takes beside tokens: pixels, and positions by the architecture's own rule. One function of the same
token ids and the same files for engine and trainer."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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

    takes = inspect.signature(model.forward).parameters
    names = dict.fromkeys(name for one in pixels for name in one)
    joined = {name: torch.cat([one[name] for one in pixels]) for name in names}
    kinds = torch.tensor(images, dtype=torch.int64)
    inputs = {name: one for name, one in joined.items() if name in takes}
    owner = next((part for part in model.modules() if hasattr(part, "get_rope_index")), None)
    if owner is not None:
        wanted = inspect.signature(owner.get_rope_index).parameters
        grids = {name: one for name, one in joined.items() if name in wanted}
        positions, _ = owner.get_rope_index(torch.tensor([list(tokens)]), mm_token_type_ids=kinds[None], **grids)
        inputs["position_ids"] = positions[:, 0]
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = kinds
    return inputs
