"""Images on their way from a row to the record: read, checked, and kept once under the hash of their bytes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from miles_core.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageUnusable(Exception):
    """Why an image cannot be shown to a model. No error of a run: its prompt is dropped and counted.

    Args:
        reason: a word that is counted.
        detail: what a person wants to know.
    """

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)


class ImageStore:
    """The folder beside a run's record that holds each image once, named by the SHA-256 of its file's bytes.

    Every process of a run that reads images sees the folder: trainers on other machines need a shared file system.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Keep a file; returns its name."""
        name = hashlib.sha256(data).hexdigest()
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as file:
                file.write(data)
            os.replace(file.name, path)
        return name

    def get(self, name: str) -> bytes:
        """
        Raises:
            DataError: it is not there, or its bytes are others.
        """
        path = self.folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError("an image of a sample is not in the run's folder of images", code="vision-image-missing",
                            got=error.strerror, who=str(path), fix="start where the folder of --run-dir can be read, "
                            "or name that of the run that sampled it with --vision.image-dir") from error
        if hashlib.sha256(data).hexdigest() != name:
            raise DataError("an image has changed since it was sampled from", code="vision-image-changed",
                            who=str(path), fix="remove the file: it is written anew from the row")
        return data


def sources(value: object) -> list[object]:
    """The images of a row's field: none, one, or several in order."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def read(source: object, folders: Sequence[Path], most: int) -> bytes:
    """The bytes of an image file.

    Args:
        source: a path, also as file://; base64, with or without `data:image/...;base64,`; bytes; or a dict with one of
            these under "bytes" or "path", as the package datasets writes images.
        folders: where relative paths begin, the first that has the file.
        most: pixels that an image may have.

    Raises:
        ImageUnusable: it is no such thing, cannot be decoded, or has more pixels.
    """
    data = _bytes(source, folders)
    opened(data, most)
    return data


def opened(data: bytes, most: int | None = None) -> Image:
    """The decoded image.

    Raises:
        ImageUnusable: see `read`.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        if image.format == "EPS":
            raise ValueError("EPS is a program, which Pillow has Ghostscript run")
        width, height = image.size  # of the header: a small file may hold a huge image
        if most is not None and width * height > most:
            raise ImageUnusable("image_too_large", f"{width} x {height} pixels, at most {most} in all")
        return image.convert("RGB")
    except ImageUnusable:
        raise
    except Exception as error:  # Pillow's decoders raise anything
        raise ImageUnusable("image_damaged", f"{type(error).__name__}: {error}") from error


def as_url(data: bytes) -> str:
    """A file of an image as OpenAI's clients send it."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        kind = Image.MIME.get(image.format or "", "image/png")
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _bytes(source: object, folders: Sequence[Path]) -> bytes:
    value: Any = source
    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path") if value.get(key) is not None), None)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ImageUnusable("image_damaged", f"neither a path, nor base64, nor bytes: {type(value).__name__}")
    text: str = value
    if text.startswith("data:"):
        return _decoded(text.partition(",")[2])
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
    if "://" in text:
        raise ImageUnusable("image_damaged", f"{text[:100]}: a run fetches nothing")
    return _of_file(text, folders) if len(text) < 4096 else _decoded(text)  # longer than any path


def _of_file(text: str, folders: Sequence[Path]) -> bytes:
    for folder in folders:
        if (folder / text).is_file():
            return (folder / text).read_bytes()
    if Path(text).suffix:  # no letter of base64 is a dot
        raise ImageUnusable("image_missing", f"no file {text}, also not in {', '.join(map(str, folders))}")
    return _decoded(text)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # in lines as MIME has them
    except binascii.Error as error:
        raise ImageUnusable("image_damaged", f"neither the path of a file nor base64: {text[:40]}") from error
