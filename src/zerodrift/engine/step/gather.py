"""Gather: hooks that gather each unit before it computes and release it afterwards, forward and back.

A unit is gathered when its module's forward begins and released when it ends. It is gathered again when the
gradient of its output arrives, and its gradients are reduced (`reduce.py`) when its backward is over. Hooks
on modules and tensors do all of it, so a user's own loop, `generate`, or a call of one unit work like
`engine(...)`.

`traversal.py` decides which gathers this leads to, and in which order.

Invariant: hooks change no value, nor which tensors and containers a module gets and returns. A unit that was
released is gathered again when autograd asks for what it saved (`habits/saved_views.py`).

[Note: end of a backward] autograd runs newer nodes first, weight gradients included. So a unit's backward is
over when a gradient is about to reach the newest input of its forward. If no input has a graph behind it, the
backward is over when the next unit's begins, or at the end of the whole backward.

[Note: recomputation] Activation checkpointing runs forwards inside a backward. Such a forward counts no new
use and does not release the unit, which its own backward needs at once. Reentrant checkpointing builds a
graph there, whose newest input shows the end as well. The other kind discards the graph that it builds.

[Note: transforms] Inside `torch.func` or `torch.vmap` a forward is only gathered and released. Hooks on
tensors would not exist outside of the transform.

[Note: parts] A script may call a part of a block and never the block, or `block.forward`, or use a weight of
one block in another. A call of a part outside of its unit's forward counts as a forward of the unit. A
parameter that is used in the forward of another unit is gathered with its own unit, on every rank, and
released when that forward ends or uses a parameter of a third unit.

[Note: copies] A deep copy of a module carries our hooks along. A hook that is called for another module than
its unit's does nothing, so a copy is a plain module.

[Note: order of hooks] A unit gathers before any other hook of its module runs, and releases after all of
them, so that a user's hook sees values whenever it was registered. Backward pre-hooks of a user run before
our tensor hooks; where there are any, one of ours is put in front of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from zerodrift.engine.habits import saved_views
from zerodrift.engine.nested import BEFORE_ALL, ForwardInputs, in_backward, in_transform, tensors_in
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained_segment import trained_of
from zerodrift.engine.traversal import Traversal, will_be_recomputed
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.plan import Unit


class LiveUnit:
    """A unit of the plan with its module and its segments."""

    def __init__(
        self,
        number: int,
        spec: Unit,
        module: nn.Module,
        segments: list[FlatSegment],
        gathered_bytes: int,
        keep: str,
    ) -> None:
        """`keep` is the policy's `keep_gathered`."""
        self.number = number
        self.spec = spec
        self.module = module
        self.segments = segments
        self.is_root = spec.name == ""
        self.gathered_bytes = gathered_bytes
        self._keep_after_forward = keep != "never" or self.is_root
        self._keep_after_backward = keep == "step"
        self.uses = 0
        """Forwards whose backward is still to come."""
        self.recomputed = False
        self.traversal: Traversal
        self._parts: list[tuple[Any, int]] = []
        """(hook dict, hook number) of each hook on a part."""
        self._paused_parts: list[tuple[Any, int, Any]] = []
        """(hook dict, hook number, hook) of hooks on parts that are off while the unit runs."""
        self._calls: list[ForwardInputs] = []
        self._packing = saved_views.Packing()
        self._borrowed: list[LiveUnit] = []
        self._first, self._last = -1, [-1]
        self._before_backward: Any = None
        self.gathering = [segment for segment in segments if segment.gathers]
        """Segments whose full form is not their storage."""
        self.trained = trained_of(segments)
        for segment in self.gathering:
            segment.lend(weakref.WeakMethod(self.borrow))

    # --- gathering --------------------------------------------------------------------------------------

    def start_gather(self) -> None:
        # A list, because every segment must start, whatever the first one returns.
        if any([segment.start_gather() for segment in self.gathering]):
            self.traversal.gathered(self)

    def gather(self) -> None:
        if not self.gathering:
            return
        self.start_gather()
        is_evaluated = not (torch.is_grad_enabled() or self.module.training)
        for segment in self.gathering:
            segment.finish_gather(is_evaluated=is_evaluated)

    def release(self) -> None:
        for segment in self.gathering:
            segment.release()

    def drop(self) -> None:
        """Release the unit because values are about to change."""
        for segment in self.gathering:
            segment.drop()

    @property
    def is_full(self) -> bool:
        return all(segment.is_full for segment in self.segments)

    def leave(self) -> None:
        if not self._keep_after_forward:
            self.release()

    def rest(self) -> None:
        if not self._keep_after_backward:
            self.release()

    def forget(self) -> None:
        """Recover from an exception in a forward or a backward."""
        self.uses = 0
        self._calls.clear()
        self._resume_part_hooks()
        self._borrowed.clear()
        self.traversal.under_way.clear()
        self.release()

    def is_reached(self) -> bool:
        """Return whether the running backward will add to a gradient of this unit. Private in torch (2.13 to
        2.15), which raises for an input of `torch.autograd.grad`; nothing is added to that."""
        for node in (end for segment in self.trained for end in segment.ends):
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:
                continue
        return False

    # --- hooks ------------------------------------------------------------------------------------------

    def attach(self) -> list[Any]:

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is not self.module:
                return  # see [Note: copies]
            self.order_hooks()
            self._enter(args, kwargs, whole=True)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if module is self.module:
                self._exit(output, whole=True)

        def ended(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is self.module:
                self._end()

        handles = [
            self.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            self.module.register_forward_hook(after, with_kwargs=True),
            self.module.register_forward_hook(ended, always_call=True),
        ]
        self._first, *self._last = (handle.id for handle in handles)
        return handles

    def attach_part(self, part: nn.Module) -> Any:
        """Put a hook on a part with parameters, for calls outside of the unit's forward; returns a handle.
        See [Note: parts]."""

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            recomputed = in_backward() and self.uses > 0 and self.is_full and self.traversal.has_come(self)
            if module is not part or recomputed:
                return
            self._enter(args, kwargs, whole=False)
            handle: Any = part.register_forward_hook(
                lambda *called: after(handle, called[-1]), always_call=True
            )

        def after(handle: Any, output: Any) -> None:
            handle.remove()
            if output is not None:  # None also if the forward raised
                self._exit(output, whole=False)
            self._end()

        attached = part.register_forward_pre_hook(before, with_kwargs=True)
        self._parts.append((part._forward_pre_hooks, attached.id))
        return attached

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool) -> None:
        gradients = self.traversal.gradients
        if in_transform():
            self._begin(ForwardInputs((), BEFORE_ALL))
            with temporarily_clear_interpreter_stack():
                self.gather()
            return  # see [Note: transforms]
        inside = in_backward()
        if inside:
            gradients.begin()
            self.traversal.recompute(self)
            self._open_gradients()
        else:
            gradients.forward_begins()
            if self.is_root and whole:
                self.traversal.enter(torch.is_grad_enabled())
            self.traversal.forward(self)
        self._begin(ForwardInputs.of(args, kwargs))
        discarded = inside and will_be_recomputed()  # see [Note: recomputation]
        if torch.is_grad_enabled() and not discarded:
            self._calls[-1].when_backward_ends(self.backward_is_over, inside=inside)

    def _exit(self, output: Any, *, whole: bool) -> None:
        if in_backward():
            return
        if in_transform():
            with temporarily_clear_interpreter_stack():
                self.release()
            return
        call = self._calls[-1]
        if self.is_root and whole:
            self.traversal.leave()
        _refuse_unfinished(self.spec.name, output)
        if not torch.is_grad_enabled():
            self.release()
            return
        # A tensor that the unit only passes on, such as the position bias of T5, is not its output.
        left = [tensor for tensor in (*tensors_in(output), *call.changed()) if call.made(tensor)]
        nodes = {tensor.grad_fn for tensor in left if tensor.grad_fn is not None}
        for other in self._borrowed if nodes else ():
            saved_views.Packing().pack(left, call.newest, other.gathering, other.gather)
        if not nodes:
            self.release()
            return
        has_no_end = call.newest == BEFORE_ALL
        for node in nodes:
            # Runs after all hooks on tensors, which may end the backward of the unit before this one.
            node.register_prehook(lambda grads: self._backward_begins(has_no_end))
        self.uses += 1
        if self.gathering and not self._keep_after_forward:
            self._packing.pack(left, call.newest, self.gathering, self._backward_begins)
        self.leave()

    def _begin(self, call: ForwardInputs) -> None:
        if not self._calls:
            there = [(hooks, number) for hooks, number in self._parts if number in hooks]
            self._paused_parts = [(hooks, number, hooks.pop(number)) for hooks, number in there]
        self._calls.append(call)
        self.traversal.under_way.append(self)

    def _end(self) -> None:
        under_way = self.traversal.under_way
        if self._calls:
            self._calls.pop()
            while under_way and under_way.pop() is not self:
                pass  # a unit whose end no hook has noticed
        if not self._calls:
            self._resume_part_hooks()
            borrowed, self._borrowed = self._borrowed, []
            for other in borrowed:
                if not other._calls:
                    other.leave()

    def _resume_part_hooks(self) -> None:
        for hooks, number, hook in self._paused_parts:
            hooks[number] = hook
            hooks.move_to_end(number, last=False)
        self._paused_parts = []

    def borrow(self, keep: bool) -> bool:
        """Gather the unit because the forward of another unit uses its parameters. With `keep`, units that
        the other has borrowed before stay gathered. See [Note: parts]."""
        under_way = self.traversal.under_way
        if not under_way and not in_backward():
            return False
        with temporarily_clear_interpreter_stack() if in_transform() else contextlib.nullcontext():
            if under_way and under_way[-1]._borrowed != [self]:
                others = [unit for unit in under_way[-1]._borrowed if unit is not self]
                under_way[-1]._borrowed = [*others, self]
                for unit in others if not keep else ():
                    unit.leave()
            self.gather()
        return True

    def order_hooks(self) -> None:
        """Put our hooks first and last among the module's; see [Note: order of hooks]."""
        # torch keeps hooks in ordered dicts, and declares dicts.
        hooks: Any = self.module._forward_pre_hooks
        if self._first in hooks and next(iter(hooks)) != self._first:
            hooks.move_to_end(self._first, last=False)
        hooks = self.module._forward_hooks
        if self._last[-1] in hooks and next(reversed(hooks)) != self._last[-1]:
            for number in self._last:
                hooks.move_to_end(number)
        if self.module._backward_pre_hooks and self.gathering:
            hooks = self.module._backward_pre_hooks
            if self._before_backward is None:
                begins = self.module.register_full_backward_pre_hook(
                    lambda module, grads: self._backward_begins()
                )
                self._before_backward = begins
            hooks.move_to_end(self._before_backward.id, last=False)

    def detach(self) -> None:
        """Remove the hook of `order_hooks`."""
        if self._before_backward is not None:
            self._before_backward.remove()

    # --- backward ---------------------------------------------------------------------------------------

    def _backward_begins(self, has_no_end: bool = False) -> None:
        if in_backward():
            self.traversal.gradients.begin()
            self.traversal.backward(self)
            if has_no_end:
                self.traversal.ends_with_the_next(self)
            self._open_gradients()
        else:
            self.gather()  # user code reads a saved tensor of a node

    def _open_gradients(self) -> None:
        for segment in self.trained if self.traversal.gradients.counts else ():
            segment.open_gradients()

    def backward_is_over(self) -> None:
        """Count a gradient that is about to leave the input of one of the unit's forwards."""
        gradients = self.traversal.gradients
        gradients.begin()
        if not self.traversal.is_over(self):
            return
        self.uses = max(0, self.uses - 1)
        if self.uses == 0:
            gradients.over(self)
            if not (self._keep_after_backward or self.is_root):
                self.release()


