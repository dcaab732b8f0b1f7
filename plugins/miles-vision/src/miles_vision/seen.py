"""What engine and trainer share: the run's images, its processor, and which tokens stand for what is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.config import RunConfig
from miles_core.config.load import config_json
from miles_core.errors import DataError, EngineError
from miles_core.types import images_of
from miles_vision import processor
from miles_vision.images import ImageStore
from miles_vision.inputs import PixelCache, sequence_inputs

if TYPE_CHECKING:
    import torch

    from miles_core.types import Sample

Inputs = dict[str, "torch.Tensor"]


class Seen:
    """One process's view of a run's images.

    Args:
        placeholders: ids of tokens that stand for something seen, the image's first.
        store: the files.
        size: bytes of processed images that are kept.
    """

    def __init__(self, config: RunConfig, store: ImageStore, size: int):
        self.placeholders = processor.placeholders(config_json(config)[1] or {})
        self.store = store
        self._pixels = PixelCache(processor.load_pixels(str(config.checkpoint.hf_checkpoint)), size)

    def inputs(self, model: Any, tokens: Sequence[int], names: Sequence[str],
               read: Callable[[str], bytes]) -> Inputs:
        """
        Args:
            tokens: [L]; those of images are expanded.
            names: of the images, in order.

        Raises:
            EngineError: tokens for images, and no image, or the reverse.
        """
        images = [token == self.placeholders[0] for token in tokens]
        if any(images) != bool(names):
            raise EngineError("tokens and images of a sequence do not belong together", code="vision-images-differ",
                              got=f"{sum(images)} tokens of images, {len(names)} images",
                              fix="a generator keeps the tokens of images as they are, and ends with one that is drawn")
        return sequence_inputs(model, tokens, [self._pixels(name, read) for name in names], images)

    def of_sample(self, model: Any, sample: Sample) -> Inputs:
        """
        Raises:
            DataError: the sample does not begin with the tokens of its prompt.
        """
        import torch

        ids, prompt = sample.tokens, np.array(sample.prompt.token_ids)
        names = images_of(sample.prompt, sample)
        if names and not np.array_equal(ids[: len(prompt)], prompt):
            raise DataError(f"{sample.name} does not begin with its prompt's tokens, where the images are",
                            code="vision-tokens-differ", fix="use a generator that keeps them")
        # A drawn token of these is the last: nothing is computed from its embedding. Others are a tool's images.
        drawn = np.isin(ids, self.placeholders) & (np.arange(len(ids)) >= len(prompt))
        drawn[:-1] &= ids[:-1] != self.placeholders[0]
        tokens = np.where(drawn, self._plain, ids).astype(np.int64)
        return {**self.inputs(model, tokens.tolist(), names, self.store.get), "input_ids": torch.from_numpy(tokens)}

    @property
    def _plain(self) -> int:
        """A token that stands for nothing seen."""
        return next(token for token in range(len(self.placeholders) + 1) if token not in self.placeholders)
