"""Recognise matrix products whose weight gradient can be formed later, and form their gradients.

A call of torch is recognised if its weight is a parameter or a view of one: `linear`, `matmul`, `mm`,
`addmm`, `bmm` and grouped products. These cover `nn.Linear`, attention projections, and experts that are
stacked in one parameter. Autograd forms the gradients of all other calls at once, and of weights that have a
hook, since nothing may come between a weight and its late gradient.

Invariant: a product's output has the bits of torch's own call. Its weight gradient is formed at another time,
in the dtype asked for, without rounding before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F  # noqa: N812

from zerodrift.engine import has_narrow_products

Kind = Literal["linear", "matmul", "batched", "grouped"]
"""Products of input `x` and weight `w`: x w^T with w [out, in]; x w with w [in, out]; x w for each of a
batch; groups of rows of x, each with its own w."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """The place of a weight in its parameter: what `as_strided` takes, counted from the parameter's start."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A recognised product."""

    kind: Kind
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    offsets: torch.Tensor | None
    parameter: nn.Parameter
    place: StridedView
    run: Callable[..., torch.Tensor]
    """(x, weight, bias) -> the result of torch's own call."""


def recognise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MatrixProduct | None:
    """Return the product that a call of torch is, if its weight gradient can be formed later."""
    parse = _PARSERS.get(function)
    parsed = parse(*args, **kwargs) if parse is not None else None
    if parsed is None:
        return None
    kind, x, weight, bias, offsets, run = parsed
    if has_narrow_products(weight):
        return None  # all its products are formed as planned, its gradient's at once
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_floating_point()):
        return None
    parameter = _root(weight)
    if parameter is None or not parameter.is_contiguous() or not _fits(kind, x, weight):
        return None
    if parameter.dtype is not weight.dtype or _overlaps(weight) or hooked(weight) or hooked(parameter):
        return None
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if weight.dtype is not dtype:
            return None  # autocast makes a copy, whose gradient autograd has to bring back
        x = x.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if x.dtype is not weight.dtype:
        return None  # torch says what is wrong with it
    offset = weight.storage_offset() - parameter.storage_offset()
    place = StridedView(tuple(weight.shape), weight.stride(), offset)
    return MatrixProduct(kind, x, weight, bias, offsets, parameter, place, run)


def _root(weight: torch.Tensor) -> nn.Parameter | None:
    """Return the parameter that a weight is, or is a plain view of; None if operations lie between them."""
    if isinstance(weight, nn.Parameter) and weight.is_leaf:
        return weight
    whole, node = weight._base, weight.grad_fn
    while node is not None and type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    leads_to = getattr(node, "variable", None)  # only nodes of leaves have it
    return whole if isinstance(whole, nn.Parameter) and leads_to is whole else None


VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Narrow", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "Squeeze",
        "SplitWithSizes", "T", "Transpose", "Unbind", "Unfold", "Unsqueeze", "UnsafeSplit", "UnsafeView",
        "View"
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "TransposeBackward1"}  # fmt: skip
"""Names of autograd's nodes for views that move elements and change none (2.11 to 2.13)."""


def _overlaps(weight: torch.Tensor) -> bool:
    """Return whether elements of a weight may share memory, as after `expand`: their gradients add up."""
    reach = 1
    for stride, size in sorted(zip(weight.stride(), weight.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def hooked(tensor: torch.Tensor) -> bool:
    """Return whether a hook waits for a tensor's gradient, or for when the gradient was added."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks) or tensor.retains_grad or bool(after)


def _fits(kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> bool:
    if kind in ("linear", "matmul"):
        return weight.dim() == 2 and x.dim() >= 1 and x.numel() > 0
    if kind == "batched":
        return weight.dim() == 3 and x.dim() == 3 and x.shape[0] == weight.shape[0]
    return weight.dim() == 3 and x.dim() == 2


def is_found(parameter: torch.Tensor) -> bool:
    """Return whether torch finds the node that adds to a parameter's gradient. A tensor subclass may hide the
    node behind several operations."""
    return getattr(get_gradient_edge(parameter).node, "variable", None) is parameter


Asked = Literal["late", "now", "no"]
"""Use of a weight's gradient in a backward: added to `param.grad`; returned, as by `torch.autograd.grad`; not
formed."""


def asked(parameter: nn.Parameter, weight: torch.Tensor) -> Asked:
    """Return what the running backward wants. Private in torch (2.13): `_will_engine_execute_node`, which
    refuses to say of a leaf whose gradient is returned."""
    will = torch._C._will_engine_execute_node
    try:
        with torch._C.DisableTorchFunctionSubclass():  # `get_gradient_edge` goes through a view
            edge = get_gradient_edge(parameter)
        if will(edge.node):
            return "late"
    except RuntimeError:
        return "now"
    return "now" if weight.grad_fn is not None and will(weight.grad_fn) else "no"


# --- how the calls are written --------------------------------------------------------------------------

Parsed = tuple[Kind, Any, Any, Any, Any, Callable[..., torch.Tensor]] | None


def _linear(input: Any, weight: Any, bias: Any = None) -> Parsed:
    return "linear", input, weight, bias, None, F.linear


def _matmul(input: Any, other: Any, **rest: Any) -> Parsed:
    if rest or not isinstance(other, torch.Tensor) or not isinstance(input, torch.Tensor):
        return None
    kind: Kind = "batched" if other.dim() == 3 else "matmul"
    return kind, input, other, None, None, lambda x, weight, bias: torch.matmul(x, weight)


def _addmm(input: Any, mat1: Any, mat2: Any, **rest: Any) -> Parsed:
    if rest:
        return None  # another alpha or beta
    return "matmul", mat1, mat2, input, None, lambda x, weight, bias: torch.addmm(bias, x, weight)


def _grouped(*pair: Any, offs: Any = None, bias: Any = None, **rest: Any) -> Parsed:
    if any(value is not None for value in (bias, *rest.values())) or offs is None or len(pair) != 2:
        return None
    return "grouped", *pair, None, offs, lambda x, weight, bias: F.grouped_mm(x, weight, offs=offs)


_PARSERS: dict[Any, Callable[..., Parsed]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    F.grouped_mm: _grouped,
    torch._grouped_mm: _grouped,
}


# --- their gradients ------------------------------------------------------------------------------------


def input_gradient(
    kind: Kind, grad: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    """Form the gradient of `x`, as autograd would."""
    if kind == "linear":
        return grad.matmul(weight)
    if kind == "grouped":
        return F.grouped_mm(grad, weight.transpose(-2, -1), offs=offsets)
    return grad.matmul(weight.transpose(-2, -1))


def weight_gradient(
    kind: Kind, x: torch.Tensor, grad: torch.Tensor, offsets: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Form the gradient of the weight in `dtype`, in the weight's layout, without rounding on the way."""
    if kind == "linear":
        return _transposed_product(_rows(grad), _rows(x), dtype)
    if kind == "matmul":
        return _transposed_product(_rows(x), _rows(grad), dtype)
    if kind == "batched":
        return x.to(dtype).transpose(-2, -1).matmul(grad.to(dtype))
    assert offsets is not None
    ends = offsets.tolist()
    groups = zip([0, *ends], ends, strict=False)
    return torch.stack([_transposed_product(x[low:high], grad[low:high], dtype) for low, high in groups])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _transposed_product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if left.dtype is dtype:
        return left.t().mm(right)
    if left.is_cuda:
        return torch.mm(left.t(), right, out_dtype=dtype)
    return left.t().to(dtype).mm(right.to(dtype))
