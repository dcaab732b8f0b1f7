"""The model's own processor, for images: from a conversation to token ids in which every image has its tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
"""What stands for an image in a row's text, as in Miles and slime."""
PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Names in config.json of the tokens that a model replaces by what it sees; the first two are images'."""


def load(folder: str) -> Any:
    """The processor of transformers that belongs to the checkpoint's config.json.

    Its half for videos is left out: it needs torchvision, which images do without.

    Raises:
        CheckpointError: transformers has none for it, or its files are not there.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    with _loading(folder):
        base = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(folder, local_files_only=True))]
        halves = [name for name in base.get_attributes() if "video" not in name]
        kind = type(base.__name__, (base,), {"get_attributes": classmethod(lambda _: halves)})
        made = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
        return kind(**{name: made[name].from_pretrained(folder, local_files_only=True) for name in halves},
                    **_settings(Path(folder)))


def load_pixels(folder: str) -> Any:
    """The half of it that makes pixels.

    Raises:
        CheckpointError: as `load`.
    """
    from transformers import AutoImageProcessor

    with _loading(folder):
        return AutoImageProcessor.from_pretrained(folder, local_files_only=True)


@contextmanager
def _loading(folder: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise CheckpointError("the model's image processor cannot be loaded", code="vision-processor-unloadable",
                              got=f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}",
                              who=f"--hf-checkpoint {folder}", fix="the folder must hold a model that reads images, "
                              "preprocessor_config.json and the tokenizer's files") from error


def _settings(folder: Path) -> dict[str, Any]:
    """What processor_config.json says of the processor itself, such as the tokens of an image."""
    import json

    path = folder / "processor_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {key: value for key, value in settings.items() if isinstance(value, int) and not isinstance(value, bool)}


def with_images(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose marks have become parts of type "image", as templates of such models want them."""
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: object) -> object:
    if not isinstance(content, str) or MARK not in content:
        return content
    pieces = re.split(f"({re.escape(MARK)})", content)
    return [{"type": "image"} if piece == MARK else {"type": "text", "text": piece} for piece in pieces if piece]


def expanded(processor: Any, text: str, images: Sequence[Image], special: bool) -> tuple[int, ...]:
    """The token ids of a rendered text, every image's placeholder repeated as often as the image has features.

    Args:
        special: whether the tokenizer adds its first token.

    Raises:
        ValueError: the processor's, if the text has another number of placeholders.
    """
    encoded = processor(text=[text], images=list(images), add_special_tokens=special)
    return tuple(map(int, encoded["input_ids"][0]))


def unexpanded(ids: Sequence[int], token: int) -> tuple[int, ...]:
    """The ids with one placeholder for each image.

    Args:
        ids: [L] expanded; images do not touch.
        token: the image's placeholder.
    """
    return tuple(one for before, one in zip((None, *ids), ids, strict=False) if not one == token == before)


def placeholders(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that stand for what is seen, the image's first.

    Args:
        config: of config.json.
    """
    return tuple(config[name] for name in PLACEHOLDERS if isinstance(config.get(name), int))
