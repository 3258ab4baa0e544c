"""Pinned parameters, which keep their dtype wherever they are used, also outside of their own module.

The boundaries of `compute.py` keep a pinned module out of autocast. Other code may use its parameters too, as
in `F.linear(x, self.gate.weight)` or `x @ self.gate`. So pinned parameters have a class of `Parameter` whose
operations run with autocast off, and whose products cast other floating arguments to the pin's dtype. Results
of pinned parameters alone (a view, a normalized matrix, a concatenation) have such a class too.

Invariant: a pinned parameter, and a result of pinned parameters alone, enters no operation in a narrower
dtype than its own, unless the model casts it, which is warned of once per parameter.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zerodrift.engine.habits.absent_parameter import gathered_class, set_gathered_class
from zerodrift.engine.nested import tensors_in
from zerodrift.engine.segment import FlatSegment
from zerodrift.policy import Output

PRODUCTS = frozenset((
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "inner", "outer",
    "ger", "addmm", "addbmm", "baddbmm", "addmv", "addr", "einsum", "tensordot", "vdot", "vecdot",
    "multi_dot", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "kron", "cross", "linalg_cross",
    "cdist", "pairwise_distance", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "grid_sample", "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm",
    "prelu", "embedding_bag", "multi_head_attention_forward", "scaled_dot_product_attention", "lerp", "cat",
    "stack", "concat", "hstack", "vstack", "dstack", "scatter", "scatter_add", "index_add", "index_copy",
    "index_put", "masked_scatter", "solve_triangular", "linalg_solve_triangular", "grouped_mm", "_grouped_mm"
))  # fmt: skip
"""Functions that torch computes in one dtype, to which other arguments are cast. Elementwise ones promote."""

ATTENTION = "multi_head_attention_forward"
"""A whole block in one function, which must return its input's dtype."""

OTHERS = frozenset((
    "grad", "embedding", "embedding_bag", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like",
    "randn_like", "randint_like", "new", "new_tensor", "new_empty", "new_zeros", "new_ones", "new_full",
    "new_empty_strided"
))  # fmt: skip
"""Functions whose results are not weights: gradients, embeddings of tokens, tensors of other values."""
CASTS = frozenset(["to", "type", "type_as", "bfloat16", "half"])


def pin(segments: Iterable[FlatSegment]) -> None:
    """Set the classes of pinned parameters."""
    for segment in segments:
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            if row.columns.pinned and parameter.is_floating_point():
                set_gathered_class(parameter, class_for(row.name, row.columns.output))


def make_plain(segments: Iterable[FlatSegment]) -> None:
    """Turn pinned parameters, and weights with fp8 products, into plain ones again."""
    for segment in segments:
        for parameter in segment.parameters:
            if issubclass(gathered_class(parameter), OwnParameter):
                set_gathered_class(parameter, nn.Parameter)


class OwnParameter(nn.Parameter):
    """Base class of parameters that change how operations treat them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter: a copy of a module is a plain one."""
        if id(self) not in memo:
            with torch._C.DisableTorchFunctionSubclass():
                memo[id(self)] = nn.Parameter(self.data.clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


class Pinned(OwnParameter):
    """A parameter that is not rounded where it is used."""


class OwnResult(torch.Tensor):
    """Base class of results of `OwnParameter`s."""

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = copy.deepcopy(self._plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)


class _PinnedResult(OwnResult):
    """A result of pinned parameters alone."""


def class_for(name: str, output: Output | None, kind: type[torch.Tensor] = torch.Tensor) -> type[Pinned]:
    """Return the class of a pinned parameter; `kind` is what operations return around it."""
    warned: list[str] = []
    others = () if kind is torch.Tensor else (kind,)

    def torch_function(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            given = tensors_in((args, kwargs))
            result = _run(func, named, given, (args, kwargs or {}), output)
            if named in CASTS and not warned and _narrows(args[0], result):
                warned.append(name)
                warnings.warn(
                    f"`{name}` is pinned to {args[0].dtype}, and the model itself casts it to "
                    f"{result.dtype}: the results are rounded in spite of the pin.",
                    stacklevel=3,
                )
            if named in OTHERS or not _alone(given):
                return result
            size = max(
                tensor.dtype.itemsize for tensor in given if isinstance(tensor, (Pinned, _PinnedResult))
            )
            if named == "__iter__":
                return iter(of_class(tuple(result), kind, result_class, size))
            return of_class(result, kind, result_class, size)

    # Compiled code takes parameters of any class, but no other tensors (torch 2.13 to 2.15).
    apart = torch.compiler.disable(
        torch_function, reason=f"tensors computed from the pinned `{name}` keep its dtype"
    )
    result_class = type("PinnedResult", (_PinnedResult, *others), {"__torch_function__": classmethod(apart)})
    return type("PinnedParameter", (Pinned, *others), {"__torch_function__": classmethod(torch_function)})


def _alone(given: list[torch.Tensor]) -> bool:
    """Return whether all floating tensors, except numbers, are pinned or results of pinned ones."""
    return all(
        isinstance(tensor, (Pinned, _PinnedResult))
        for tensor in given
        if tensor.is_floating_point() and tensor.dim()
    )


def of_class(result: Any, kind: type[torch.Tensor], result_class: type, size: int = 0) -> Any:
    """Set the class of floating results whose elements have at least `size` bytes."""
    if type(result) is kind:
        if not result.dim() or not result.is_floating_point() or result.dtype.itemsize < size:
            return result
        if torch.compiler.is_compiling():
            return result.as_subclass(result_class)
        # `as_subclass` would add a node: torch finds a parameter's node by `weight.view_as(weight)`.
        result.__class__ = result_class
    elif isinstance(result, (tuple, list)):
        for item in result:
            of_class(item, kind, result_class, size)
    return result


def name_of(func: Any) -> str:
    """Return the name of a call of torch, or of the attribute that it reads."""
    named = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", named) if named == "__get__" else named


def _run(
    func: Callable[..., Any],
    named: str,
    given: list[torch.Tensor],
    inputs: tuple[Any, Any],
    output: Output | None,
) -> Any:
    floating = [tensor for tensor in given if tensor.is_floating_point()]
    device = floating[0].device.type if floating else "cpu"
    off = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if off else contextlib.nullcontext():
        dtypes = {tensor.dtype for tensor in floating}
        if named not in PRODUCTS or len(dtypes) < 2:
            return func(*inputs[0], **inputs[1])
        wide = functools.reduce(torch.promote_types, dtypes)
        args, kwargs = _cast(inputs, wide)
        result = func(*args, **kwargs)
        if output == "input" or (output is None and named == ATTENTION):
            result = _cast(result, floating[0].dtype)
        return result


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)([_cast(item, dtype) for item in value])
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _narrows(given: Any, result: Any) -> bool:
    both = isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor)
    return both and result.is_floating_point() and result.dtype.itemsize < given.dtype.itemsize
