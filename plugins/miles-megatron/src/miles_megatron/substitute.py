"""A layer that computes with a function of its weights: fake quantisation, adapters merged on the fly.

The parameter stays what it is, under its name, in the optimizer, in checkpoints and in the weight stream; only the
layer's forward, and its recomputation, sees the function's value. That holds for every module that reads its parameters
as attributes: torch's, Megatron's local ones, and Transformer Engine's, whose grouped layers have a weight per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_STEPS = "_substituted"
"""Attribute of a module: its substitutions, in order."""


def substitute(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], name: str = "weight") -> None:
    """Have a module's forward read `function(parameter)` in place of one of its parameters.

    Several functions of one parameter are applied in the order in which they were given. Gradients flow through the
    function: a straight-through estimator writes `weight + (rounded - weight).detach()`.

    Args:
        function: [*shape] -> [*shape]; called once a forward.
        name: of a direct parameter of the module.

    Raises:
        AttributeError: the module has no such parameter.
    """
    substitute_all(module, lambda tensor: (function(tensor),), (name,))


def substitute_all(module: torch.nn.Module, function: Callable[..., Sequence[torch.Tensor]],
                   names: Sequence[str]) -> None:
    """`substitute` for several parameters by one call: the experts of a grouped layer.

    Args:
        function: takes the tensors in the order of `names` and returns as many, of the same shapes.

    Raises:
        AttributeError: the module has no such parameter.
    """
    if missing := [name for name in names if name not in module._parameters]:
        raise AttributeError(f"{type(module).__name__} has no parameter {missing[0]!r}")
    if _STEPS not in module.__dict__:
        module.__dict__[_STEPS] = []
        module.forward = _reading(module)
    module.__dict__[_STEPS].append((function, tuple(names)))


def _reading(module: torch.nn.Module) -> Callable:
    """The module's forward, inside which its attributes are the functions' values."""
    inner, steps = module.forward, module.__dict__[_STEPS]

    def forward(*args, **kwargs):
        values: dict[str, torch.Tensor] = {}
        for function, names in steps:
            inputs = [values.get(name, module._parameters[name]) for name in names]
            values.update(zip(names, function(*inputs), strict=True))
        # An entry of __dict__ is found before a parameter of the same name.
        module.__dict__.update(values)
        try:
            return inner(*args, **kwargs)
        finally:
            for name in values:
                del module.__dict__[name]

    return forward
