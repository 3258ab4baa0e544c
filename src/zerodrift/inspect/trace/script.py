"""Watch the operations of a script's own code, outside of forwards, backwards and torch's optimizers.

A master is a tensor that an optimizer updates and that the script copies, cast, into a parameter. An average
is a tensor of 16 bits that is moved a part of the way towards another value. A parameter that no optimizer of
torch's has, and that the script writes after gradients have arrived, is updated by hand. Only the first steps
are watched: see [Note: once is enough].

Invariant: a tensor is known by its memory. The mode is entered only on an empty stack of modes, and left only
from the top.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from zerodrift.inspect.trace.averages import AverageWatch, Source, carries, is_average, keeps_value
from zerodrift.inspect.trace.operations import (
    VIEWS,
    anything_compiled,
    every_operation,
    line_of_script,
    name_of,
    tensors_of,
)
from zerodrift.inspect.trace.parameter import LiveParameter, Owners, local
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.state import OptimizedPart, WatchState, guarded
from zerodrift.inspect.trace.values import NARROW, LossWatch

_NOTHING = Source()
_LOWER_BITS = (torch.int16, torch.uint16)
"""Dtypes of a state that keeps the lower half of fp32, of which a bf16 weight is the upper half."""

_DRAWS = frozenset(("randint", "randint_like", "random", "random_"))
"""Operations that draw whole numbers, by which weights are rounded at random."""


class HandUpdates:
    """Weights that a script's own code updates, without an optimizer of torch's."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self._masters: dict[LiveParameter, tuple[str, str, str]] = {}
        """Weight -> dtype of its master, what the master is, and the line that writes the weight."""
        self._written: set[LiveParameter] = set()  # weights that were written since the last forward
        self._passes = 0  # backward passes that there had been at the last step by hand

    def add(self, parameter: LiveParameter, copied: torch.Tensor | None = None) -> None:
        """Note a write, which may copy a tensor that no optimizer has."""
        what = ("same", "the parameter itself")
        if copied is not None:
            what = (dtype_name(copied.dtype), "what the script copies")
        self._masters[parameter] = (*what, line_of_script())
        self._written.add(parameter)
        if (gradient := parameter.gradient) is not None:
            parameter.record.add("accumulate", dtype_name(gradient.dtype), ".grad")

    def end_step(self) -> None:
        """Count a step of the weights that were written since the last forward."""
        state = self.state
        alone = next((each for each in self._masters if each in self._written and not each.optimized), None)
        self._written.clear()
        if alone is not None and state.passes > self._passes:
            state.has_stepped(alone, state.passes - self._passes)
            self._passes = state.passes

    def record(self) -> None:
        for parameter, (dtype, what, line) in self._masters.items():
            if not parameter.optimized:
                parameter.optimized = True
                parameter.record.facts |= {"follows": True, "by_hand": True}
                parameter.record.add("master", dtype, what, "", line)
                parameter.record.unseen["state"] = "the script updates it without an optimizer of torch's"


