"""What runs inside vLLM's workers: loading a version's files whole, and saying what came of it.

The server is started with this folder on its PYTHONPATH and --worker-extension-cls miles_vllm_worker.MilesWorker. It
needs vLLM, torch and safetensors alone, as the server's Python need not have Miles.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

SUMS = "sums.json"
"""In a version's folder: tensor name -> SHA-256 of its bytes, as the trainer had them."""


class MilesWorker:
    """Methods that vLLM adds to its worker; `/collective_rpc` calls them."""

    model_runner: Any  # the worker's

    def miles_load(self, folder: str) -> dict[str, Any]:
        """Replace every parameter by the tensors in a folder.

        vLLM's own checksums are of no use for this: a parameter that a CPU or a quantised kernel has repacked is empty
        afterwards, or other bytes. So each tensor is compared as it enters the loader, and the loader has to have
        filled every parameter.

        Returns:
            "tensors": how many; "error": why these weights must not serve, or None.
        """
        runner = self.model_runner
        model = runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        load, count = model.load_weights, 0
        filled: set[str] = set()

        def recorded(weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
            filled.update(load(weights) or ())
            return filled

        sums = json.loads(Path(folder, SUMS).read_text())
        model.load_weights = recorded  # the runner asks for it by this name and drops what it returns
        try:
            runner.reload_weights(weights_iterator=_read(Path(folder), sums))
            _renew_tied(model)
            count = len(sums)
        except Exception as error:  # noqa: BLE001 - raised here, it would end the server; the driver decides
            return {"tensors": count, "error": f"{type(error).__name__}: {error}"}
        finally:
            del model.load_weights
        left = sorted(wanted - filled)
        return {"tensors": count, "error": f"parameters that nothing was loaded into: {left[:5]}" if left else None}


def _renew_tied(model: torch.nn.Module) -> None:
    """Have layers that share another one's weights make of them what they compute with.

    A CPU computes with a packed copy. vLLM 0.32 packs anew what was loaded, and nothing is loaded into an output layer
    that is tied to the embedding: it would go on with the weights of before.
    """
    owners: dict[int, torch.nn.Module] = {}
    for layer in model.modules():
        weight, method = getattr(layer, "weight", None), getattr(layer, "quant_method", None)
        if weight is not None and owners.setdefault(id(weight), layer) is not layer and method is not None:
            method.process_weights_after_loading(layer)


def _read(folder: Path, sums: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all files, each compared with its sum."""
    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_tensor(name)
                if digest(tensor) != sums.get(name):
                    raise ValueError(f"{name} is not what the trainer wrote")
                seen.add(name)
                yield name, tensor
    if seen != sums.keys():
        raise ValueError(f"the files lack {sorted(sums.keys() - seen)[:5]}")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
