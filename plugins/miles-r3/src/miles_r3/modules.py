"""Routers of transformers' modules that replay.

transformers has a class of router for each architecture, and some choose outside of it: softmax or sigmoid before or
after, in groups, with a bias. What they share is a block with a part `experts` and, somewhere in its forward, a `topk`
of one score for each expert. That call is answered with the recorded experts and their live scores; whatever the block
makes of them is its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from miles_local.transfer import on_device
from torch.overrides import TorchFunctionMode

from miles_core.errors import TrainError
from miles_r3.passes import Chosen, Forward, Routers, replayed

FIX = "run without the plugin; it replays where a block with `experts` chooses them by torch.topk"


class ModuleRouters(Routers):
    """Those of one module.

    Args:
        layers, topk: of a row of routes.
        experts: of a layer.
    """

    def __init__(self, layers: int, topk: int, experts: int):
        super().__init__(layers, topk)
        self.experts = experts
        self._device = torch.device("cpu")
        self._last: Forward | None = None

    def adopt(self, chunk: torch.nn.Module) -> None:
        blocks = [(name, part) for name, part in chunk.named_modules()
                  if isinstance(getattr(part, "experts", None), torch.nn.Module)]
        if not blocks:
            raise TrainError("the model has no block with experts", code="r3-blocks-missing", who="plugin r3",
                             got=type(chunk).__name__, fix=FIX)
        self._device = next(chunk.parameters()).device
        for name, block in blocks:
            layer = next(int(word) for word in name.split(".") if word.isdigit())
            block.forward = self._replaying(block.forward, layer)

    def _replaying(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def call(*args: object, **named: object) -> Any:
            with _Topk(self, layer) as topk:
                output = forward(*args, **named)
            if not topk.met:
                raise TrainError(f"layer {layer} does not choose its experts by topk", code="r3-blocks-unsupported",
                                 who="plugin r3", fix=FIX)
            return output

        return call

    def choose(self, layer: int, scores: torch.Tensor, values: torch.Tensor, free: torch.Tensor) -> Chosen:
        """Scores [T, topk] and experts [T, topk] in place of those that a router would choose."""
        counted = self.under_way
        forward = counted or self._last  # a layer that is computed again, in the backward pass of the last micro-batch
        if counted is not None and counted.recorded is not None and counted.place is not None:
            counted.recorded.put(layer, counted.place, free)
        if forward is None or forward.routes is None:
            return values, free
        return replayed(layer, scores, free, forward.routes[:, layer], counted)

    @contextmanager
    def forward(self, routes: np.ndarray | None, place: np.ndarray | None, *, replay: bool) -> Iterator[None]:
        with super().forward(routes, place, replay=replay):
            if replay:
                self._last = self.under_way
            yield

    def _mine(self, rows: np.ndarray) -> torch.Tensor:
        return on_device(rows, self._device)

    def forget(self) -> None:
        self._last = None


class _Topk(TorchFunctionMode):
    """Answers the topk of a block that is one score for each expert; other calls, such as one over groups, pass."""

    def __init__(self, routers: ModuleRouters, layer: int):
        super().__init__()
        self._routers, self._layer, self.met = routers, layer, False

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, (values, free) = args[0], result
        if scores.shape[1:] != (self._routers.experts,) or free.shape[1] != self._routers.topk:
            return result
        self.met = True
        return torch.return_types.topk(self._routers.choose(self._layer, scores, values, free))
