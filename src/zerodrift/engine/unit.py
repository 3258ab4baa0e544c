"""One module group's life: SHARDED -> GATHERING -> FULL -> REDUCING -> SHARDED.

A unit is gathered when its module's forward begins, released when it ends, gathered again when the
gradient of its output arrives, and handed to `grads.py` when its backward is over. Hooks on modules and
tensors do all of it, so a user's own loop, `generate`, or a call of a unit work like `engine(...)`.

Invariant: hooks never change a value. Which collectives they lead to is `walk.py`'s affair for gathers and
`grads.py`'s for reductions.

[Note: end of a backward] A unit's backward is over when the gradients of its inputs are formed, which an
identity function around the inputs tells, once per forward that is in flight. Where no input needs a
gradient, or a unit was not used at all, the end of the whole backward tells, by a callback of the engine
of autograd. torch's AccumulateGrad nodes run before that identity, so weight gradients have landed.

[Note: recomputation] Activation checkpointing runs forwards inside a backward. Such a forward counts no new
use and does not release the unit, which its own backward needs at once: no third gather. Reentrant
checkpointing builds a graph of its own there, so its inputs are marked as well; the other kind discards
what it builds, and its marks never run.

[Note: copies] A deep copy of a module carries its hooks along, and they are ours. A hook that is called for
another module than the unit's does nothing: a copy is a plain module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.walk import Backward, Walk
from zerodrift.errors import ModelError
from zerodrift.plan.table import Unit


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread.

    Private in torch (2.11 to 2.13); its own checkpointing asks the same way.
    """
    return torch._C._current_graph_task_id() != -1


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
        self._keep_after_backward = keep_after_backward
        self.uses = 0
        """Forwards whose backward is still to come."""
        self.recomputed = False
        """Whether its last forward in training was under activation checkpointing."""
        self.walk: Walk
        """Set by the walk that goes through it."""
        self._gathers = any(segment.gathers for segment in segments)
        self.trains = any(segment.update is not None for segment in segments)

    def __repr__(self) -> str:
        return f"LiveUnit({self.spec.name or 'root'})"

    # --- gathering ------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        # A list, because every segment is to start, whatever the first one says.
        if any([segment.start_gather() for segment in self.segments]):
            self.walk.gathered(self)

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

    def leave(self) -> None:
        """A forward has ended that no backward will come back to."""
        if not self._keep_after_forward:
            self.release()

    def rest(self) -> None:
        """A whole backward has ended: only what is kept for the next micro-batch stays full."""
        if not self._keep_after_backward:
            self.release()

    def forget(self) -> None:
        """What was under way is not: an exception ended it."""
        self.uses = 0
        self.release()

    # --- hooks ----------------------------------------------------------------------------------------

    def attach(self, backward: Backward) -> list[Any]:
        """Put the hooks on the module; returns their handles."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is not self.module:
                return None  # see [Note: copies]
            if in_backward():
                backward.begin()
                self.walk.recompute(self, backward)
                self._open_gradients()
            else:
                backward.forward_begins()
                if self.is_root:
                    self.walk.enter(torch.is_grad_enabled())
                self.walk.forward(self)
            if not torch.is_grad_enabled():
                return None
            return mark_inputs(args, kwargs, lambda: self._backward_is_over(backward))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is not self.module or in_backward():
                return
            if self.is_root:
                self.walk.leave()
            needs_backward = False
            if torch.is_grad_enabled():
                for tensor in tensors_in(output):
                    if tensor.requires_grad:
                        needs_backward = True
                        tensor.register_hook(lambda grad: self._backward_begins(backward))
            if needs_backward:
                self.uses += 1
                self.leave()
            else:
                self.release()

        return [
            self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(after, with_kwargs=True),
        ]

    def _backward_begins(self, backward: Backward) -> None:
        backward.begin()
        self.walk.backward(self, backward)
        self._open_gradients()

    def _open_gradients(self) -> None:
        for segment in self.segments:
            segment.open_gradients()

    def _backward_is_over(self, backward: Backward) -> None:
        self.uses = max(0, self.uses - 1)
        if self.uses == 0:
            backward.over(self)
            if not (self._keep_after_backward or self.is_root):
                self.release()


def guard(model: nn.Module, segments: list[FlatSegment]) -> list[Any]:
    """Modules that hold sharded parameters refuse to run where these are not gathered; returns the handles.

    A unit gathers in its own hook, so only a part of one that is called by itself meets the refusal.
    """
    home = {id(p): segment for segment in segments if segment.gathers for p in segment.parameters}
    handles = []
    for path, module in model.named_modules():
        held = [home[id(p)] for p in module.parameters(recurse=False) if id(p) in home]
        if held:
            handles.append(module.register_forward_pre_hook(_refusal(path, module, held)))
    return handles


def _refusal(path: str, owner: nn.Module, held: list[FlatSegment]) -> Callable[..., None]:
    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is owner and not all(segment.is_full for segment in held):
            raise ModelError(
                f"`{path or 'model'}`: its parameters must be gathered when it is called; got sharded ones. "
                f"Call the model or the unit that it is part of, or call it inside `engine.gathered()`."
            )

    return refuse


# --- marking inputs -----------------------------------------------------------------------------------


class _Identity(torch.autograd.Function):
    """Passes tensors through; its backward runs when the gradients of all of them are formed."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.then = then
        # Not the tensors themselves: autograd would refuse a model that changes its input in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.then()
        return (None, *grads)


def mark_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The same inputs behind an identity that calls `then`; None where no input needs a gradient."""
    found = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not found:
        return None
    marked = iter(_Identity.apply(then, *found))
    replaced = {id(old): next(marked) for old in found}
    return map_tensors((args, kwargs), lambda tensor: replaced.get(id(tensor), tensor))


def loss_in(output: Any) -> Any:
    """Where a model's loss is in what it returned: `.loss`, an item of that name, the first of several, or
    all of it. Whether that is a loss is the caller's to say."""
    found = getattr(output, "loss", None)
    if found is None and isinstance(output, Mapping):
        found = output.get("loss")
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    return output if found is None else found


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
