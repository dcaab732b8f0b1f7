"""The weight sync: the engine copies what the trainer's module holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.stages.rollout import Engine, PauseMode


class Handed:
    """See miles_core.stages.sync.WeightSync.

    Args:
        mode: what becomes of requests in flight.
    """

    def __init__(self, mode: PauseMode):
        self._mode = mode

    async def sync(self, trainer: Any, engine: Engine, version: int) -> dict[str, float]:
        """Pause, copy, resume. After an error the engine stays paused, with the weights that it had."""
        if engine.version == version:
            return {"tensors": 0, "bytes": 0}
        await engine.pause(self._mode)
        tensors = list(await trainer.weights())
        await engine.update_weights(tensors, version)
        await engine.resume()
        return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for _, tensor in tensors)}