class CopyWatch:
    """Follows the memory of weights, masters, gradients and averages outside of forwards."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.updates = HandUpdates(state)
        self._sources: Owners[Source] = Owners()
        self.averages = AverageWatch(state, self._sources)
        self._read: Owners[tuple[LiveParameter, int]] = Owners()
        """Memory that was read to write a weight, and the backward passes that there had been."""
        self._residues: Owners[LiveParameter] = Owners()
        """Memory that was read to write a weight, and was then itself written with that weight."""

    def stepped(self, tensor: torch.Tensor, master: Any) -> None:
        """Follow a tensor that an optimizer has updated, and that gets no gradients from a backward."""
        self._sources.put(tensor, Source(masters=frozenset((master,))))

    def weights_of(self, tensor: torch.Tensor) -> set[LiveParameter]:
        """Return the weights whose memory this is, or that it was computed from."""
        self.state.remember()
        weights = {each for each in self.state.memory.all_of(tensor) if each.record.trained}
        return weights.union(*(source.parameters for source in self._sources.all_of(tensor)))

    def residue(self, parameter: LiveParameter, states: dict[Any, Any]) -> str:
        """Return the name of the state that keeps what the rounding of a weight of 16 bits lost, or ""."""
        weight = parameter.tensor()
        if weight is None or weight.dtype not in NARROW:
            return ""
        for key, state in states.items():
            if not isinstance(state, torch.Tensor) or local(state).shape != local(weight).shape:
                continue
            lost, values = local(state).detach(), local(weight).detach()
            if lost.dtype in _LOWER_BITS and values.dtype is torch.bfloat16:
                return str(key)
            if self._residues.of(state) is parameter:
                is_rest = lost.abs() <= torch.finfo(values.dtype).eps * values.abs()
                if is_rest.float().mean() > 0.9:
                    return str(key)
        return ""

    @guarded
    def computed(self, name: str, args: Any, kwargs: Any, out: Any, in_step: bool) -> None:
        """Follow an operation outside of forwards. One on lists of tensors is followed tensor by tensor."""
        given = (*args, *(kwargs or {}).values())
        if name in VIEWS:
            return
        if name.startswith("_foreach_"):
            lists = [arg for arg in given if _is_list(arg)]
            results = lists[0] if name.endswith("_") and lists else out
            numbers = [arg for arg in args if not _is_list(arg)]
            name = name.removeprefix("_foreach_")
            for result, *inputs in zip(results, *lists, strict=False) if lists and _is_list(results) else ():
                self._follow(name, tensors_of([*inputs, *numbers]), result, in_step)
            return
        result = args[0] if name.endswith("_") and args else out
        self._follow(name, tensors_of(given), result, in_step)

    def _follow(self, name: str, tensors: list[torch.Tensor], result: Any, in_step: bool) -> None:
        if not isinstance(result, torch.Tensor):
            return
        state, is_in_place = self.state, name.endswith("_")
        reads = tensors[1:] if is_in_place else tensors
        if state.several:
            self._follow_gradients(name, reads, result)
        source, alike = self._joined(name, reads, result), [t for t in reads if t.numel() == result.numel()]
        weights = state.memory.all_of(result) if is_in_place else []
        for parameter in weights:
            parameter.is_drawn |= source.is_drawn
            for master in source.masters:
                self.link(parameter, master, result)
            for tensor in alike:
                self._read.put(tensor, (parameter, state.passes))
            is_update = any(tensor.numel() > 1 or result.numel() == 1 for tensor in reads)  # else a bound
            if parameter.arrived and is_update and not (in_step or source.masters):
                is_copy = name == "copy_" and parameter not in source.parameters
                is_wider = is_copy and result.dtype in NARROW and reads[0].dtype not in NARROW
                self.updates.add(parameter, reads[0] if is_wider else None)
        for weight in map(self._weight_of, alike if is_in_place and not weights else ()):
            if weight is not None and self._read.of(result) == (weight, state.passes):
                self._residues.put(result, weight)
        moves = not in_step and result.numel() > 1 and is_average(name, tensors, result, source)
        self.averages.computed(name, result, source, moves)
        if is_in_place:
            is_drawn = source.is_drawn and not weights
            source = replace(source, parameters=frozenset(), is_mixed=False, is_drawn=is_drawn)
        if source != _NOTHING or self._sources.of(result) is not None:
            self._sources.put(result, source)

    def _weight_of(self, tensor: torch.Tensor) -> LiveParameter | None:
        """Return the weight whose memory this is, or that it was computed from, element by element."""
        return self.state.memory.of(tensor) or self._source_of(tensor).weight

    def _source_of(self, tensor: torch.Tensor) -> Source:
        return self._sources.of(tensor) or _NOTHING

    def _joined(self, name: str, reads: Sequence[torch.Tensor], result: torch.Tensor) -> Source:
        """Return the source of a result. Its parameters and masters are found by memory."""
        parameters: set[LiveParameter] = set()
        masters: set[Any] = set()
        is_mixed, numels = False, {True: set[int](), False: set[int]()}  # elements of weights, and of others
        for tensor in (each for each in reads if each.numel() > 1 or result.numel() == 1):
            sources = self._sources.all_of(tensor)
            owners = {p for p in self.state.memory.all_of(tensor) if p.record.trained}
            weights = {p for p in owners if p.arrived or not self.state.passes}
            weights.update(*(source.parameters for source in sources))
            parameters |= weights
            masters.update(*(source.masters for source in sources))
            is_mixed |= any(source.is_mixed for source in sources)
            if tensor.is_floating_point():
                numels[bool(weights)].add(tensor.numel())
        is_mixed |= not numels[True].isdisjoint(numels[False])
        given = [result, *reads] if keeps_value(name) else reads
        alike = [tensor for tensor in given if tensor.numel() == result.numel()]
        is_drawn = name in _DRAWS and not result.is_floating_point()
        is_drawn |= any(self._source_of(tensor).is_drawn for tensor in alike)
        near = [weight for weight in map(self._weight_of, alike) if weight is not None]
        lines = frozenset[str]().union(*(self._source_of(each).lines for each in given if carries(name)))
        return Source(
            frozenset(parameters), frozenset(masters), is_mixed, is_drawn, near[-1] if near else None, lines
        )

    def _follow_gradients(self, name: str, reads: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Follow gradients into a copy, which a script may send in another dtype."""
        if name not in ("cat", "_to_copy", "clone", "copy_"):
            return
        memory, copy = self.state.gradient_memory, local(result)
        at, storage = int(copy.storage_offset()), copy.untyped_storage()
        for tensor in reads:
            for begin, end, owner in memory.ranges_of(tensor):
                memory.put_range(storage, at + begin, at + end, owner)
            at += local(tensor).numel()

    def link(self, parameter: LiveParameter, master: Any, written: torch.Tensor) -> None:
        """Record that a master was copied into a parameter whose gradients arrive."""
        tensor = master.tensor()
        if tensor is None or not parameter.arrived or parameter.tensor() is tensor:
            return
        own = self.state.optimized.get(id(parameter.tensor()))
        if own is not None and own.tensor() is parameter.tensor():
            return  # an optimizer updates the parameter itself
        parameter.is_written = True
        if any(part.parameter is parameter for part in master.parts):
            return
        begin = parameter.begin if tensor.numel() == parameter.record.numel else -1
        master.renew([*master.parts, OptimizedPart(parameter, begin)])
        parameter.optimized = True
        line = line_of_script()
        parameter.record.add("master", dtype_name(tensor.dtype), "a tensor that the script copies", "", line)

    def end_step(self) -> None:
        """Find masters and updates by hand in memory that the script gave to parameters, and averages."""
        for parameter in self.state.parameters():
            tensor = parameter.tensor()
            if tensor is not None and not parameter.optimized and local(tensor).numel():
                for source in self._sources.all_of(tensor):
                    for master in source.masters:
                        self.link(parameter, master, tensor)
                    if parameter in source.parameters and parameter.arrived:
                        self.updates.add(parameter)
        self.updates.end_step()
        self.averages.end_step()


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


