"""A pin holds wherever the parameter is used, not only where its own module is called.

The boundaries of `compute.py` keep a pinned module out of autocast. A parameter is also used by others: by
`F.linear(x, self.gate.weight)` of a block, by `MultiheadAttention` for its `out_proj`, by `x @ self.gate`. So
pinned parameters become a class of `Parameter` whose operations run with autocast off, and whose products
take other floating arguments in the pin's dtype. They stay the same objects: optimizers, ties and names hold.
Views of them are of such a class too; what an operation computes is a plain tensor.

Invariant: a pinned parameter enters no operation in a narrower dtype than its own, unless the model casts it
itself, which is said once, by name.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zerodrift.engine.absent import become, kind_of
from zerodrift.engine.nested import Replacement, tensors_in
from zerodrift.engine.segment import FlatSegment
from zerodrift.policy.nouns import Output

PRODUCTS = frozenset(
    [
        *(
            "linear",
            "bilinear",
            "matmul",
            "__matmul__",
            "__rmatmul__",
            "mm",
            "bmm",
            "mv",
            "dot",
            "inner",
            "outer",
        ),
        *("addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "tensordot", "vdot", "chain_matmul"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "prelu", "embedding_bag"),
        *("multi_head_attention_forward", "scaled_dot_product_attention", "lerp", "cat", "stack", "concat"),
    ]
)
"""What torch computes in one dtype: other arguments are cast up. Elementwise operations promote."""

ATTENTION = "multi_head_attention_forward"
"""A whole block in one function: what comes after it computes in its input's dtype."""

VIEWS = frozenset(
    [
        *("__getitem__", "t", "T", "mT", "transpose", "permute", "view", "view_as", "reshape", "reshape_as"),
        *("expand", "expand_as", "unsqueeze", "squeeze", "flatten", "unflatten", "select", "narrow", "chunk"),
        *(
            "split",
            "tensor_split",
            "unbind",
            "index_select",
            "contiguous",
            "clone",
            "movedim",
            "swapaxes",
            "diagonal",
        ),
        *("swapdims", "ravel", "repeat", "repeat_interleave", "gather", "take_along_dim", "float", "alias"),
    ]
)
CASTS = frozenset(["to", "type", "type_as", "bfloat16", "half"])


def pin(segments: Iterable[FlatSegment]) -> None:
    """Make the parameters of pinned rows hold their pins."""
    for segment in segments:
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            if row.columns.pinned and parameter.is_floating_point():
                become(parameter, _class_for(row.name, row.columns.output))


def unpin(segments: Iterable[FlatSegment]) -> None:
    """Make them plain parameters again."""
    for segment in segments:
        for parameter in segment.parameters:
            if issubclass(kind_of(parameter), Pinned):
                become(parameter, nn.Parameter)


class Pinned(nn.Parameter):
    """A parameter that is not rounded where it is used. Each has a class of its own, which knows its name."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy of a module is a plain one."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        found: nn.Parameter = memo[id(self)]
        return found


class _View(torch.Tensor):
    """Part of one, or another shape of it."""


def _class_for(name: str, output: Output | None) -> type[Pinned]:
    told: list[str] = []

    @classmethod  # type: ignore[misc]
    def torch_function(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = _name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            found = _run(func, named, args, kwargs or {}, output)
            if named in VIEWS:
                given = {id(tensor) for tensor in tensors_in((args, kwargs))}
                for tensor in tensors_in(found):
                    # Not `as_subclass`, which is an operation more: the node behind `weight.view_as(weight)`
                    # is to be the parameter's own, by which torch finds where a gradient is added.
                    if id(tensor) not in given and type(tensor) is torch.Tensor:
                        tensor.__class__ = view
                return found
            if named in CASTS and not told and _narrows(args[0], found):
                told.append(name)
                warnings.warn(
                    f"`{name}` is pinned to {args[0].dtype}, and the model itself casts it to "
                    f"{found.dtype}: what it computes with that is rounded, whatever the config says.",
                    stacklevel=3,
                )
            return found

    view = type("PinnedView", (_View,), {"__torch_function__": torch_function})
    return type("PinnedParameter", (Pinned,), {"__torch_function__": torch_function})


def _name_of(func: Any) -> str:
    """A function's name; of a property's getter that of the property."""
    named = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", named) if named == "__get__" else named


def _run(
    func: Callable[..., Any], named: str, args: Any, kwargs: dict[str, Any], output: Output | None
) -> Any:
    floating = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    device = floating[0].device.type if floating else "cpu"
    off = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if off else contextlib.nullcontext():
        if named not in PRODUCTS or len({tensor.dtype for tensor in floating}) < 2:
            return func(*args, **kwargs)
        wide = max((tensor.dtype for tensor in floating), key=lambda dtype: dtype.itemsize)
        inputs = Replacement(lambda tensor: _up(tensor, wide))
        try:
            args, kwargs = inputs.apply((args, kwargs))
            found = func(*args, **kwargs)
        finally:
            inputs.undo()
        if output == "input" or (output is None and named == ATTENTION):
            found = Replacement(lambda tensor: _up(tensor, floating[0].dtype)).apply(found)
        return found


def _up(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _narrows(given: Any, found: Any) -> bool:
    both = isinstance(given, torch.Tensor) and isinstance(found, torch.Tensor)
    return both and found.is_floating_point() and found.dtype.itemsize < given.dtype.itemsize
