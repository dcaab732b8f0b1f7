"""Experts that come as one tensor go into SGLang's fused parameters at once.

SGLang's models take experts one by one, in Python: 50 microseconds each, and a mixture has thousands. Here `0-63` in
the place of an expert's number stands for those from 0 to 63, and the tensor is [64, ...]. SGLang's own code still says
which experts a rank has, which part of them, and where gate and up lie.

Imports torch and the standard library alone, as miles_weights.py does.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

import torch

STACK = re.compile(r"\.(\d+)-(\d+)\.(\w+)\.(\w+)$")
"""First expert, last one, which of its layers, and which tensor of that: the end of a stack's name."""

_SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w3": "w3", "w2": "w2"}


def apart(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A stack as the tensors of single experts; any other tensor as it is."""
    stack = STACK.search(name)
    if stack is None:
        yield name, tensor
        return
    before, after = name[: stack.start(1)], name[stack.end(2) :]
    for number, one in enumerate(tensor.unbind(0), int(stack[1])):
        yield f"{before}{number}{after}", one


def cut(name: str, tensor: torch.Tensor, limit: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A stack as smaller ones of up to `limit` bytes, or of one expert each; any other tensor as it is."""
    stack = STACK.search(name)
    if stack is None or tensor.nbytes <= limit:
        yield name, tensor
        return
    first, before, after = int(stack[1]), name[: stack.start(1)], name[stack.end(2) :]
    for part in tensor.split(max(1, limit * len(tensor) // tensor.nbytes)):
        yield f"{before}{first}-{first + len(part) - 1}{after}", part
        first += len(part)


class FusedExperts:
    """The layers of a model that keep all experts in two parameters: w13 [experts, 2 x inner, hidden], gate before up,
    and w2 [experts, hidden, inner]; of a rank, its experts and its part of `inner`."""

    def __init__(self, model: torch.nn.Module):
        self._modules = {name: module for name, module in model.named_modules() if _fused(module) is not None}
        self._experts = {name: _experts(module) for name, module in self._modules.items()}

    @property
    def hindrance(self) -> str | None:
        """Why layers take experts one by one alone, if any does."""
        return next((f"{name}: {one}" for name, one in self._experts.items() if isinstance(one, str)), None)

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Load a stack; False for what has to go through the model's own loader."""
        stack = STACK.search(name)
        where = "" if stack is None else name[: stack.start()]
        experts, shard = self._experts.get(where, ""), _SHARDS.get(stack[3]) if stack is not None else None
        if isinstance(experts, str) or shard is None or stack[4] != "weight":
            return False
        module, first = self._modules[where], int(stack[1])
        begin, end = max(first, experts.start), min(first + len(tensor), experts.stop)
        if begin < end:
            parameter, down = (module.w2_weight, 1) if shard == "w2" else (module.w13_weight, 0)
            load = module._load_model_weight_or_group_weight_scale
            takes_rank = "tp_rank" in inspect.signature(load).parameters  # until 0.5.21
            rank = {"tp_rank": module.moe_tp_rank} if takes_rank else {}
            load(shard_dim=1 + down, expert_data=parameter.data[begin - experts.start : end - experts.start],
                 shard_id=shard, loaded_weight=tensor[begin - first : end - first], **rank)
        return True


def _fused(module: torch.nn.Module) -> type | None:
    """SGLang's class, named and not imported: this file is read where no SGLang is."""
    return next((kind for kind in type(module).__mro__ if kind.__name__ == "FusedMoE"), None)


def _experts(module: torch.nn.Module) -> range | str:
    """Those that this rank has, in the order of its parameters; or why stacks of them cannot be loaded."""
    method = type(module.quant_method).__name__
    if method != "UnquantizedFusedMoEMethod":
        return f"{method} has weights of its own"
    if module.use_triton_kernels or module.use_flashinfer_trtllm_moe or getattr(module, "use_intel_amx_backend", False):
        return "its kernels read weights in another order"
    for name in ("w13_weight", "w2_weight"):
        if getattr(module, name).weight_loader != module.weight_loader:
            return f"{name} has a loader of its own"
    server_args = getattr(sys.modules[_fused(module).__module__], "get_server_args", None)
    if server_args is not None and server_args().enable_eplb:
        return "experts change their places (--enable-eplb)"
    places = {expert: at for expert, at in enumerate(_places(module)) if at}
    in_order = list(places.values()) == [[at] for at in range(len(places))]
    own = range(min(places, default=0), max(places, default=-1) + 1)
    return own if own and in_order and len(own) == len(places) else "experts lie in another order, or in several places"


def _places(module: torch.nn.Module) -> list[list[int]]:
    """Of each of the model's experts, its places in this rank's parameters: SGLang's own loader is asked, not run."""
    places: list[list[int]] = []
    module._weight_loader_impl = lambda *, expert_id, **_others: places[-1].append(expert_id)
    try:
        for expert in range(module._num_global_routed):
            places.append([])
            module.weight_loader(module.w13_weight, None, "", "w1", expert)
    finally:
        del module._weight_loader_impl
    return places
