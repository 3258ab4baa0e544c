"""One module group's life: SHARDED -> GATHERING -> FULL -> REDUCING -> SHARDED.

A unit is gathered when its module's forward begins, released when it ends, gathered again when the
gradient of its output arrives, and handed to `grads.py` when its backward is over. Hooks on modules and
tensors do all of it, so a user's own loop, `generate`, or a call of a submodule work like `engine(...)`.

Invariant: hooks never change a value and never issue a collective that other ranks would not: gathers
follow the execution of the model, reductions the order of the plan (`grads.py`).

[Note: end of a backward] A unit's backward is over when the gradients of its inputs are formed, which an
identity function around the inputs tells, once per forward that is in flight. Where no input needs a
gradient, or a unit was not used at all, the end of the whole backward tells, by a callback of the engine
of autograd. torch's AccumulateGrad nodes run before that identity, so weight gradients have landed.

[Note: recomputation] Activation checkpointing runs forwards inside a backward. Then a unit is gathered
already, is not released by the end of the forward, and counts no new use: no third gather.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from zerodrift.engine.segment import FlatSegment
from zerodrift.plan.table import Unit


class Backward(Protocol):
    """What a unit asks of the step it is part of."""

    @property
    def running(self) -> bool:
        """Whether a backward is under way."""

    def begin(self) -> None:
        """A gradient has arrived at a unit's output; the first call of a backward arms its end."""

    def over(self, unit: LiveUnit) -> None:
        """The unit's gradients have landed."""


class LiveUnit:
    """A unit of the plan with its module and its segments."""

    def __init__(
        self,
        number: int,
        spec: Unit,
        module: nn.Module,
        segments: list[FlatSegment],
        *,
        keep_after_forward: bool,
        keep_after_backward: bool,
    ) -> None:
        self.number = number
        self.spec = spec
        self.module = module
        self.segments = segments
        self.is_root = spec.name == ""
        self._keep_after_forward = keep_after_forward or self.is_root
        self._keep_after_backward = keep_after_backward or self.is_root
        self.uses = 0
        """Forwards whose backward is still to come."""
        self.next: LiveUnit | None = None
        """In the order of the plan: gathered ahead in a forward."""
        self.previous: LiveUnit | None = None
        """Gathered ahead in a backward."""
        self._gathers = any(segment.gathers for segment in segments)
        self._trains = any(segment.update is not None for segment in segments)

    def __repr__(self) -> str:
        return f"LiveUnit({self.spec.name or 'root'})"

    # --- gathering ------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        for segment in self.segments:
            segment.start_gather()

    def gather(self) -> None:
        """Full when this returns."""
        if not self._gathers:
            return
        self.start_gather()
        for segment in self.segments:
            segment.finish_gather()

    def release(self) -> None:
        if self._gathers:
            for segment in self.segments:
                segment.release()

    @property
    def is_full(self) -> bool:
        return all(segment.is_full for segment in self.segments)

    def _ahead(self, other: LiveUnit | None) -> None:
        if other is not None and other._gathers and not other.is_root:
            other.start_gather()

    # --- hooks ----------------------------------------------------------------------------------------

    def attach(self, backward: Backward) -> list[Any]:
        """Put the hooks on the module; returns their handles."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.gather()
            if not backward.running:
                self._ahead(self.next)
            if not (self._trains and torch.is_grad_enabled()) or backward.running:
                return None
            return _mark_inputs(args, kwargs, lambda: self._backward_is_over(backward))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if backward.running:
                return
            needs_backward = False
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        needs_backward = True
                        tensor.register_hook(lambda grad: self._backward_begins(backward))
            if needs_backward:
                self.uses += 1
            if not needs_backward or not self._keep_after_forward:
                self.release()

        return [
            self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(after, with_kwargs=True),
        ]

    def _backward_begins(self, backward: Backward) -> None:
        backward.begin()
        self.gather()
        self._ahead(self.previous)
        if self._trains:
            for segment in self.segments:
                segment.open_gradients()

    def _backward_is_over(self, backward: Backward) -> None:
        self.uses = max(0, self.uses - 1)
        if self.uses == 0:
            backward.over(self)
            if not self._keep_after_backward:
                self.release()


def link(units: list[LiveUnit]) -> None:
    """Tell each unit which one comes before and after it."""
    for left, right in itertools.pairwise(units):
        left.next, right.previous = right, left


# --- marking inputs -----------------------------------------------------------------------------------


class _Identity(torch.autograd.Function):
    """Passes tensors through; its backward runs when the gradients of all of them are formed."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.then = then
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.then()
        return (None, *grads)


def _mark_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same inputs behind an identity that calls `then`; None where no input needs a gradient."""
    found = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not found:
        return None
    marked = iter(_Identity.apply(then, *found))
    replaced = {id(old): next(marked) for old in found}
    return map_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, each once."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop(0)
        if isinstance(item, torch.Tensor):
            if id(item) not in seen:
                seen.add(id(item))
                yield item
        elif isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif dataclasses.is_dataclass(item) and not isinstance(item, type):
            stack.extend(getattr(item, field.name) for field in dataclasses.fields(item))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with every tensor changed; what holds no tensor is the same object."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if type(value) is dict:
            return changed
        # A dict of a class of its own (a model's output) keeps its class and its attributes.
        for key, item in changed.items():
            if item is not value[key]:
                value[key] = item
        return value
    return value
