"""A layer that computes with a function of its weights: fake quantisation, adapters merged on the fly.

The parameter stays what it is, under its name, in the optimizer, in checkpoints and in the weight stream; only the
layer's forward, and its recomputation, sees the function's value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


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
    if name not in module._parameters:
        raise AttributeError(f"{type(module).__name__} has no parameter {name!r}")
    inner = module.forward

    def forward(*args, **kwargs):
        held = module.__dict__.get(name)  # an outer substitution's value
        module.__dict__[name] = function(module._parameters[name] if held is None else held)
        try:
            return inner(*args, **kwargs)
        finally:
            if held is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = held

    module.forward = forward
