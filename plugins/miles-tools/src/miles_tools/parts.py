"""Content parts: how a tool returns images beside text.

A tool's process packs what the tool returns, so that files are read with the tool's rights and are not needed
afterwards; the driver reads parts of two forms alone and opens no path that a tool names. Standard library only: the
sandbox's supervisor imports it.

    {"type": "text", "text": TEXT}
    {"type": "image", "image": base64, with or without data:image/...;base64,}
"""

from __future__ import annotations

import base64
import io
import os
from typing import Any

KINDS = ("text", "image", "image_url")
SOURCES = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of a part that may have its image."""
LONGEST_PATH = 4096


def packed(value: object) -> object:
    """What a tool returned, ready for JSON: content parts in the two forms above, all else as it is.

    Args:
        value: content is an image of Pillow, or a list of texts, such images, and dicts of type "text", "image" (a
            path, bytes, base64 or an image of Pillow) or "image_url", as OpenAI writes them; texts alone are none.
    """
    items = [value] if _is_picture(value) else list(value) if isinstance(value, list | tuple) else []
    if all(isinstance(item, str) for item in items) or not all(map(_is_part, items)):
        return value
    return [_packed(item) for item in items]


def content(value: object) -> list[dict[str, str]] | None:
    """The parts that came from a tool's process; None where it is something else."""
    if not isinstance(value, list) or not value:
        return None
    for part in value:
        if not (isinstance(part, dict) and part.get("type") in ("text", "image")
                and part.keys() == {"type", part["type"]} and isinstance(part[part["type"]], str)):
            return None
    return value


def _is_part(item: object) -> bool:
    if isinstance(item, dict):
        kind = item.get("type")
        return isinstance(item.get("text"), str) if kind == "text" else kind in KINDS and source(item) is not None
    return isinstance(item, str) or _is_picture(item)


def _is_picture(item: object) -> bool:
    return any(f"{kind.__module__}.{kind.__name__}" == "PIL.Image.Image" for kind in type(item).__mro__)


def source(part: dict[str, Any]) -> Any:
    """What a part has as its image, whatever the key; None if nothing."""
    value = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    return value.get("url") if isinstance(value, dict) else value


def _packed(item: Any) -> dict[str, str]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if isinstance(item, dict) and item["type"] == "text":
        return {"type": "text", "text": item["text"]}
    image = source(item) if isinstance(item, dict) else item
    if _is_picture(image):
        file = io.BytesIO()
        image.save(file, "PNG")
        image = file.getvalue()
    if isinstance(image, str | os.PathLike) and len(os.fspath(image)) < LONGEST_PATH and os.path.isfile(image):
        with open(image, "rb") as opened:
            image = opened.read()
    if isinstance(image, bytes | bytearray):
        image = f"data:;base64,{base64.b64encode(image).decode()}"
    return {"type": "image", "image": str(image)}
