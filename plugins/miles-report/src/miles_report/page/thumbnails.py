"""Images of prompts, small enough for a page: made anew from their pixels, so that no byte of a file gets there.

What is looked for are files of the run's own folder `images`, each named by the SHA-256 of its bytes; any other name is
of none.
"""

from __future__ import annotations

import base64
import functools
import io
import re
from pathlib import Path

SIDE = 160
"""Pixels of a thumbnail's longer side, at most."""
MAX_PIXELS = 64_000_000
"""Of an image that is opened, by its header: some hundred MB while it is decoded."""
_NAME = re.compile(r"[0-9a-f]{64}")


def thumbnail(folder: Path, name: object) -> str | None:
    """An image as a `data:` address; None where it is not there or cannot be shown.

    Args:
        folder: the run's images.
        name: as a sample has it.
    """
    path = folder / name if isinstance(name, str) and _NAME.fullmatch(name) else None
    return _drawn(path) if path is not None and path.is_file() else None


@functools.lru_cache(256)  # evaluations show the same images again
def _drawn(path: Path) -> str | None:
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS or image.format == "EPS":  # a program, for Ghostscript to run
                return None
            image.draft("RGB", (SIDE, SIDE))  # JPEG decodes to a fraction of its size
            small = image.convert("RGB")
    except Exception:  # noqa: BLE001 - Pillow's decoders raise anything
        return None
    small.thumbnail((SIDE, SIDE))
    files = {kind: io.BytesIO() for kind in ("PNG", "JPEG")}
    for kind, file in files.items():
        small.save(file, kind)
    kind, file = min(files.items(), key=lambda pair: len(pair[1].getvalue()))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
