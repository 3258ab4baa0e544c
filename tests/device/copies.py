"""CUDA's work around its kernels: copies between host and device, and reads of values.

A CPU's operations take numbers and indices from any memory. CUDA's copy some of them to the device first and
read others to the host, and the host waits for either. The functions here cite torch's files.

Invariant: the host waits for a copy unless it is `non_blocking` and the host's memory is page-locked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

_MASKS = (torch.bool, torch.uint8)
_SET_ITEM = torch.Tensor.__setitem__


@wraps(_SET_ITEM)
def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """Set an item as on CUDA, for which torch makes numbers into tensors of the host
    (torch/csrc/autograd/python_variable_indexing.cpp); for other devices it makes them there."""
    if isinstance(value, (int, float, complex)) and tensor.device.type not in ("cpu", "meta"):
        value = torch.scalar_tensor(value, dtype=tensor.dtype, device="cpu")
    _SET_ITEM(tensor, index, value)


@dataclass(frozen=True)
class Copies:
    """The copies and reads of a device."""

    launch: Callable[[torch.Tensor, torch.Tensor, bool], None]
    """Launch a copy from one range of memory to another; the flag says whether the host waits for it."""
    is_pinned: Callable[[torch.Tensor], bool]
    wait: Callable[[], None]
    """Let the host wait for the current stream."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy as aten/src/ATen/native/cuda/Copy.cu does.

        Between host and device, tensors of other dtypes or strides are copied by way of temporaries, which
        are converted on the device if the copy is `non_blocking`. A temporary on the host is not page-locked.
        """
        if not target.numel():
            return target
        from_host = source.device.type == "cpu"
        if from_host == (target.device.type == "cpu"):
            self.launch(source, target, False)
        elif source.dtype == target.dtype and _are_alike(source, target):
            host = source if from_host else target
            self.launch(source, target, not (non_blocking and self.is_pinned(host)))
        else:
            with torch._C.DisableTorchFunction():
                dtype = source.dtype if from_host == non_blocking else target.dtype
                values = source.to(dtype).expand_as(target).contiguous()
                there = target
                if dtype != target.dtype or not target.is_contiguous():
                    there = torch.empty_like(target, dtype=dtype, memory_format=torch.contiguous_format)
                self.copy(values, there, non_blocking)
                if there is not target:
                    target.copy_(there, non_blocking)
        return target

    def arguments(self, operation: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an operation as its kernel gets them.

        aten/src/ATen/native/TensorAdvancedIndexing.cpp, TensorCompare.cpp and cuda/Indexing.cu.
        """
        if operation in ("aten.masked_fill_", "aten.index_fill_"):
            return (*args[:-1], _number(args[-1]))
        if operation == "aten.where":
            place = next(each.device for each in args if _is_tensor(each) and each.device.type != "cpu")
            return tuple(each.to(place) if _is_tensor(each) and not each.dim() else each for each in args)
        if operation not in ("aten.index", "aten._index_put_impl_"):
            return args
        tensor, indices, *rest = args
        if rest:
            value, adds = rest[0], any(rest[1:2])
            given = [index for index in indices if index is not None]
            masks = [index for index in given if index.dtype in _MASKS]
            is_number = not _is_tensor(value) or (value.device.type == "cpu" and value.numel() == 1)
            if is_number and not adds and len(given) == len(masks) == 1 and masks[0].device == tensor.device:
                return args  # filled in by `masked_fill_`
            if _is_tensor(value) and not value.dim():
                rest[0] = value.to(tensor.device)
            if masks:
                self.wait()  # for the number of elements
        there = [index if index is None else index.to(tensor.device) for index in indices]
        return (tensor, there, *rest)


def _number(value: Any) -> Any:
    """Return a number that the host reads, and waits for if the device has it."""
    return value.item() if _is_tensor(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same layout, without gaps."""
    layouts = [
        [(stride, size) for stride, size in zip(of.stride(), of.shape, strict=True) if size > 1]
        for of in (one, other)
    ]
    span = 1 + sum((size - 1) * stride for stride, size in layouts[0])
    return layouts[0] == layouts[1] and span == other.numel()
