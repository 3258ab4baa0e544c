"""Watch the operations of a script's own code, outside of forwards, backwards and torch's optimizers.

A master is a tensor that an optimizer updates and that the script copies, cast, into a parameter. An average
is a tensor of 16 bits that is moved a part of the way towards another value. A parameter that no optimizer of
torch's has, and that the script writes once gradients have arrived at it, is updated by hand. See [Note: once
is enough]: after a few steps nothing is watched again.

Invariant: a tensor is known by its memory, whichever operation copies it. The mode is entered on an empty
stack of modes only, and left only from the top.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack

from zerodrift.inspect.trace.operations import (
    VIEWS,
    anything_compiled,
    every_operation,
    line_of_script,
    name_of,
)
from zerodrift.inspect.trace.parameter import LiveParameter, Owners, local, sample
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.state import OptimizedPart, WatchState, guarded
from zerodrift.inspect.trace.values import NARROW, LossWatch, Result, ResultWatch

_MOVES = frozenset(("add", "add_", "addcdiv_", "addcmul_", "lerp", "lerp_", "sub_"))
"""Operations whose result is an average, if they read a weight and another tensor of its shape."""

_DRAWS = frozenset(("randint", "randint_like", "random", "random_"))
"""Operations that draw whole numbers: what a weight is rounded by at random."""

_ELEMENTS = 64  # elements of an average that are compared between steps
_MOST = 256  # averages that are sampled


@dataclass(frozen=True, slots=True)
class Source:
    """The weights and the masters that a tensor was computed from."""

    parameters: frozenset[LiveParameter] = frozenset()
    masters: frozenset[Any] = frozenset()
    is_mixed: bool = False  # whether the weights were combined with another tensor of their shape


class UpdateWatch:
    """Follows what is written into weights by a script's own code, in optimizers of its own too."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self._drawn: Owners[bool] = Owners()  # memory that whole numbers were drawn for, element by element
        self._read: Owners[tuple[LiveParameter, int]] = Owners()
        """Memory that was read when a weight was written, and the backward passes that there had been."""
        self._derived: Owners[LiveParameter] = Owners()  # memory that a weight was read for
        self._residues: Owners[LiveParameter] = Owners()
        """Memory that a weight was written with, and that was written with the weight afterwards."""
        self._by_hand: dict[LiveParameter, tuple[str, str, str]] = {}
        """A weight that is written outside of optimizers -> dtype of its master, what that is, the line."""
        self._written: dict[LiveParameter, None] = {}  # those written by hand since the last forward
        self._passes = 0  # backward passes that there had been at the last step by hand

    def computed(self, name: str, reads: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Follow an operation on memory that is no weight's."""
        alike = [tensor for tensor in reads if tensor.numel() == result.numel()]
        if (name in _DRAWS and not result.is_floating_point()) or any(map(self._drawn.of, alike)):
            self._drawn.put(result, True)
        read = self._read.of(result) if name.endswith("_") else None
        for weight in (self.state.memory.of(tensor) or self._derived.of(tensor) for tensor in alike):
            if weight is not None:
                self._derived.put(result, weight)
                if read == (weight, self.state.passes):
                    self._residues.put(result, weight)

    def writes(self, parameter: LiveParameter, reads: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Follow an operation that writes into a weight."""
        alike = [tensor for tensor in reads if tensor.numel() == result.numel()]
        parameter.is_drawn |= any(map(self._drawn.of, alike))
        for tensor in alike:
            self._read.put(tensor, (parameter, self.state.passes))

    def by_hand(self, parameter: LiveParameter, copied: torch.Tensor | None = None) -> None:
        """Note an update outside of optimizers, which may copy a tensor that no optimizer has."""
        what = ("same", "the parameter itself")
        if copied is not None:
            what = (dtype_name(copied.dtype), "what the script copies")
        self._by_hand[parameter] = (*what, line_of_script())
        self._written[parameter] = None
        if (gradient := parameter.gradient) is not None:
            parameter.record.add("accumulate", dtype_name(gradient.dtype), ".grad")

    def residue(self, parameter: LiveParameter, states: dict[Any, Any]) -> str:
        """Return the name of the state that keeps what the rounding of a weight of 16 bits lost, or ""."""
        weight = parameter.tensor()
        if weight is None or weight.dtype not in NARROW:
            return ""
        for key, state in states.items():
            if isinstance(state, torch.Tensor) and self._residues.of(state) is parameter:
                lost, values = local(state).detach(), local(weight).detach()
                if lost.shape == values.shape:
                    is_rest = lost.abs() <= torch.finfo(values.dtype).eps * values.abs()
                    if is_rest.float().mean() > 0.9:
                        return str(key)
        return ""

    def end_step(self) -> None:
        """Count a step of weights that were written by hand since the last forward."""
        state = self.state
        alone = next((parameter for parameter in self._written if not parameter.optimized), None)
        self._written.clear()
        if alone is not None and state.passes > self._passes:
            state.has_stepped(alone, state.passes - self._passes)
            self._passes = state.passes

    def record(self) -> None:
        """Hand over the weights that no optimizer has, and that the script updates."""
        for parameter, (dtype, what, line) in self._by_hand.items():
            if not parameter.optimized:
                parameter.optimized = True
                parameter.record.facts |= {"follows": True, "by_hand": True}
                parameter.record.add("master", dtype, what, "", line)
                parameter.record.unseen["state"] = "the script updates it without an optimizer of torch's"


class CopyWatch:
    """Follows the memory of weights, masters, gradients and averages outside of forwards."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.updates, self.results = UpdateWatch(state), ResultWatch()
        self._sources: Owners[Source] = Owners()
        self._averages: dict[Any, Result] = {}  # the first of each

    def stepped(self, tensor: torch.Tensor, master: Any) -> None:
        """Follow a tensor that an optimizer has updated, and that no gradients arrive at by a backward."""
        self._sources.put(tensor, Source(masters=frozenset((master,))))

    def weights_of(self, tensor: torch.Tensor) -> set[LiveParameter]:
        """Return the weights whose memory this is, or that it was computed from."""
        self.state.remember()
        weights = {each for each in self.state.memory.all_of(tensor) if each.record.trained}
        return weights.union(*(source.parameters for source in self._sources.all_of(tensor)))

    @guarded
    def computed(self, name: str, args: Any, kwargs: Any, out: Any, in_step: bool) -> None:
        """Follow an operation outside of forwards, element by element for those on lists of tensors."""
        given = (*args, *(kwargs or {}).values())
        if name in VIEWS:
            return
        if name.startswith("_foreach_"):
            lists = [arg for arg in given if _is_list(arg)]
            results = lists[0] if name.endswith("_") and lists else out
            numbers = [arg for arg in args if not _is_list(arg)]
            name = name.removeprefix("_foreach_")
            for result, *inputs in zip(results, *lists, strict=False) if lists and _is_list(results) else ():
                self._follow(name, [*inputs, *numbers], result, in_step)
            return
        result = args[0] if name.endswith("_") and args else out
        self._follow(name, list(_flat(given)), result, in_step)

    def _follow(self, name: str, inputs: list[Any], result: Any, in_step: bool) -> None:
        if not isinstance(result, torch.Tensor):
            return
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        is_in_place = name.endswith("_")
        reads = tensors[1:] if is_in_place else tensors
        source = self._joined(reads, result)
        if self.state.several:
            self._follow_gradients(name, reads, result)
        weights = self.state.memory.all_of(result) if is_in_place else []
        if not weights:
            self.updates.computed(name, reads, result)
        for parameter in weights:
            for master in source.masters:
                self.link(parameter, master, result)
            self.updates.writes(parameter, reads, result)
            is_update = any(tensor.numel() > 1 or result.numel() == 1 for tensor in reads)  # a bound is none
            if parameter.arrived and is_update and not (in_step or source.masters):
                is_copy = name == "copy_" and parameter not in source.parameters
                is_wider = is_copy and result.dtype in NARROW and reads[0].dtype not in NARROW
                self.updates.by_hand(parameter, reads[0] if is_wider else None)
        is_average = not in_step and result.numel() > 1 and _is_average(name, tensors, result, source)
        self.results.computed(name, reads, result, source, is_average)
        if source.parameters or source.masters or self._sources.of(result):
            self._sources.put(result, Source(masters=source.masters) if is_in_place else source)

    def _joined(self, reads: Sequence[torch.Tensor], result: torch.Tensor) -> Source:
        """Return what a result comes from; parameters and masters are found by memory."""
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
        return Source(frozenset(parameters), frozenset(masters), is_mixed)

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

    def rests(self) -> None:
        """Look at memory that was given to parameters, and at averages that are still there."""
        for parameter in (parameter for model in self.state.models for parameter in model.parameters):
            tensor = parameter.tensor()
            if tensor is not None and not parameter.optimized and local(tensor).numel():
                for source in self._sources.all_of(tensor):
                    for master in source.masters:
                        self.link(parameter, master, tensor)
                    if parameter in source.parameters and parameter.arrived:
                        self.updates.by_hand(parameter)
        self.updates.end_step()
        averages = self.results.rests(self.state.process.steps, self._may_average_now())
        for number, (average, result) in enumerate(averages):
            self._sees_average(average, result, number)

    def _may_average_now(self) -> Callable[[torch.Tensor], bool]:
        """Return a function that is False for weights that train, and for their gradients."""
        parameters = [parameter for model in self.state.models for parameter in model.parameters]
        held = [parameter.gradient for parameter in parameters]
        held += [parameter.tensor() for parameter in parameters if parameter.arrived]
        trained = {_storage(each) for each in held if each is not None}

        def may_average(tensor: torch.Tensor) -> bool:
            owners = self.state.memory.all_of(tensor)
            return _storage(tensor) not in trained and not any(owner.arrived for owner in owners)

        return may_average

    def _sees_average(self, tensor: torch.Tensor, result: Result, number: int) -> None:
        """Sample an average; the `number` of one of no weights stands for a place that changes."""
        weights: frozenset[LiveParameter] = result.source.parameters
        names = tuple(sorted(parameter.record.name for parameter in weights))
        key: Any = names or (result.line, number)
        known = self._averages.setdefault(key, result)
        if known is result:
            buffers = (name for model in self.state.models for name in model.buffers_in(tensor))
            known.names = names or tuple(buffers)
        if len(self._averages) <= _MOST and len(known.samples) < 8:
            weight = next(iter(weights)).tensor() if len(weights) == 1 else None
            is_alike = weight is not None and local(weight).numel() == local(tensor).numel()
            followed = _sample(weight) if is_alike and weight is not None else None
            known.samples.append((_sample(tensor), followed))

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield averages of 16 bits: the sampled elements that had to move, and those that did not."""
        for average in self._averages.values():
            moves = still = 0
            for (before, _), (after, followed) in zip(average.samples, average.samples[1:], strict=False):
                due = torch.ones_like(after, dtype=torch.bool) if followed is None else followed != before
                moves += int(due.sum())
                still += int((due & (before == after)).sum())
            yield {"kind": "average", "line": average.line, "operation": average.operation, "moves": moves,
                   "dtype": dtype_name(average.dtype), "names": average.names, "still": still}  # fmt: skip


def _is_average(name: str, tensors: Sequence[torch.Tensor], result: torch.Tensor, source: Source) -> bool:
    """Return True if a result is of a weight and of another tensor of its shape."""
    is_moved = name in _MOVES and (name.endswith("_") or source.is_mixed)
    is_copied = name == "copy_" and source.is_mixed
    is_whole = any(tensor.numel() >= result.numel() for tensor in tensors[1:])
    return bool(source.parameters) and (is_moved or is_copied) and is_whole


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return sample(tensor, _ELEMENTS).to(torch.float32, copy=True)


def _storage(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], torch.Tensor)


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


_STEPS = 3  # steps after which it is not watched again

_CLIPS = re.compile(r"(_foreach_)?(clamp|norm|linalg_vector_norm|pow|square)(_max|_maximum|_min|_minimum)?_?")
"""Operations that read a gradient to clip it."""
_COPIES = ("cat", "stack", "clone", "_to_copy", "abs")  # their result is as large as what they read


class ScriptWatch:
    """The mode between forwards, and what listens in it."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.losses = LossWatch()
        self.copies = CopyWatch(state)
        self.in_step = False  # whether an optimizer's step is under way
        self._mode = every_operation(self._called, compiled=False)
        self._is_entered = False
        self._scaled: Owners[Any] = Owners()
        """Memory of the gradients with a loss scale in them, as the last backward left it, and of copies."""
        self._scaled_copies: set[Any] = set()  # stand for copies that still have the scale in them
        self._looked_after = 0  # backward passes that there had been when it was filled

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
            return False  # a script that is inside a mode of its own keeps both
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
        """Note that gradients with a loss scale in them are clipped, and those that the script unscales."""
        clips, times = _CLIPS.fullmatch(name), name.removeprefix("_foreach_") in ("mul_", "div_")
        if not clips and not times and name not in _COPIES:
            return
        if self._looked_after != self.state.passes:
            self._looked_after, self._scaled, self._scaled_copies = self.state.passes, Owners(), set()
            for parameter in self.state.scaled:
                if (gradient := parameter.gradient) is not None:
                    self._scaled.put(gradient, parameter)
        tensors = [each for each in _flat(args) if isinstance(each, torch.Tensor)]
        held = {owner for each in tensors for owner in self._scaled.all_of(each)}
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
        """Hand over what was seen, once the run is over."""
        self.copies.updates.record()
        self.state.process.events += [*self.losses.events(), *self.copies.events()]
