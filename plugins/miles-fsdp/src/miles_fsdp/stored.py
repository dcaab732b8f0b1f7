"""What the files of a Hugging Face directory call a module's tensors, and what they hold beside these."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from miles_fsdp.memory import stored_shapes

logger = logging.getLogger(__name__)


def stored_prefix(model: PreTrainedModel, folder: Path) -> str:
    """What names in the files begin with and the module's do not, as of the text model of a larger one (Llama 4):
    transformers takes it off when it reads, and does not put it back."""
    prefix, stored = f"{model.base_model_prefix}.", _files(folder)
    names = {name for name, _ in model.named_parameters()}
    within = any(prefix + name in stored for name in names)
    return prefix if within and not any(name in stored or name.startswith(prefix) for name in names) else ""


def beside(folder: Path, sent: set[str], own: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that the files hold and the model does not have.

    Args:
        sent: names of the model's in the files. Where they have others there, what is left may be the model's as well.
        own: all of its names: tied tensors are in the files by each of theirs, perhaps.
    """
    files = _files(folder)
    left = sorted(files.keys() - sent - own)
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        return  # the model's are plain; what is left are scales
    if left and not sent <= files.keys():
        logger.warning("an export leaves out %d tensors of %s: %s", len(left), folder,
                       ", ".join(left[:3]) + ", ..." * (len(left) > 3))
        return
    for name in left:
        with safe_open(files[name], "pt") as opened:
            yield name, opened.get_tensor(name)


def _files(folder: Path) -> dict[str, Path]:
    """Tensor -> its file."""
    return {name: file for file in sorted(folder.glob("*.safetensors")) for name, _ in stored_shapes(file)}
