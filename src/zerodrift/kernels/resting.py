"""Host memory of what rests between steps, apart from what comes and goes.

`malloc` cuts both from one heap, where what stays is scattered among what goes: the gaps that a step leaves
are too small for the next one's buffers, and the heap grows. Memory that is mapped by itself leaves no gaps,
and goes back to the system with its tensor.

Invariant: a tensor of its own, contiguous and zero.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

LEAST = 1 << 20
"""Bytes from which on memory is mapped: below, page by page, it costs more than it saves."""


def zeros(size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As `torch.zeros`, for what will rest."""
    shape = torch.Size([size] if isinstance(size, int) else size)
    count = shape.numel()
    if device.type != "cpu" or count * dtype.itemsize < LEAST or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=dtype).view(shape)
