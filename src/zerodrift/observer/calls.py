"""What calls of torch say: what computes, what a collective carries, what an optimizer keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from zerodrift.observer.operations import VIEWS
from zerodrift.observer.owners import local


def computing(func: Any) -> str:
    """The name of an operation that computes; empty for one that does not."""
    name: str = func.overloadpacket.__name__
    return name if func.namespace == "aten" and name not in VIEWS and not _UNREAD.match(name) else ""


_UNREAD = re.compile(r"copy_$|_foreach_copy|new_|.*_like$")
"""Operations that copy, or take a shape and no values."""

PAYLOAD = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "reduce_": 0,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "_allgather_base_": 1,
    "allgather_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "all_reduce": 0,
    "reduce_scatter_tensor": 0,
    "all_gather_into_tensor": 0,
}
"""Collective of c10d -> the argument that has what is sent."""

LEAST_PACKED = 64
"""Elements of a collective that may be of parameters; norms, losses and flags are fewer."""


def floating(args: Any, kwargs: Any, also_bytes: bool = False) -> Iterator[torch.Tensor]:
    """Floating tensors among arguments, in lists too."""
    for item in args:
        if isinstance(item, torch.Tensor):
            if item.is_floating_point() or (also_bytes and item.dtype is torch.uint8):
                yield item
        elif isinstance(item, (list, tuple)):
            yield from floating(item, None, also_bytes)
    if kwargs:
        yield from floating(kwargs.values(), None, also_bytes)


def optimized(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if isinstance(tensor, torch.Tensor):
                yield tensor


def moments(state: Any, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What an optimizer keeps of every element, or of every block of them: no counters."""
    if not isinstance(state, dict):
        return []
    numel = local(tensor).numel()
    least = min(max(2, numel // 4096), numel)
    kept = [(str(key), local(value)) for key, value in state.items() if isinstance(value, torch.Tensor)]
    return [(key, value) for key, value in kept if value.numel() >= least]
