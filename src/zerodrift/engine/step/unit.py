"""Gather and release one unit by hooks: SHARDED -> GATHERING -> FULL -> REDUCING -> SHARDED.

A unit is gathered when its module's forward begins, released when it ends, gathered again when the gradient
of its output arrives, and handed to `gradients.py` when its backward is over. Hooks on modules and tensors do
all of it, so a user's own loop, `generate`, or a call of a unit work like `engine(...)`. `traversal.py`
decides which gathers this leads to, `gradients.py` which reductions.

Invariant: hooks never change a value, nor which tensors and containers a module gets and returns. A unit that
is released early is gathered again where autograd asks for what it saved (`habits/saved_views.py`), and a
gradient that comes after its unit was reduced is reduced at the end of the backward.

[Note: end of a backward] A unit's backward is over when a gradient is about to reach what came before its
forward. The newest of the inputs shows it: autograd runs what is newer first, weight gradients included.
Where no input has a graph behind it, the unit that the backward comes to next shows it, for the same reason;
where none comes, or a unit was not used at all, the end of the whole backward.

[Note: recomputation] Activation checkpointing runs forwards inside a backward. Such a forward counts no new
use and does not release the unit, which its own backward needs at once: no third gather. Reentrant
checkpointing builds a graph of its own there, whose newest input shows the end as well. The other kind
discards what it builds, and has no end of its own.

[Note: transforms] A forward inside `torch.func` or `torch.vmap` is gathered around, and that is all: no hook
of ours is on a tensor that is not there outside of the transform.

[Note: parts] A script may call a part of a block and never the block, or `block.forward`, or use a weight of
one block in another. A part that is called while its unit is not running counts as a forward of the unit. A
parameter that is used in a forward elsewhere is gathered with its unit, on the spot and on every rank, and
released where that forward ends, or uses one of another unit.

[Note: copies] A deep copy of a module carries its hooks along, and they are ours. A hook that is called for
another module than the unit's does nothing: a copy is a plain module.

[Note: order of hooks] A unit gathers before any other hook of its module runs, and releases after all, so a
hook that a user puts there later sees values. Hooks on the gradients of a module come in front of ours unless
ours is one of them: then it is, first.
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
from zerodrift.engine.step.segment import FlatSegment
from zerodrift.engine.step.trained_segment import trained_of
from zerodrift.engine.step.traversal import Traversal, will_be_recomputed
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
        """`keep` is the plan's `keep_gathered`."""
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
        """Hooks on parts, taken off while the unit runs, when they would do nothing."""
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
        # A list, because every segment is to start, whatever the first one returns.
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
        """Release because values are about to change."""
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
        """Return whether the running backward will add to a gradient of this unit.

        Private in torch (2.13 to 2.15). Under `torch.autograd.grad` it is an error to ask for a leaf that is
        differentiated by, and nothing is added to that one.
        """
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
        """Put a hook on a part with parameters, for calls of it outside of the unit; returns a handle. See
        [Note: parts]."""

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
            if output is not None:  # it is None where the forward raised, too
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
        # What only went through, as the position bias of T5 does, is not the unit's own.
        left = [tensor for tensor in (*tensors_in(output), *call.changed()) if call.made(tensor)]
        nodes = {tensor.grad_fn for tensor in left if tensor.grad_fn is not None}
        for other in self._borrowed if nodes else ():
            saved_views.Packing().pack(left, call.newest, other.gathering, other.gather)
        if not nodes:
            self.release()
            return
        has_no_end = call.newest == BEFORE_ALL
        for node in nodes:
            # After all hooks of tensors: one of these shows that the unit before this one is over.
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
                pass  # one whose end no hook has seen
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
        """Gather the unit for a forward elsewhere that uses its parameters. With `keep`, those stay that it
        has borrowed before. See [Note: parts]."""
        under_way = self.traversal.under_way
        if not under_way and not in_backward():
            return False
        with temporarily_clear_interpreter_stack() if in_transform() else contextlib.nullcontext():
            if under_way and under_way[-1]._borrowed != [self]:
                # It stays until that forward ends, or uses yet another one.
                others = [unit for unit in under_way[-1]._borrowed if unit is not self]
                under_way[-1]._borrowed = [*others, self]
                for unit in others if not keep else ():
                    unit.leave()
            self.gather()
        return True

    def order_hooks(self) -> None:
        """Put our hooks first and last among the hooks of the module; see [Note: order of hooks]."""
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
        """Take off the hook that `attach` has not returned."""
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
            self.gather()  # user code reads what a node has saved

    def _open_gradients(self) -> None:
        for segment in self.trained if self.traversal.gradients.counts else ():
            segment.open_gradients()

    def backward_is_over(self) -> None:
        """Count a gradient that is about to go on from the input of one of its forwards."""
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
            raise ModelError(
                path or "model",
                "must return what it has computed",
                got=(
                    f"a {type(item).__name__}, which computes after the forward, when parameters are "
                    "not gathered and the precision is not set"
                ),
                do="Return a list.",
            )


def attach_parts(model: nn.Module, units: Iterable[LiveUnit]) -> list[Any]:
    """Put hooks on all modules that hold sharded parameters and are no units; returns the handles."""
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
        # Set while its forward runs (torch 2.13 to 2.15). It may be another model's, which calls this one.
        wrapper = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is not None and module is model and any(part is model for part in wrapper.modules()):
            raise UnsupportedError(
                "model",
                "must not be in `DistributedDataParallel`: the engine sums gradients over ranks",
                got="a call through it",
                do="Call the engine, or the model itself.",
            )

    return model.register_forward_pre_hook(refuse)