def _refuse_unfinished(path: str, output: Any) -> None:
    if isinstance(output, torch.Tensor):
        return
    if isinstance(output, Mapping):
        output = tuple(output.values())
    for item in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(item, (Iterator, Awaitable, AsyncIterator)):
            must = "must return computed values"
            got = f"a {type(item).__name__}, which computes after the forward, without parameters"
            do = "Return a list."
            raise ModelError(path or "model", must, got=got, do=do)


def attach_parts(model: nn.Module, units: Iterable[LiveUnit]) -> list[Any]:
    """Put hooks on modules that hold sharded parameters of units above them; returns the handles."""
    held: dict[nn.Module, dict[LiveUnit, None]] = {}
    of = {id(p): unit for unit in units for segment in unit.gathering for p in segment.parameters}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            unit = of.get(id(parameter))
            if unit is not None and unit.module is not module:
                held.setdefault(module, {})[unit] = None
    return [unit.attach_part(module) for module, found in held.items() for unit in found]


def refuse_wrapper(model: nn.Module) -> Any:
    """Refuse `DistributedDataParallel` around the model, which would sum gradients too; returns a handle."""

    def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
        # Set while the wrapper's forward runs (torch 2.13 to 2.15). The wrapper may be around another model.
        wrapper = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and module is model and any(part is model for part in wrapper.modules()):
            must = "must not be in `DistributedDataParallel`: the engine sums gradients over ranks"
            do = "Call the engine, or the model itself."
            raise UnsupportedError("model", must, got="a call through it", do=do)

    return model.register_forward_pre_hook(refuse)
