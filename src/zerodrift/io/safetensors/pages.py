"""Fresh memory at hand before it is written.

A large buffer has no pages until they are written, and the operating system then stops the writer at every
4 kB of it; a read from a file into such memory even begins again each time. Asked for a range at once, it
makes them in one go: a read of 1 GiB into fresh memory takes a tenth less of the processor (`bench/load.py`).

Linux 5.14 and later know the request. Where it is not known nothing happens, and nothing depends on it.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch

POPULATE_WRITE = 23
"""The request's number, which Python's `mmap` does not name."""


class Pages:
    """Asks for pages, until the system says that it does not know the request."""

    def __init__(self) -> None:
        self._ask = ctypes.CDLL(None).madvise if sys.platform == "linux" else None

    def ready(self, tensor: torch.Tensor) -> None:
        """Make the pages of a contiguous tensor in host memory, where there are none yet."""
        if self._ask is None:
            return
        low = tensor.data_ptr() & -mmap.PAGESIZE
        count = tensor.data_ptr() + tensor.nbytes - low
        if self._ask(ctypes.c_void_p(low), ctypes.c_size_t(count), POPULATE_WRITE):
            self._ask = None
