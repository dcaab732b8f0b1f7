"""Loads new weights into layers that SGLang has repacked for the kernels of its group-quantised int4 (Marlin).

SGLang loads a compressed-tensors checkpoint into parameters of its layout, and then replaces them by the kernels'.
Weights that come later need the first layout again. So a decoder layer is opened when the first of its weights comes,
and closed when those of others do: its parameters are made anew by SGLang's own code, loaded into, repacked by SGLang's
own code, and what comes out is written over what the kernels read, whose addresses CUDA graphs have recorded. One layer
at a time takes further memory.

Imports torch and the standard library alone, as miles_weights.py does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch

if __package__:  # in the trainer
    from miles_sglang.server_extension.miles_sums import sums
else:  # in a server
    from miles_sums import sums

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Repacked:
    """The repacked layers of a model.

    Attributes:
        loaded: name of a parameter -> its two sums (`miles_sums.sums`) as its weights were loaded, before they were
            repacked: what a report compares with what was sent.
    """

    def __init__(self, model: torch.nn.Module):
        self.loaded: dict[str, torch.Tensor] = {}
        self._modules: dict[int, list[tuple[str, torch.nn.Module]]] = {}
        self._open: dict[int, list[_Opened]] = {}
        for name, module in model.named_modules():
            scheme, layer = getattr(module, "scheme", None), _LAYER.search(name)
            # Named and not imported: this file is read where no SGLang is.
            if layer and type(scheme).__name__ in ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE"):
                self._modules.setdefault(int(layer[1]), []).append((name, module))

    def __bool__(self) -> bool:
        return bool(self._modules)

    def before(self, names: Collection[str]) -> None:
        """Weights of these names come next.

        Raises:
            ValueError: they belong to a layer that was closed with other weights of the same transfer.
        """
        wanted = {int(layer[1]) for name in names if (layer := _LAYER.search(name))} & self._modules.keys()
        for layer in self._open.keys() - wanted:
            self._close(layer)
        for layer in sorted(wanted - self._open.keys()):
            if any(name in self.loaded for name in self._names(layer)):
                raise ValueError(f"weights of layer {layer} came in two parts with others in between")
            self._open[layer] = [_Opened(name, module) for name, module in self._modules[layer]]

    def end(self) -> None:
        """All weights have come."""
        for layer in list(self._open):
            self._close(layer)

    def reported(self, names: Sequence[str], values: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        """What a report says in place of `names` and their sums, [names, 2] on the host: of repacked layers what was
        loaded, and nothing of what the kernels have beside it. The next transfer begins."""
        loaded, self.loaded = {name: row.cpu() for name, row in self.loaded.items()}, {}
        own = {name for layer in self._modules for name in self._names(layer)}
        rows = [(name, loaded.get(name, row)) for name, row in zip(names, values, strict=True)
                if name in loaded or name not in own]
        return [name for name, _ in rows], torch.stack([row for _, row in rows]) if rows else values

    def _names(self, layer: int) -> Iterator[str]:
        for name, module in self._modules[layer]:
            yield from (f"{name}.{kind}" for kind in module._parameters)

    def _close(self, layer: int) -> None:
        for opened in self._open.pop(layer):
            self.loaded |= opened.close()


class _Opened:
    """One module while weights are loaded into it.

    Args:
        name: its own in the model.
    """

    def __init__(self, name: str, module: torch.nn.Module):
        self._name, self._module, self._scheme = name, module, module.scheme
        self._before = dict(module._parameters), dict(vars(module)), dict(vars(module.scheme))
        if hasattr(self._scheme, "restore_weights_before_loading"):  # experts: the same memory, in its first shape
            self._scheme.restore_weights_before_loading(module)
        else:
            self._made_anew()

    def _made_anew(self) -> None:
        module, config = self._module, self._scheme.kernel_config
        (width, height), (part_width, part_height) = config.full_weight_shape, config.partition_weight_shape
        with next(iter(module._parameters.values())).device:
            self._scheme.create_weights(
                layer=module, input_size=width, output_size=height, input_size_per_partition=part_width,
                output_partition_sizes=[part_height], params_dtype=config.act_type,
                weight_loader=getattr(module, "weight_loader_v2", None) or module.weight_loader)

    def close(self) -> dict[str, torch.Tensor]:
        """Repack what was loaded, into the memory that the kernels read; the sums of what was loaded.

        Raises:
            ValueError: what was repacked is not what was loaded.
        """
        module = self._module
        weights = {kind: tensor for kind, tensor in module._parameters.items()
                   if tensor is not None and kind.endswith(("weight_packed", "weight_scale"))}
        loaded = dict(zip(weights, sums(list(weights.values())), strict=True))
        nibbles = {kind: _nibbles(tensor) for kind, tensor in weights.items() if tensor.dtype == torch.int32}
        self._scheme.process_weights_after_loading(module)
        for kind in weights:
            now = module._parameters[kind]
            same = (_nibbles(now).equal(nibbles[kind]) if kind in nibbles
                    else sums([now])[0].equal(loaded[kind]))
            if not same:
                raise ValueError(f"{self._name}.{kind} is not what was loaded any more, after SGLang has repacked it")
        self._put_back(weights)
        return {f"{self._name}.{kind}": row for kind, row in loaded.items()}

    def _put_back(self, weights: Collection[str]) -> None:
        """All tensors that were there before are there again, the weights with the bytes of those that took their
        place. What else was made anew, such as a workspace, holds nothing."""
        for old, now in zip(self._before, (self._module._parameters, vars(self._module), vars(self._scheme)),
                            strict=True):
            for name, tensor in old.items():
                if isinstance(tensor, torch.Tensor) and now.get(name) is not tensor:
                    if name in weights:
                        tensor.data.copy_(now[name].data)
                    now[name] = tensor


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[2] int64: the sums of the values and of their squares, which no order of the values changes."""
    total = torch.zeros(2, dtype=torch.int64, device=packed.device)
    for part in packed.detach().reshape(-1).view(torch.uint8).split(1 << 24):
        for four in (part & 15, part >> 4):
            total[0] += four.sum(dtype=torch.int64)
            total[1] += (four * four).sum(dtype=torch.int64)
    return total
