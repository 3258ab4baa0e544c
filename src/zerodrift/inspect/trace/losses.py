"""Follow values of forwards and of a script's own code to the losses that backwards begin at.

A result carries the operations that rounded it, and every product, norm and lookup begins anew: so what a
loss carries happened in the head, on the logits, or in the loss itself.

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
"""Operations whose results begin anew."""

_LOSSES = frozenset((
    "_log_softmax", "log", "log1p", "log2", "logsumexp", "logaddexp", "log_sigmoid_forward", "xlogy", "exp",
    "expm1", "softplus", "nll_loss_forward", "nll_loss2d_forward", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "mse_loss", "smooth_l1_loss", "huber_loss", "_ctc_loss",
))  # fmt: skip
"""Operations of losses: what they return in 16 bits is a rounded loss."""

_SUMS = frozenset(("sum", "mean", "linalg_vector_norm"))
"""Reductions, which are a loss's if they are outside of modules or leave one number."""

_LOGARITHMS = frozenset(("log", "log1p", "log2", "xlogy", "nll_loss_forward"))
"""Operations that make a softmax of a module, which may be a router's, a part of a loss."""

_LOGITS = 4096  # elements of logits or log-probabilities, whose greatest is measured


@dataclass(frozen=True, slots=True)
class LossOperation:
    """One operation on the way to a loss."""

    kind: Literal["product", "widened", "rounded", "softmax", "loss"]
    """A product; the cast up of 16-bit logits; a cast of wide ones to 16 bits; a softmax or another operation
    of a loss in 16 bits."""
    operation: str
    dtype: str
    module: str
    line: str


Carried = frozenset[LossOperation]


@functools.cache
def is_product(name: str) -> bool:
    """Return True for an operation whose result begins anew."""
    return _PRODUCT.match(name) is not None


_NOTHING: Carried = frozenset()


class LossWatch:
    """Follows the values of forwards and of the script's own code to the losses that backwards begin at."""

    def __init__(self) -> None:
        self._carried: Owners[Carried] = Owners()
        self._greatest: dict[LossOperation, torch.Tensor] = {}
        self._reached: dict[LossOperation, None] = {}

    def computed(self, name: str, args: Any, kwargs: Any, out: Any, module: str | None) -> None:
        """Follow an operation; `module` is the path of the module that runs it, None outside of modules.

        For a product with a parameter it is the path of the parameter's module.
        """
        results = list(floating((out,), None))
        if not results or name in VIEWS:
            return
        if is_product(name):
            made = LossOperation("product", name, dtype_name(results[0].dtype), module or "", "")
            self._put(results, frozenset((made,)))
            return
        inputs = list(floating(args[1:] if name == "copy_" else args, kwargs))
        carried = _NOTHING.union(*(self._carried.of(tensor) or _NOTHING for tensor in inputs))
        first, result = (inputs[0] if inputs else None), results[0]
        is_narrow = result.dtype in NARROW
        if first is not None and (name in CASTS or name == "copy_"):
            if carried and is_narrow and first.dtype not in NARROW:
                carried |= self._rounds("rounded", name, result, module)
            elif carried and first.dtype in NARROW and not is_narrow:
                carried |= self._rounds("widened", name, first, module)
        elif is_narrow and name == "_softmax":
            carried |= self._rounds("softmax" if module is not None else "loss", name, result, module)
        elif is_narrow and (name in _LOSSES or self._is_sum_of_loss(name, result, module)):
            carried |= self._rounds("loss", name, result, module)
        if name in _LOGARITHMS:
            narrow = (each for each in carried if each.kind == "softmax")
            carried |= {LossOperation("loss", s.operation, s.dtype, s.module, s.line) for s in narrow}
        self._put(results, carried)

    def reaches(self, losses: Any) -> None:
        """Record what the values carry that a backward begins at: a tensor, or a list of them."""
        for tensor in floating((losses,), None):
            order = {each: place for place, each in enumerate(self._greatest)}
            for each in sorted(self._carried.of(tensor) or (), key=lambda each: order.get(each, -1)):
                self._reached.setdefault(each)
        self._carried.forget_freed()

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield everything that reached a loss, with the greatest sampled magnitude."""
        for each in self._reached:
            event = {"kind": f"loss-{each.kind}", "line": each.line, "operation": each.operation.strip("_")}
            greatest = float(self._greatest[each]) if each in self._greatest else None
            yield {**event, "dtype": each.dtype, "module": each.module, "greatest": greatest}

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
