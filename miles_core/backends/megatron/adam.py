"""AdamW for Megatron's optimizers where there is no fused kernel of Transformer Engine's or Apex's."""

from __future__ import annotations

import inspect

import torch


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
