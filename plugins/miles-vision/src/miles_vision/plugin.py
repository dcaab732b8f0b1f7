"""The plugin: options and hooks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.types import Drop, images_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from miles_megatron.model import LanguageModel
    from miles_megatron.specs import WeightMap

    from miles_core.plugins.select import Selected
    from miles_core.stages.rollout import Request
    from miles_core.types import Prompt, Sample
    from miles_vision.images import ImageStore
    from miles_vision.prompts import Preparation
    from miles_vision.seen import Seen
    from miles_vision.tower import Tower


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Where images are found, and what of them is kept."""

    multimodal_keys: dict[str, object] | None = option(
        None, 'Key of a row\'s images, as JSON: {"image": "images"}.', flags=("--multimodal-keys",))
    max_image_pixels: int = option(
        33_554_432, "Pixels of the largest image that is read; a prompt with a larger one is dropped and counted.",
        within=(1,))
    image_dir: str | None = option(
        None, "Folder that holds each image once, by the hash of its bytes; default: images in the run directory.")
    pixel_cache: int = option(
        536_870_912, "Bytes of processed images that each process keeps; others are processed again.", within=(0,))


class Vision:
    """Prompts with images: the model's own processor, and one expansion of tokens for engine and trainer."""

    hookspecs = "miles_vision.hookspecs"
    requires = ("local",)
    conflicts = ("mtp",)
    provides = ("hf-modules",)  # which it leaves as they are: the trainer fsdp has a model that reads images whole

    def __init__(self, options: VisionOptions, config: RunConfig):
        self._options, self._config = options, config
        self._preparation: Preparation | None = None
        self._seen: Seen | None = None

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What Megatron's trainer has beside the embedding, for the memory plan."""
        from miles_vision.checks import BUILT, model_type

        if config.perf.trainer != "megatron" or model_type(config) not in BUILT:
            return config
        from miles_fsdp.memory import parameters

        count = parameters(Path(str(config.checkpoint.hf_checkpoint)), beside_text=True) or 0
        return replace(config, stated=config.stated | {"embedding_rows:vision": (str(count),)})

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None], plugins: Sequence[Selected]) -> RunConfig:
        """What would be found out late, or train on something else than was sampled."""
        from miles_vision.checks import check

        return check(config, self._options.multimodal_keys or {}, plugins)

    @hookimpl
    def prepare_prompt(self, prompt: Prompt) -> Prompt | Drop:
        """The tokens of images in place of their marks; the files go into the run's folder of images."""
        return self._prepares()(prompt)

    @hookimpl
    def show_images(self, prompt: Prompt, images: Sequence[object]) -> Prompt | Drop:
        """For generators of several turns, whose tools return images."""
        return self._prepares().show(prompt, images)

    @hookimpl
    def fill_images(self, messages: Sequence[Mapping[str, Any]], prompt: Prompt) -> Sequence[Mapping[str, Any]]:
        """For agents, whose clients send images as data."""
        return self._prepares().fill(messages, prompt)

    @hookimpl
    def generate_request(self, request: Request, prompt: Prompt) -> Request:
        """The files go with the tokens, and an answer ends with a token that would stand for an image."""
        from miles_vision.processor import unexpanded

        seen, sampling = self._sees(), request.sampling
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *seen.placeholders)))
        images = tuple(seen.store.get(name) for name in images_of(prompt))
        return replace(request, images=images, sampling=replace(sampling, stop_token_ids=stops),
                       unexpanded=unexpanded(request.input_ids, seen.placeholders[0]) if images else ())

    @hookimpl
    def prefill_inputs(self, model: Any, tokens: Sequence[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """For the local engine."""
        named = {hashlib.sha256(data).hexdigest(): data for data in images}
        names = [hashlib.sha256(data).hexdigest() for data in images]
        return self._sees().inputs(model, tokens, names, named.__getitem__)

    @hookimpl
    def forward_inputs(self, model: Any, sample: Sample) -> dict[str, torch.Tensor]:
        """For the trainer fsdp."""
        return self._sees().of_sample(model, sample)

    @hookimpl
    def weight_map(self, weight_map: WeightMap, folder: Path) -> WeightMap:
        """Under Megatron's trainer, with what sees: it is a part of the model."""
        from miles_vision.tower import mapped

        return mapped(weight_map, folder)

    @hookimpl
    def build_model(self, chunk: torch.nn.Module, folder: Path, weight_map: WeightMap | None) -> torch.nn.Module:
        """Beside Megatron's embedding, what sees."""
        if weight_map is not None and getattr(chunk, "pre_process", False):
            from miles_vision.tower import attach

            attach(cast("LanguageModel", chunk), folder, weight_map)
        return chunk

    @hookimpl
    def embedding_rows(self, sample: Sample, chunk: torch.nn.Module) -> dict[int, torch.Tensor]:
        """For the trainer megatron."""
        rows: dict[int, torch.Tensor] = cast("Tower", chunk.tower)(sample, self._sees())
        return rows

    @hookimpl
    def rope_positions(self, sample: Sample, folder: Path) -> dict[int, torch.Tensor]:
        """For the trainer megatron, on ranks that hold no tower as well."""
        from miles_vision.tower import rope_positions

        return rope_positions(folder, sample, self._sees())

    @hookimpl
    def attention_blocks(self, sample: Sample, folder: Path) -> dict[int, int]:
        """For the trainer megatron, as well."""
        from miles_vision.tower import attention_blocks

        return attention_blocks(folder, sample, self._sees())

    def _prepares(self) -> Preparation:
        if self._preparation is None:
            from miles_vision.prompts import Preparation

            key = str((self._options.multimodal_keys or {})["image"])
            self._preparation = Preparation(self._config, key, self._options.max_image_pixels, self._store())
        return self._preparation

    def _sees(self) -> Seen:
        if self._seen is None:
            from miles_vision.seen import Seen

            self._seen = Seen(self._config, self._store(), self._options.pixel_cache)
        return self._seen

    def _store(self) -> ImageStore:
        from miles_vision.images import ImageStore

        return ImageStore(Path(self._options.image_dir or f"{self._config.checkpoint.run_dir}/images").resolve())
