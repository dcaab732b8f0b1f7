"""Where the engine computes: the device by its name, what decodes a checkpoint there, its stream and its memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles_core.errors import CheckpointError, EngineError
from miles_core.reading import parse_json, reading
from miles_local.decode import Decoder
from miles_local.weights import FAMILIES, ModelShape

if TYPE_CHECKING:
    from miles_local.inputs import SequenceInputs
    from miles_local.modules import ModuleDecoder

logger = logging.getLogger(__name__)

CACHE_SHARE = 0.5
"""Of a device's free memory that keys and values may take. The rest is for activations, for a second set of weights
while new ones come, and for a trainer that shares the device."""


def device_named(name: str) -> torch.device:
    """The device that auto, cpu or cuda stands for; auto is a GPU where torch has one.

    Raises:
        EngineError: there is none of that name.
    """
    if name == "cpu" or name == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise EngineError("the local engine's GPU is missing", code="engine-device-missing", got=f"device {name}",
                          who="--engine-device",
                          fix="use --engine-device cpu, or install a build of torch for this GPU")
    return torch.device("cuda", torch.cuda.current_device())


def decoder_for(folder: Path, dtype: torch.dtype, max_context: int | None = None,
                device: torch.device | None = None, inputs: SequenceInputs | None = None,
                ) -> tuple[Decoder | ModuleDecoder, str]:
    """The fast path where there is one, else transformers' module; and its name for the log.

    Args:
        inputs: the bound hook prefill_inputs.

    Raises:
        CheckpointError: no config.json, or an architecture that this engine does not decode.
    """
    device = device or torch.device("cpu")
    where = ""
    if device.type != "cpu":
        where = f" on {device}, keys and values in at most {CACHE_SHARE:.0%} of its free memory"
    if not (folder / "config.json").is_file():
        raise CheckpointError("config.json is missing", code="config-json-missing", who=str(folder),
                              fix="name a Hugging Face checkpoint")
    with reading(f"{folder}/config.json", CheckpointError):
        kind = parse_json((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind in FAMILIES and (shape := ModelShape.read(folder)) is not None:
            context = max_context or shape.context
            if device.type == "cpu":
                return Decoder(shape, context, dtype), f"{kind} fast path"
            from miles_local.device import DeviceDecoder

            return DeviceDecoder(shape, context, dtype, device), f"{kind} fast path{where}"
        from miles_local.modules import ModuleDecoder

        return ModuleDecoder(folder, dtype, device, inputs), f"{kind} through transformers{where}"


@contextmanager
def stream_on(device: torch.device) -> Iterator[None]:
    """A stream of this thread's own on a GPU, so that neither side waits for what a trainer has in its queue."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def settle(device: torch.device) -> None:
    """Wait for what this thread has asked of the device: only then may another stream use the results."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


def give_back(device: torch.device) -> None:
    """Return memory that nothing uses to the device, for whoever shares it."""
    settle(device)
    if device.type != "cpu":
        torch.cuda.empty_cache()


def cache_tokens(device: torch.device, token_bytes: int | None) -> int | None:
    """Positions of a cache, all rows together, that fit into CACHE_SHARE of the free memory; None without a bound.

    Args:
        token_bytes: of one position of one row.
    """
    if device.type == "cpu" or not token_bytes:
        return None
    with torch.cuda.device(device):
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        size = int(CACHE_SHARE * (torch.cuda.mem_get_info()[0] + unused))
    logger.info("keys and values on %s: %s tokens at most, %.1f GiB", device, size // token_bytes, size / 2**30)
    return size // token_bytes
