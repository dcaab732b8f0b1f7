"""The experts that tokens pass in modules of transformers, noted while these compute."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

CHOSEN = {"top_k_index", "router_indices"}
"""What transformers' experts call the indices of those that a token passes."""


def experts_of(module: PreTrainedModel) -> dict[int, torch.nn.Module]:
    """The decoder's layers' experts, by layer: modules that are told who computes, under a name of transformers'."""
    located = ((re.search(r"\.layers\.(\d+)\.", name), each) for name, each in module.named_modules())
    return {int(place[1]): each for place, each in located
            if place and CHOSEN & inspect.signature(each.forward).parameters.keys()}


@contextmanager
def chosen_experts(weights: PreTrainedModel, trace: bool) -> Iterator[dict[int, torch.Tensor]]:
    """Layer -> [rows, topk] experts of a forward inside, with `trace`."""
    experts: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Callable:
        def hook(module, args, kwargs) -> None:
            named = [kwargs[name] for name in CHOSEN if name in kwargs]
            experts[layer] = named[0] if named else args[1]
        return hook

    handles = [module.register_forward_pre_hook(note(layer), with_kwargs=True)
               for layer, module in experts_of(weights).items()] if trace else []
    try:
        yield experts
    finally:
        for handle in handles:
            handle.remove()


def stacked(routes: dict[int, torch.Tensor], rows: int, shape: Any) -> torch.Tensor:
    """[rows, layers, topk] int16, -1 in layers without experts; `shape` has both numbers."""
    result = torch.full((rows, shape.layers, shape.topk), -1, dtype=torch.int16)
    for layer, chosen in routes.items():
        result[:, layer] = chosen.view(rows, -1).to(torch.int16)
    return result
