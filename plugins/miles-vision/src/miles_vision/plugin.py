"""The plugin: options and hooks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from miles_core.config import RunConfig, option
from miles_core.hookspecs import hookimpl
from miles_core.types import Drop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from miles_megatron.specs import WeightMap

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
        self._towers: dict[Path, Tower] = {}
        self._bodies: dict[Path, Any] = {}
        self._carried: tuple[Path, WeightMap] | None = None

    @hookimpl
    def derive(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What Megatron's trainer keeps beside the model, for the memory plan."""
        from miles_vision.checks import BUILT, model_type

        if config.perf.trainer != "megatron" or model_type(config) not in BUILT:
            return config
        from miles_fsdp.memory import parameters

        note("what reads images is frozen under --trainer megatron; --trainer fsdp trains it, too")
        count = parameters(Path(str(config.checkpoint.hf_checkpoint)), beside_text=True) or 0
        return replace(config, stated=config.stated | {"embedding_rows:vision": (str(count),)})

    @hookimpl
    def check(self, config: RunConfig, note: Callable[[str], None]) -> RunConfig:
        """What would be found out late, or train on something else than was sampled."""
        from miles_vision.checks import check

        return check(config, self._options.multimodal_keys or {})

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
        from miles_vision.prompts import names_of

        seen, sampling = self._sees(), request.sampling
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *seen.placeholders)))
        images = tuple(seen.store.get(name) for name in names_of(prompt))
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
    def build_model(self, chunk: torch.nn.Module, folder: Path, model: str,
                    weight_map: WeightMap | None) -> torch.nn.Module:
        """Beside Megatron's embedding, what sees; it is loaded before anything is computed."""
        if weight_map is None or next(chunk.parameters()).is_meta:
            return chunk
        if model == "actor":
            self._carried = folder, weight_map
        if getattr(chunk, "pre_process", False):
            self._tower(folder, weight_map)
        return chunk

    @hookimpl
    def embedding_rows(self, sample: Sample, folder: Path) -> dict[int, torch.Tensor]:
        """For the trainer megatron."""
        return self._tower(folder, cast("tuple[Path, WeightMap]", self._carried)[1]).rows(sample, self._sees())

    @hookimpl
    def rope_positions(self, sample: Sample, folder: Path) -> dict[int, torch.Tensor]:
        """For the trainer megatron, on ranks that hold no tower as well."""
        from miles_vision.tower import rope_positions, skeleton

        if folder not in self._bodies:
            tower = self._towers.get(folder)
            self._bodies[folder] = skeleton(folder).base_model if tower is None else tower.model
        return rope_positions(self._bodies[folder], sample, self._sees())

    @hookimpl
    def export_weights(self, stream: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Under Megatron's trainer, with what is frozen beside its model."""
        if self._carried is None:
            return stream
        from miles_vision.tower import with_tower

        return with_tower(stream, *self._carried)

    def _tower(self, folder: Path, weight_map: WeightMap) -> Tower:
        if folder not in self._towers:
            import torch

            from miles_vision.tower import Tower

            dtype = torch.bfloat16 if self._config.perf.bf16 else torch.float32
            self._towers[folder] = Tower(folder, weight_map, dtype)
        return self._towers[folder]

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
