"""Memory of the host that a GPU copies to and from without waiting: pinned, and taken once."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import torch
from miles_local.transfer import pin

from miles_megatron import cpu

BLOCK = 2**30
"""Bytes that are pinned at once. A copy does not cross from one to the next, which the driver refuses."""

ALIGNMENT = 512
"""Bytes at whose multiples tensors begin, as those of torch's own allocator do."""


def host_copy(source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """A copy in host memory, pinned where there is a GPU; the caller synchronises before it is read.

    Args:
        into: an earlier copy to write over.
    """
    copy = _host(source) if into is None else into
    copy.copy_(source.detach(), non_blocking=True)
    return copy


def _host(like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(like, device="cpu")
    if like.is_cuda and made.numel():
        pin(made)
    return made


def synchronise() -> None:
    """Copies that were started are done when this returns."""
    if not cpu.no_cuda():
        torch.cuda.synchronize()


class Blocks:
    """Host memory that is filled from its beginning time after time, and grows where it is too small.

    To find and pin a gigabyte takes a third of a second; a thread may do it ahead (`reserve`).
    """

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._block = self._at = 0

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def reserve(self, size: int) -> threading.Thread:
        """Have room for so many bytes in the end; the thread that sees to it."""
        device = None if cpu.no_cuda() else torch.cuda.current_device()

        def grow() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # of this thread: a context on another GPU would take memory there
            self._grow(size)

        thread = threading.Thread(target=grow, name="pinning", daemon=True)
        thread.start()
        return thread

    def rewind(self, size: int) -> None:
        """The next piece is the first; there is room for pieces of so many bytes, each rounded up to ALIGNMENT."""
        self._grow(size)
        self._block = self._at = 0

    def pieces(self, size: int) -> Iterator[torch.Tensor]:
        """The next `size` bytes, in pieces of one block each."""
        while size:
            block = self.blocks[self._block]
            piece = block[self._at : self._at + size]
            size, self._at = size - piece.nbytes, self._at + rounded_up(piece.nbytes)
            if self._at == block.nbytes:
                self._block, self._at = self._block + 1, 0
            yield piece

    def _grow(self, size: int) -> None:
        while True:
            with self._lock:  # by block, so that who waits for the first need not wait for the last
                left = size - self.nbytes
                if left <= 0:
                    return
                self.blocks.append(_block(min(BLOCK, -(-left // mmap.PAGESIZE) * mmap.PAGESIZE)))


def rounded_up(size: int) -> int:
    """To ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _block(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    if not cpu.no_cuda():
        memory.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to find and to pin
        block.zero_()  # by all of torch's threads, where the driver would touch page after page
        pin(block)
    return block
