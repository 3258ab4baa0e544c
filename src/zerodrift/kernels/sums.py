"""Add up all parts of a reduction in one call.

`comm/fold.py` defines the result, one addition after the other, and handles the cases that are not compiled.

Invariant: the sum has the bits of `comm/fold.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zerodrift.kernels import device, native

FEW = 2
"""Most parts that torch adds in one call."""


def add_up(total: Tensor, parts: Sequence[Tensor] | Tensor, *, tree: bool) -> bool:
    """Write the sum of flat `parts`, or of the rows of `[parts, elements]`, to `total`, which may be a part.

    Return False if this case is not compiled.
    """
    kind, count = parts[0].dtype, len(parts)
    if count <= FEW or kind not in native.TYPES or total.dtype not in (kind, torch.float32):
        return False
    if total.device.type != "cpu":
        if tree or not isinstance(parts, Tensor) or not parts.is_contiguous():
            return False
        if not device.works(total.device):
            return False
        device.sums(parts, total)
        return True
    built = native.library()
    if built is None:
        return False
    if isinstance(parts, Tensor):
        addresses = np.arange(count, dtype=np.int64) * (parts.stride(0) * parts.itemsize) + parts.data_ptr()
    else:
        addresses = np.array([part.data_ptr() for part in parts], dtype=np.int64)
    source, target = (
        (addresses.ctypes.data, native.TYPES[kind]),
        (total.data_ptr(), native.TYPES[total.dtype]),
    )
    built.sums(total.numel(), count, *source, *target, int(tree), torch.get_num_threads())
    return True
