"""`compute: fp8`: the products of a linear layer with fp8 operands, wherever its weight is used.

Weights with such products have a class of `Parameter` that torch asks before it computes with them, as it
asks pinned ones (`pins.py`). So the plan holds inside of the weight's own module and outside of it, compiled
or not. A product that is not one of a linear layer is an error. `kernels/products.py` defines the product of
two operands.

Each of the three products quantises its operands anew, because a scale covers the elements that are summed,
which are different in each. Nothing quantised is kept for the backward, so memory is the same as without fp8.

Invariant: no product of such a weight and an activation has other operands than the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from zerodrift.dtypes import DType
from zerodrift.engine.habits.absent_parameter import set_gathered_class
from zerodrift.engine.habits.pins import OTHERS, PRODUCTS, OwnParameter, OwnResult, name_of, of_class
from zerodrift.engine.nested import tensors_in
from zerodrift.engine.segment import FlatSegment
from zerodrift.errors import ModelError
from zerodrift.kernels import products as kernels
from zerodrift.policy import LinearProducts


def attach(segments: Iterable[FlatSegment]) -> None:
    """Set the classes of weights with fp8 products. Raise on a device without such products."""
    for segment in segments:
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            if row.columns.products is not None:
                kernels.require_products(parameter.device)
                set_gathered_class(parameter, class_for(row.name, row.columns.products))


class NarrowWeight(OwnParameter):
    """The weight of linear layers whose products have fp8 operands."""


class _WeightView(OwnResult):
    """A `NarrowWeight` transposed or in another dtype."""


class _Derived(OwnResult):
    """Another result of `NarrowWeight`s alone."""


_VIEWS = frozenset((
    *("t", "T", "mT", "transpose", "adjoint", "detach", "data", "view_as", "contiguous", "clone"),
    *("to", "type", "type_as", "float", "double", "bfloat16", "half")
))  # fmt: skip
"""Calls and attributes whose results are still the weight: a product with them is one of the layer."""

_PICKS = frozenset(("__getitem__", "select", "unbind"))
"""Calls that return single matrices of a stack."""


def class_for(name: str, products: LinearProducts, kind: type[Tensor] = Tensor) -> type[NarrowWeight]:
    """Return the class of a weight with these products; `kind` is what operations return around it."""
    others = () if kind is Tensor else (kind,)
    form = kernels.product if kind is Tensor else kernels.scaled_product

    def torch_function(
        cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, given = name_of(func), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            tensors = (each for each in tensors_in((args, given)) if each.is_floating_point() and each.dim())
            alone = all(isinstance(tensor, _OWN) for tensor in tensors)
            if (named in PRODUCTS or isinstance(func, _CUSTOM)) and not alone:
                return _multiply(_parse(name, named, args, given), products, name, form)
            result = func(*args, **given)
            if not alone or named in OTHERS:
                return result
            picked = named in _PICKS and args[0].dim() == 3 and all(x.dim() == 2 for x in tensors_in(result))
            same = named in _VIEWS or picked
            is_weight = same and isinstance(args[0], (NarrowWeight, _WeightView))
            return of_class(result, kind, view if is_weight else derived)

    # A compiler may drop a cast to fp8 and back.
    apart = torch.compiler.disable(torch_function, reason=f"products of `{name}` have fp8 operands")
    members: dict[str, Any] = {"__torch_function__": classmethod(apart)}
    view = type("NarrowWeightView", (_WeightView, *others), members)
    derived = type("NarrowWeightResult", (_Derived, *others), members)
    return type("NarrowWeightParameter", (NarrowWeight, *others), members)


_OWN = (NarrowWeight, _WeightView, _Derived)


def has_narrow_products(tensor: object) -> bool:
    """Return True for a weight with fp8 products, and for results of such weights alone."""
    return isinstance(tensor, _OWN)


_CUSTOM = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Operators that are called directly, such as those that a library registers."""


