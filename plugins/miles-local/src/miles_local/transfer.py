"""Memory of the host that a device copies from and to."""

from __future__ import annotations

import logging
import weakref

import numpy as np
import torch

logger = logging.getLogger(__name__)


def on_device(array: np.ndarray, where: torch.device) -> torch.Tensor:
    """An array on a device: a copy from pinned memory, for which neither side waits; on the CPU the same memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)


def host_memory(size: int, pinned: bool) -> torch.Tensor:
    """So many bytes of host memory, pinned for as long as this tensor lives."""
    made = torch.empty(size, dtype=torch.uint8)
    if pinned and size:
        pin(made)
    return made


def pin(tensor: torch.Tensor) -> None:
    """Pin a tensor's memory until it is freed. What torch pins comes in powers of two: 9 GiB would take 16."""
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.nbytes, 0)):
        logger.warning("%.1f GiB of host memory cannot be pinned, so copies are slow: raise ulimit -l",
                       tensor.nbytes / 2**30)
        return
    # Memory that is freed while it is pinned would go on being what the GPU writes to.
    weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
