"""Arrays of the host on their way to a device."""

from __future__ import annotations

import numpy as np
import torch


def on_device(array: np.ndarray, where: torch.device) -> torch.Tensor:
    """A copy of an array on a device; from pinned memory, so that neither the host nor the device waits for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)
