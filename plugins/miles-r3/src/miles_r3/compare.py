"""How far the trainer's log-probs are from the engine's, with replay and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from miles_core.stages.step import TrainerAccess
    from miles_r3.passes import Routers

FREE, REPLAYED = "r3_free", "r3_replayed"


def gaps(access: TrainerAccess, routers: Routers) -> dict[str, float]:
    """Mean |log-prob - engine's| over the trained tokens; a pass without replay, and one with it where none was made.

    Every rank has to call it.
    """
    with routers.free():
        access.forward("actor", lambda rows: {FREE: rows.log_probs()})
    scored = "log_probs" if all("log_probs" in sample.columns for sample in access.samples) else REPLAYED
    if scored == REPLAYED:
        access.forward("actor", lambda rows: {REPLAYED: rows.log_probs()})
    metrics = {"rollout/r3/log_prob_diff": _gap(access, scored), "rollout/r3/log_prob_diff_free": _gap(access, FREE)}
    for sample in access.samples:
        sample.columns.pop(FREE, None)
        sample.columns.pop(REPLAYED, None)
    return metrics


def _gap(access: TrainerAccess, name: str) -> float:
    each = [np.abs(s.columns[name] - s.columns["rollout_log_probs"])[s.columns["loss_mask"] > 0]
            for s in access.samples]
    whole = np.concatenate(each)
    return float(whole.mean(dtype=np.float64)) if whole.size else 0.0
