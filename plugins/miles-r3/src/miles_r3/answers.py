"""Routes from an engine's answer. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from miles_core.errors import EngineError

if TYPE_CHECKING:
    from miles_core.stages.rollout import Response
    from miles_core.types import Sample
    from miles_r3.plugin import Sizes

LAYERS = "the engine serves another model, or counts its layers otherwise: see that --hf-checkpoint is what it serves"


def routes_of(sample: Sample, response: Response, sizes: Sizes, stale: int = 2) -> np.ndarray:
    """[T-1, layers, topk] of a sample of T tokens, as the column has them: the experts of every position that predicts
    one. They are the engine's own array where that fits.

    Of a conversation they are the last answer's, by whose weights earlier turns were computed again: what was drawn
    from older ones is left without.

    Layers without experts hold what the engine puts there. Rows of the column's `none` are positions without routes.

    Args:
        stale: from which mark on a position that the server computed again is left without: 1 also where the weights
            were the same, 2 where they were newer.

    Raises:
        EngineError: the answer has none, or not the model's number of layers and of experts, or others than it has.
    """
    experts = response.extra.get("routed_experts")
    who = f"the engine's answer to {sample.name}"
    if experts is None:
        raise EngineError("the engine returns no routed experts", code="r3-engine-without-routing", who=who,
                          fix="give SGLang --sglang-enable-return-routed-experts and --router smg or none; an engine "
                          "of a plugin's has to fill Response.extra, or run without plugin r3")
    shape = (sample.length - 1, sizes.layers, sizes.topk)
    if experts.ndim != 3 or any(size not in (None, got) for size, got in zip(shape, experts.shape, strict=True)):
        raise EngineError(f"routed experts should have shape {list(shape)}: positions, layers, experts of a token",
                          got=list(experts.shape), code="r3-routing-shape", who=who, fix=LAYERS)
    if experts.size and (experts.max() >= min(sizes.experts or 2**15, 2**15)
                         or experts.dtype.kind == "i" and experts.min() < -1):
        raise EngineError(f"routed experts should be below {sizes.experts}", got=f"{experts.min()} to {experts.max()}",
                          who=who, code="r3-routing-out-of-range", fix=LAYERS)
    again = np.zeros(len(experts), bool)
    again[len(experts) - sample.response_length:] = sample.columns["versions"] < response.versions[0]
    again |= np.asarray(response.extra.get("computed_again", 0)) >= stale
    routes = experts.astype(sizes.dtype, copy=bool(again.any()))  # -1 becomes 255 where they are unsigned
    if again.any():
        routes[again] = sizes.none
    return routes
