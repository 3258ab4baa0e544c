"""Show in `param.grad` that the engine has collected a gradient, and let user code read and change it.

After a backward the engine has the gradients. With an empty `param.grad`, a script that clips or scales by
hand would silently do nothing. So until the step or the next forward or backward, `param.grad` is a
`CollectedGradient`, which has a shape but no values. If gradients rest whole (stage 0), it becomes a plain
tensor when user code reads it, and changes are read back before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zerodrift.engine.habits.absent_parameter import CollectedGradient
from zerodrift.engine.segment import FlatSegment
from zerodrift.plan import Row


class GradientExposure:
    """Shows in `param.grad` that the engine has the gradients of one segment."""

    def __init__(self, parameters: Sequence[nn.Parameter], rows: Sequence[Row], arrived: set[int]) -> None:
        """`arrived` are the numbers of the parameters with a gradient in this step; it is updated here."""
        self._parameters, self._rows, self._arrived = parameters, rows, arrived
        self._collected: list[CollectedGradient] = []
        self._values: Callable[[], torch.Tensor] | None = None
        """Returns the sum that user code reads or changes; None if it may not. Shape [padded]."""
        self._scale = 1.0
        self._end: Callable[[bool], None]
        self.is_shown = False
        self.removed: set[int] = set()
        """Parameters, by number, whose gradient user code has set to None while it was exposed."""

    def show(self) -> None:
        """Put a `CollectedGradient` into every empty `param.grad`, until `hide`."""
        self.is_shown = True
        with torch._C.DisableTorchFunctionSubclass():
            if not self._collected:
                pairs = zip(self._parameters, self._rows, strict=True)
                self._collected = [CollectedGradient.of(parameter, row.name) for parameter, row in pairs]
            for parameter, collected in zip(self._parameters, self._collected, strict=True):
                if parameter.grad is None:
                    parameter.grad = collected

    def expose_gradients(
        self, values: Callable[[], torch.Tensor], scale: float, end: Callable[[bool], None]
    ) -> None:
        """Let user code read and change `values()` times `scale` until `hide`, which calls `end(True)`, or
        `drop`, which calls `end(False)`."""
        self._values, self._scale, self._end = values, scale, end
        for collected in self._collected:
            collected.materialize = self._materialize_gradients

    def _materialize_gradients(self) -> None:
        assert self._values is not None
        values = self._values() * self._scale
        for row, collected in zip(self._rows, self._collected, strict=True):
            collected.become(FlatSegment.view(values, row))
        self._collected = []

    def hide(self) -> str:
        """Empty `param.grad` again and read changes back. Return a parameter whose gradient user code has
        cleared without effect, or ""."""
        if not self.is_shown:
            return ""
        self.is_shown = False
        if self._values is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._read_back_gradients(self._values)
            self._end_exposure(changed=True)
            return ""
        cleared = ""
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, row in zip(self._parameters, self._rows, strict=True):
                grad = parameter.grad
                if grad is None or (type(grad) is CollectedGradient and grad.cleared):
                    cleared = cleared or row.name
                if type(grad) is CollectedGradient:
                    parameter.grad, grad.cleared = None, False
        return cleared

    def _read_back_gradients(self, values: Callable[[], torch.Tensor]) -> None:
        for number, (parameter, row) in enumerate(zip(self._parameters, self._rows, strict=True)):
            grad, parameter.grad = parameter.grad, None
            if type(grad) is CollectedGradient:
                continue  # neither read nor set
            home = FlatSegment.view(values(), row)
            if grad is None:
                self._arrived.discard(number)
                self.removed.add(number)
                home.zero_()
            elif not torch.equal(grad, home * self._scale):
                self._arrived.add(number)
                home.copy_(grad / self._scale)

    def _end_exposure(self, *, changed: bool) -> None:
        exposed, self._values = self._values is not None, None
        for collected in self._collected:
            collected.materialize = None
        if exposed:
            self._end(changed)

    def drop(self) -> None:
        """Forget the gradients and all changes."""
        self.is_shown = False
        self._end_exposure(changed=False)
        self.removed.clear()
