"""Routers of Megatron-core that replay, by its RouterReplay.

What a checkpointed layer takes is kept, first in first out, for the recompute: backward passes of one stage come in the
order of its forward passes, under 1F1B and interleaved pipelines alike. A layer that keeps its activations keeps none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from miles_local.transfer import on_device
from miles_megatron import cpu

from miles_core.errors import TrainError
from miles_r3.passes import Chosen, Routers, replayed

cpu.install()

from megatron.core import parallel_state  # noqa: E402 - after install()
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay  # noqa: E402


class Replay(RouterReplay):
    """In the place of a router's own.

    Args:
        layer: of the model, from 0.
        routers: of this rank, which know what is under way.
    """

    def __init__(self, layer: int, routers: Routers):
        super().__init__()
        self.layer, self.routers = layer, routers

    def get_replay_topk(self, scores: torch.Tensor, topk: int, num_groups: int | None = None,
                        group_topk: int | None = None, default_compute_topk: Callable[..., Any] | None = None,
                        ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [T, topk] and experts [T, topk] of T rows; a row of -1 chooses freely."""
        compute = cast("Callable[..., Chosen]", default_compute_topk)  # Megatron hands on its own
        values, free = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        under_way = self.routers.under_way
        if under_way is None:
            return self._again(scores, values, free)
        if under_way.recorded is not None:
            under_way.recorded.put(self.layer, cast("torch.Tensor", under_way.place), free)
        if under_way.routes is None:
            if under_way.gradient and not torch.is_grad_enabled():
                self.replay_backward_list.append(None)
            return values, free
        recorded = under_way.routes[:, self.layer]
        if under_way.gradient and not torch.is_grad_enabled():  # a checkpointed layer, which is computed again
            self.replay_backward_list.append(recorded)
        return replayed(self.layer, scores, free, recorded, under_way)

    def _again(self, scores: torch.Tensor, values: torch.Tensor, free: torch.Tensor) -> Chosen:
        """A recompute, in a backward pass."""
        if self.replay_backward_list:
            recorded = self.replay_backward_list.pop(0)
            return (values, free) if recorded is None else replayed(self.layer, scores, free, recorded, None)
        if self.routers.in_step:
            raise TrainError(f"layer {self.layer} is recomputed, but its routing was not recorded",
                             code="r3-routing-not-recorded", who="plugin r3",
                             fix="use Megatron's own recomputation (--recompute-granularity)")
        return values, free


class MegatronRouters(Routers):
    """Routers of Megatron-core.

    Args:
        config: Megatron's, of the actor.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config.num_layers, cast("int", config.moe_router_topk))
        self.config = config
        self._replays: list[Replay] = []

    def adopt(self, chunk: torch.nn.Module) -> None:
        """Put a Replay in the place of the RouterReplay of each of the decoder's own layers.

        Raises:
            TrainError: Megatron made routers without one.
        """
        for layer in cast("Any", chunk).decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if router is None:
                continue
            if router.router_replay is None:
                raise TrainError("the model's routers cannot replay", code="r3-routers-unsupported", who="plugin r3",
                                 fix="leave moe_enable_routing_replay to the plugin")
            every = RouterReplay.global_router_replay_instances
            if router.router_replay in every:
                every.remove(router.router_replay)
            router.router_replay = Replay(layer.layer_number - 1, self)
            self._replays.append(router.router_replay)

    @property
    def _parts(self) -> int:
        """Ranks among which sequence parallelism cuts a micro-batch's rows inside of the model."""
        return self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1

    def _mine(self, rows: np.ndarray) -> torch.Tensor:
        """The part of the rows [T, ...] that this tensor-parallel rank's routers see, where they compute."""
        size = len(rows) // self._parts
        first = size * parallel_state.get_tensor_model_parallel_rank() if self._parts > 1 else 0
        return on_device(rows[first : first + size], cpu.device())

    def forget(self) -> None:
        for one in self._replays:
            one.clear_indices()

    def close(self) -> None:
        """Out of Megatron's list of all."""
        every = RouterReplay.global_router_replay_instances
        every[:] = [one for one in every if one not in self._replays]
