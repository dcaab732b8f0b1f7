"""Products that round what a weight is multiplied with, as an engine does whose kernels multiply in FP8.

A tensor of a stream says so by its attribute `round_inputs`, a function [..., in] -> [..., in]; one stream has one such
function. Decoders keep it by the memory of the weight, since a product gets views: an expert's share, or several
projections side by side. Products are then met wherever they are computed, in decode.py and inside transformers'
modules alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RoundInputs = Callable[[torch.Tensor], torch.Tensor]

_PRODUCTS = {F.linear, torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm}
"""Functions of inputs [..., in] and a weight, in this order."""


def round_inputs(tensor: torch.Tensor) -> RoundInputs | None:
    """What a tensor of a stream says."""
    return getattr(tensor, "round_inputs", None)


def memory(weight: torch.Tensor) -> int:
    """By which decoders know a weight, whatever view of it a product gets."""
    return weight.untyped_storage().data_ptr()


def rounding(weights: Any) -> AbstractContextManager[object]:
    """Inside it the products with `weights`, Weights or a transformers module, round their inputs where these say so.

    It holds for the thread that enters it.
    """
    functions = getattr(weights, "rounded_inputs", None)
    return _Rounding(functions) if functions else nullcontext()


class Rounded:
    """Which parameters of transformers' modules of one architecture have rounded inputs, by what streams say."""

    def __init__(self) -> None:
        self._names: set[str] | None = None  # the same for every stream

    def noted(self, module: PreTrainedModel, declared: Mapping[str, tuple[torch.Size, RoundInputs | None]],
              load: Callable[[dict[str, torch.Tensor]], PreTrainedModel]) -> PreTrainedModel:
        """The module, for `rounding`.

        Args:
            declared: of each tensor of the stream that it was loaded from: its shape and its `round_inputs`.
            load: makes a module of a stream. It alone knows which parameter a tensor becomes or is a part of, so it
                is given marks.
        """
        function = next((one for _, one in declared.values() if one is not None), None)
        if function is None:
            return module
        if self._names is None:
            marks = load({name: torch.full(shape, float(one is not None)) for name, (shape, one) in declared.items()})
            self._names = {name for name, one in marks.named_parameters() if one.dim() > 1 and one.any()}
        if module._can_set_experts_implementation():  # some copy the weights of experts before they multiply
            module.set_experts_implementation("eager")
        vars(module)["rounded_inputs"] = {memory(one): function for name, one in module.named_parameters()
                                          if name in self._names}
        return module


class _Rounding(TorchFunctionMode):
    """
    Args:
        functions: by the memory of a weight.
    """

    def __init__(self, functions: Mapping[int, RoundInputs]):
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS and len(args) > 1 and (function := self._functions.get(memory(args[1]))) is not None:
            args = (function(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))
