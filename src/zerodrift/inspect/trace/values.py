"""Follow the values of forwards and of a script's own code to the losses that backwards begin at.

Each result carries the operations that rounded it. Every product, norm and lookup begins anew, so a loss
carries only roundings in the head, on the logits, or in the loss itself. Casts of whole numbers to 16 bits,
and statistics over many elements, are recorded wherever they lead.

Invariant: no operation of a loss is recorded before a backward begins at it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from zerodrift.inspect.trace.operations import CASTS, VIEWS, floating, line_of_script
from zerodrift.inspect.trace.parameter import Owners, sample
from zerodrift.inspect.trace.records import dtype_name

NARROW = frozenset((torch.bfloat16, torch.float16))

_PRODUCT = re.compile(r".*(mm|mv|dot)$|.*(linear|conv|attention|embedding)|.*(layer|group|batch|rms)_norm")
"""Operations whose results carry nothing of their inputs."""

_LOSSES = frozenset((
    "_log_softmax", "log", "log1p", "log2", "logsumexp", "logaddexp", "log_sigmoid_forward", "xlogy", "exp",
    "expm1", "softplus", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "mse_loss", "smooth_l1_loss", "huber_loss", "_ctc_loss",
))  # fmt: skip
"""Operations of losses: a result in 16 bits is a rounded loss."""

_DEVIATIONS = frozenset(("std", "std_mean"))
_SUMS = frozenset(("sum", "mean", "var", "var_mean", "linalg_vector_norm", *_DEVIATIONS))
"""Reductions, which belong to a loss if they are outside of modules or return one number."""

_ROOTS = frozenset(("sqrt", "rsqrt"))
"""Operations that make a statistic of a reduction: a norm, or a deviation."""

_RUNNING = frozenset(("cumsum", "cumprod", "logcumsumexp"))
"""Sums that return each partial sum."""

_LONG = 64  # elements of a running sum from which its rounding is a finding

_POINTWISE = frozenset(("add", "sub", "mul", "div"))
"""Operations that cast whole numbers to the dtype of their other operand."""

_RANGES = frozenset(("arange", "linspace"))
_OF_WHOLE = frozenset((*CASTS, *_POINTWISE, *_RANGES, "copy"))

_LOGARITHMS = frozenset(("log", "log1p", "log2", "xlogy", "nll_loss_forward"))
"""Operations after which a module's softmax, which may be a router's, is a part of a loss."""

_LOGITS = 4096  # elements of logits or log-probabilities, whose greatest is measured


@dataclass(frozen=True, slots=True)
class LossOperation:
    """One operation on the way to a loss."""

    kind: Literal["product", "widened", "rounded", "softmax", "loss", "wide", "sum", "statistic", "scaled"]
    """A product; the cast up of 16-bit logits; a cast of wide ones to 16 bits; a softmax or another operation
    of a loss in 16 bits; one of a loss in more; a sum and a statistic in 16 bits; a scale of the loss."""
    operation: str
    dtype: str
    module: str
    line: str


Carried = frozenset[LossOperation]


@functools.cache
def is_product(name: str) -> bool:
    """Return True for an operation whose result carries nothing of its inputs."""
    return _PRODUCT.match(name) is not None


_NOTHING: Carried = frozenset()
_WIDE = LossOperation("wide", "", "", "", "")
_SCALED = LossOperation("scaled", "", "", "", "")


def _is_whole(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and value.numel() > 1
    return is_tensor and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


class LossWatch:
    """Follows the values of forwards and of the script's own code to the losses that backwards begin at."""

    def __init__(self) -> None:
        self._carried: Owners[Carried] = Owners()
        self._greatest: dict[LossOperation, torch.Tensor] = {}
        self._reached: dict[LossOperation, None] = {}
        self._products: set[tuple[str, str]] = set()  # module and dtype of each product of matrices
        self._whole: Owners[bool] = Owners()  # memory of whole numbers in more than 16 bits
        self._rounded: dict[tuple[str, str, str, int], list[torch.Tensor]] = {}
        """Line, operation, dtype and elements -> numbers that were cast to 16 bits, and the results."""

    def computed(self, name: str, args: Any, kwargs: Any, out: Any, module: str | None) -> None:
        """Follow an operation; `module` is the path of the module that runs it, None outside of modules.

        For a product with a parameter it is the path of the parameter's module.
        """
        results = floating(out)
        if not results or name in VIEWS:
            return
        self._follow_whole(name, args, results[0])
        if is_product(name):
            made = LossOperation("product", name, dtype_name(results[0].dtype), module or "", "")
            self._put(results, frozenset((made,)))
            if "norm" not in name and "embedding" not in name:
                self._products.add((made.module, made.dtype))
            return
        inputs = floating(args[1:] if name == "copy_" else args, kwargs)
        carried = _NOTHING.union(*(self._carried.of(tensor) or _NOTHING for tensor in inputs))
        first, result = (inputs[0] if inputs else None), results[0]
        is_narrow = result.dtype in NARROW
        if first is not None and (name in CASTS or name == "copy_"):
            if carried and is_narrow and first.dtype not in NARROW:
                is_loss = any(each.kind == "wide" for each in carried)
                carried |= self._rounds("loss" if is_loss else "rounded", name, result, module)
            elif carried and first.dtype in NARROW and not is_narrow:
                carried |= self._rounds("widened", name, first, module)
        elif is_narrow and name == "_softmax":
            carried |= self._rounds("softmax" if module is not None else "loss", name, result, module)
        elif is_narrow and (name in _LOSSES or self._is_sum_of_loss(name, result, module)):
            carried |= self._rounds("loss", name, result, module)
        elif name in _LOSSES and carried:
            carried |= {_WIDE}
        if is_narrow:
            carried |= self._statistic(name, args, inputs, result, {e for e in carried if e.kind == "sum"})
        if name in ("mul", "mul_") and not result.dim() and carried:
            carried |= {_SCALED} if any(map(self._is_scale, args[:2])) else _NOTHING
        if name in _LOGARITHMS:
            narrow = (each for each in carried if each.kind == "softmax")
            carried |= {LossOperation("loss", s.operation, s.dtype, s.module, s.line) for s in narrow}
        self._put(results, carried)

    def reaches(self, losses: Any) -> None:
        """Record the operations that the tensors carry at which a backward begins."""
        for tensor in floating(losses):
            order = {each: place for place, each in enumerate(self._greatest)}
            for each in sorted(self._carried.of(tensor) or (), key=lambda each: order.get(each, -1)):
                if each.kind not in ("wide", "sum"):
                    self._reached.setdefault(each)

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield an event for each operation that reached a loss, with the greatest sampled magnitude."""
        for each in self._reached:
            event: dict[str, Any] = {"kind": f"loss-{each.kind}", "line": each.line, "dtype": each.dtype}
            greatest = float(self._greatest[each]) if each in self._greatest else None
            others = {dtype for module, dtype in self._products if module != each.module}
            is_alone = bool(others) and each.dtype not in others
            event |= {"operation": each.operation.strip("_"), "module": each.module, "greatest": greatest}
            yield {**event, "is_alone": is_alone}
        casts: dict[tuple[str, str, str], list[torch.Tensor]] = {}
        for (line, name, dtype, _), (numbers, rounded) in self._rounded.items():
            if torch.equal(numbers, numbers.round()) and not torch.equal(numbers, rounded):
                casts.setdefault((line, name, dtype), [numbers, rounded])
        for (line, name, dtype), (numbers, rounded) in casts.items():
            share, greatest = float((numbers != rounded).double().mean()), float(numbers.abs().max())
            event = {"kind": "whole-numbers", "line": line, "operation": name, "dtype": dtype}
            yield {**event, "share": share, "greatest": greatest}

    def given(self, args: Any) -> None:
        """Follow what a model is given in more than 16 bits, which may be whole numbers."""
        for tensor in floating(args):
            if tensor.dtype not in NARROW and tensor.layout is torch.strided and not tensor.is_nested:
                self._whole.put(tensor, True)

    def scales(self) -> None:
        """Note that a `GradScaler` scales the loss."""
        self._reached.setdefault(_SCALED)

    def _follow_whole(self, name: str, args: Any, result: torch.Tensor) -> None:
        """Follow whole numbers, such as positions, through casts; sample those cast to 16 bits."""
        name, given = name.removesuffix("_"), args[1:] if name == "copy_" else args
        if name not in _OF_WHOLE:
            return
        source: Any = next((arg for arg in given if _is_whole(arg)), None)
        if name in _RANGES:
            source = getattr(torch, name)(*args, dtype=torch.float64)
        elif source is None and name not in _POINTWISE and self._whole.of(given[0]):
            source = given[0] if given[0].dtype not in NARROW else None
        if source is None or source.numel() < 2:
            return
        key = line_of_script(), name, dtype_name(result.dtype), source.numel()
        if result.dtype in NARROW and key not in self._rounded:
            numbers = sample(source, _LOGITS).double()
            self._rounded[key] = [numbers, numbers.to(result.dtype).double()]
        elif result.dtype not in NARROW and name not in _POINTWISE:
            self._whole.put(result, True)

    def _statistic(
        self, name: str, args: Any, inputs: list[torch.Tensor], result: torch.Tensor, sums: set[LossOperation]
    ) -> Carried:
        """Note a statistic in 16 bits: the root of a sum, or a running sum. Return what a sum carries."""
        dtype, is_long = dtype_name(result.dtype), max(result.shape, default=0) >= _LONG
        is_sum = name in _SUMS and inputs and result.numel() < inputs[0].numel()
        is_deviation = is_sum and name in _DEVIATIONS and result.dim() and torch.is_grad_enabled()
        is_root = name in _ROOTS or (name == "pow" and isinstance(args[1], float) and abs(args[1]) == 0.5)
        if (is_root and sums) or is_deviation or (name in _RUNNING and is_long):
            made = "` and `".join([*sorted(each.operation for each in sums), name])
            self._reached.setdefault(LossOperation("statistic", made, dtype, "", line_of_script()))
        return frozenset((LossOperation("sum", name, dtype, "", ""),)) if is_sum else _NOTHING

    def _is_scale(self, factor: Any) -> bool:
        """Return True for a number that a loss may be scaled by: one of 8 at least, or on a device."""
        if isinstance(factor, torch.Tensor):
            if factor.dim() or self._carried.of(factor):
                return False
            if factor.device.type != "cpu":
                return True
            factor = factor.item()
        return abs(factor) >= 8

    def _is_sum_of_loss(self, name: str, result: torch.Tensor, module: str | None) -> bool:
        is_autocast = torch.is_autocast_enabled(result.device.type)  # which leaves means in 16 bits
        return name in _SUMS and not is_autocast and (module is None or not result.dim())

    def _rounds(self, kind: Any, name: str, tensor: torch.Tensor, module: str | None) -> Carried:
        each = LossOperation(kind, name, dtype_name(tensor.dtype), module or "", line_of_script())
        if each not in self._greatest and tensor.numel():
            sizes = sample(tensor, _LOGITS).float().abs()
            self._greatest[each] = torch.where(sizes.isfinite(), sizes, 0).amax()
        return frozenset((each,))

    def _put(self, results: list[torch.Tensor], carried: Carried) -> None:
        for tensor in results:
            if carried or self._carried.of(tensor):
                self._carried.put(tensor, carried)