_Form = Callable[[kernels.Operand, kernels.Operand, torch.dtype, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class _LinearCall:
    """A product of an activation and a weight, [..., in] and [out, in], or [in, out] if transposed.

    Experts are a stack of these: consecutive rows of the activation belong to each, up to `ends`.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool
    ends: Tensor | None = None


def _parse(name: str, named: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _LinearCall:
    """Return the arguments of a torch function as a linear layer's. Raise if it is no linear layer's
    product."""
    call = None
    if named == "linear":
        places: dict[str, Any] = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        x, weight, bias = (places.get(key) for key in ("input", "weight", "bias"))
        call = _LinearCall(x, weight, bias, False) if x is not None and weight is not None else None
    elif not kwargs and named in ("matmul", "__matmul__", "mm") and len(args) == 2:
        call = _LinearCall(*args, None, True)
    elif not kwargs and named == "addmm" and len(args) == 3:
        call = _LinearCall(args[1], args[2], args[0], True)
    elif named in ("grouped_mm", "_grouped_mm"):
        given = {key: value for key, value in kwargs.items() if value is not None}
        sides = [value for value in (*args, given.pop("offs", None)) if value is not None]
        if len(sides) == 3 and not given:
            call = _LinearCall(sides[0], sides[1], None, True, sides[2])
    if (
        call is not None
        and isinstance(call.weight, (NarrowWeight, _WeightView))
        and isinstance(call.x, Tensor)
        and not isinstance(call.x, _OWN)
        and call.weight.dim() == (2 if call.ends is None else 3)
        and (call.x.dim() > 0 if call.ends is None else call.x.dim() == 2)
        and (call.bias is None or call.bias.dim() == 1)
    ):
        return call
    must = "must be multiplied as a linear layer does, with an activation from the left, for fp8 products"
    do = "Leave the weight out of fp8 by a rule with `compute:` and the mode's dtype, such as bf16."
    raise ModelError(name, must, got=f"`{named}`", do=do)


def _multiply(call: _LinearCall, products: LinearProducts, name: str, form: _Form) -> Tensor:
    device, dtype = call.x.device.type, call.weight.dtype
    if torch.is_autocast_enabled(device) and call.ends is None:  # torch casts no grouped product
        dtype = torch.get_autocast_dtype(device)
    elif call.x.dtype is not dtype:
        must = f"must be multiplied with activations of its dtype, {dtype}"
        raise ModelError(name, must, got=call.x.dtype, do="Cast the activation before the layer.")
    recipe = _Recipe(products, dtype, call.transposed, form)
    if call.ends is not None:
        grouped: Tensor = _GroupedFunction.apply(call.x, call.weight, call.ends, recipe)
        return grouped
    result: Tensor = _LinearFunction.apply(call.x, call.weight, call.bias, recipe)
    return result


@dataclass(frozen=True, slots=True)
class _Recipe:
    products: LinearProducts
    dtype: torch.dtype
    """Dtype of the output, and of products without fp8 operands."""
    transposed: bool
    form: _Form
    """Multiplies two operands."""

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight with a row per output. Shape [out, in]."""
        return weight.t() if self.transposed else weight

    def groups(self, x: Tensor, ends: Tensor) -> list[slice]:
        """Return the rows of each expert. A dry run, which has no numbers, gives all to the first."""
        stops = ends.tolist() if self.form is kernels.product else [len(x)] * len(ends)
        return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def product(
        self, part: DType, left: Tensor, right: Tensor, result: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply rows with rows, in fp8 or in the recipe's dtype. Shapes [m, k], [n, k] -> [m, n]."""
        if part.format is not None:
            return self.form(kernels.operand(left), kernels.operand(right), result, bias)
        added = None if bias is None else bias.to(self.dtype)
        return F.linear(left.to(self.dtype), right.to(self.dtype), added).to(result)


class _LinearFunction(torch.autograd.Function):
    """The three products of a linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: _Recipe) -> Tensor:
        of_x, of_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.recipe, ctx.shape, ctx.dtypes = recipe, x.shape, (x.dtype, weight.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        matrix = recipe.matrix(weight)
        rows = x.reshape(-1, x.shape[-1])
        output = recipe.product(recipe.products.forward, rows, matrix, recipe.dtype, bias)
        return output.view(*x.shape[:-1], len(matrix))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recipe: _Recipe = ctx.recipe
        (x, weight), (x_dtype, weight_dtype) = ctx.saved_tensors, ctx.dtypes
        of_x = of_weight = of_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.needs_input_grad[0]:
                columns = recipe.matrix(weight).t()
                of_x = recipe.product(recipe.products.grad_input, rows, columns, x_dtype).view(ctx.shape)
            if ctx.needs_input_grad[1]:
                inputs = x.reshape(-1, x.shape[-1])
                sides = (inputs, rows) if recipe.transposed else (rows, inputs)
                left, right = (side.t() for side in sides)
                of_weight = recipe.product(recipe.products.grad_weight, left, right, weight_dtype)
            if ctx.needs_input_grad[2]:
                of_bias = rows.sum(0).to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, None


class _GroupedFunction(torch.autograd.Function):
    """The three products of each expert of a stack [experts, in, out]; rows of no expert become zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Tensor, ends: Tensor, recipe: _Recipe) -> Tensor:
        of_x, of_stack, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_stack else None, stack if of_x else None)
        ctx.recipe, ctx.groups, ctx.shape = recipe, recipe.groups(x, ends), x.shape
        part = recipe.products.forward
        output = x.new_zeros(len(x), stack.shape[2])
        for rows, weight in zip(ctx.groups, stack, strict=True):
            output[rows] = recipe.product(part, x[rows], weight.t(), recipe.dtype)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        recipe: _Recipe = ctx.recipe
        x, stack = ctx.saved_tensors
        of_x = of_stack = None
        with torch._C.DisableTorchFunctionSubclass():
            if ctx.needs_input_grad[0]:
                of_x = grad.new_zeros(ctx.shape)
                for rows, weight in zip(ctx.groups, stack, strict=True):
                    of_x[rows] = recipe.product(recipe.products.grad_input, grad[rows], weight, recipe.dtype)
            if ctx.needs_input_grad[1]:
                part = recipe.products.grad_weight
                sides = [(x[rows].t(), grad[rows].t()) for rows in ctx.groups]
                of_stack = torch.stack([recipe.product(part, *pair, recipe.dtype) for pair in sides])
        return of_x, of_stack, None, None