_STEPS = 3  # steps that are watched

_CLIPS = re.compile(r"(_foreach_)?(clamp|norm|linalg_vector_norm|pow|square)(_max|_maximum|_min|_minimum)?_?")
"""Operations that read a gradient to clip it."""
_COPIES = ("cat", "stack", "clone", "_to_copy", "abs")  # their result is as large as their input


class ScriptWatch:
    """The mode between forwards, and its listeners."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.losses = LossWatch()
        self.copies = CopyWatch(state)
        self.in_step = False  # whether an optimizer's step is under way
        self._mode = every_operation(self._called, compiled=False)
        self._is_entered = False
        self._scaled: Owners[Any] = Owners()
        """Memory of gradients that contain the loss scale after the last backward, and of copies of them."""
        self._scaled_copies: set[Any] = set()  # stand for copies that still contain the scale
        self._looked_after = 0  # number of backward passes when it was filled

    def enter(self) -> None:
        state = self.state
        if self._is_entered or not state.active or state.in_backward or state.process.steps > _STEPS:
            return
        if anything_compiled() or _get_current_dispatch_mode_stack():
            return
        state.remember()
        self._mode.__enter__()
        self._is_entered = True

    def leave(self) -> bool:
        """Leave the mode; return True if it was on."""
        is_on = self._is_entered and threading.get_ident() == self.state.thread
        if not is_on or _get_current_dispatch_mode() is not self._mode:
            return False  # the script is inside a mode of its own
        self._is_entered = False
        self._mode.__exit__(None, None, None)
        return True

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if func.namespace == "aten":
            self._computed(name_of(func), args, kwargs, out)

    @guarded
    def _computed(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        if not self.in_step:
            self.losses.computed(name, args, kwargs, out, None)
            if self.state.scaled:
                self._scaled_computed(name, args, out)
        self.copies.computed(name, args, kwargs, out, self.in_step)

    def _scaled_computed(self, name: str, args: Any, out: Any) -> None:
        """Record that scaled gradients are clipped, and follow copies and unscaling by the script."""
        clips, times = _CLIPS.fullmatch(name), name.removeprefix("_foreach_") in ("mul_", "div_")
        if not clips and not times and name not in _COPIES:
            return
        if self._looked_after != self.state.passes:
            self._looked_after, self._scaled, self._scaled_copies = self.state.passes, Owners(), set()
            for parameter in self.state.scaled:
                if (gradient := parameter.gradient) is not None:
                    self._scaled.put(gradient, parameter)
        held = {owner for each in tensors_of(args) for owner in self._scaled.all_of(each)}
        held &= self.state.scaled | self._scaled_copies
        if times:
            if not (isinstance(args[1], (int, float)) and 1 / 8 < abs(args[1]) < 8):
                self.state.scaled -= held
                self._scaled_copies -= held
        elif held and clips:
            self.state.event("clipped_scaled", line_of_script())
        elif held:
            copy = object()
            self._scaled.put(out, copy)
            self._scaled_copies.add(copy)

    def record(self) -> None:
        """Add events to the record when the run is over."""
        self.copies.updates.record()
        self.state.process.events += [*self.losses.events(), *self.copies.averages.events()]
