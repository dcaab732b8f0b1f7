"""AdamW for Megatron's optimizers where there is no fused kernel of Transformer Engine's or Apex's."""

from __future__ import annotations

import functools
import inspect

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter's gradients."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW in its fused form: one kernel for all parameters, where the loops would be a dozen for each.

    torch wraps these methods for dynamo, and the wrappers import it: 1 CPU s and 70 MiB, though nothing is compiled.
    Here they are what the wrappers call.
    """

    def __init__(self, params, **options):
        super().__init__(params, fused=True, **options)

    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)

    @torch.no_grad()
    def step(self, closure=None):
        """One update from the parameters' gradients."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)

    def moments(self, parameter):
        """Names of what is kept of a parameter's gradients."""
        return MOMENTS


def moments_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> tuple[str, ...]:
    """Names of what an Adam, of torch or fused, keeps of a parameter's gradients."""
    return optimizer.moments(parameter) if isinstance(optimizer, AdamW) else MOMENTS


def prepare(optimizer: torch.optim.Adam, parameter: torch.Tensor) -> dict:
    """A parameter's state, made as it is before the first step where there is none."""
    state = optimizer.state[parameter]
    state.setdefault("step", torch.zeros((), device=parameter.device))
    for name in moments_of(optimizer, parameter):
        if name not in state:
            state[name] = torch.zeros_like(parameter)
    return state


SLICE = 2**26
"""Parameters that are stepped at once where moments are kept in fewer bits: half a GiB of widened ones, and as much
of those before, which the kernel's arguments still hold."""


def step_in_slices(optimizer: torch.optim.Optimizer, largest: int = SLICE) -> None:
    """Let `optimizer` widen the moments of `largest` parameters at a time (or of one tensor that has more).

    Transformer Engine's FusedAdam computes in float32. Moments in bfloat16, float16 or fp8 are widened for all tensors
    of a group before the first kernel, which at the step takes more than the smaller moments had saved: 8 bytes a
    parameter for 4. The update is elementwise, so that a group's tensors may as well be stepped lot after lot.
    """
    whole_step = optimizer.step

    @functools.wraps(whole_step)
    def step(*args, **options):
        groups = optimizer.param_groups
        parts = [[{**group, "params": lot} for lot in _lots(group["params"], largest)] for group in groups]
        optimizer.param_groups = [part for lots in parts for part in lots]
        try:
            return whole_step(*args, **options)
        finally:
            optimizer.param_groups = groups
            for group, lots in zip(groups, parts, strict=True):
                for part in lots:  # what a step counts in its group: each lot began where the group was
                    group |= {key: value for key, value in part.items() if key != "params"}

    optimizer.step = step


def _lots(parameters: list[torch.Tensor], largest: int) -> list[list[torch.Tensor]]:
    lots, size = [], 0
    for parameter in parameters:
        if not lots or size + parameter.numel() > largest:
            lots.append([])
            size = 0
        lots[-1].append(parameter)
        size += parameter.numel()
    return lots
