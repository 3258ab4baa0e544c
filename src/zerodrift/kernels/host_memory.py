"""Host memory of tensors that rest between steps, mapped outside of the heap.

`malloc` would mix resting tensors with the buffers of a step in one heap. The gaps that one step leaves are
then too small for the buffers of the next, and the heap grows. A separate mapping leaves no gaps, and returns
to the system with its tensor.

Invariant: a tensor has memory of its own, contiguous and zero.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence

import torch

LEAST = 1 << 20
"""Bytes of the smallest mapped tensor: for smaller ones, whole pages cost more than they save."""


def zeros(size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, as `torch.zeros` does, for a tensor that rests between steps."""
    shape = torch.Size([size] if isinstance(size, int) else size)
    count = shape.numel()
    if device.type != "cpu" or count * dtype.itemsize < LEAST or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapped, dtype=dtype).view(shape)
