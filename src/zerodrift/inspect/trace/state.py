"""The state that the parts of a watcher share, and the base class of the adapters for libraries.

Invariant: an error in the watcher ends the watching, and never the run.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from zerodrift.inspect.trace.model import LiveModel
from zerodrift.inspect.trace.parameter import LiveParameter, Owners, local
from zerodrift.inspect.trace.records import Column, ModelRecord, ProcessRecord
from zerodrift.startup import when_imported

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OptimizedPart:
    """Some elements of a parameter, in a tensor that an optimizer updates."""

    parameter: LiveParameter
    begin: int = 0  # flat index of the first element in the parameter
    at: int = 0  # flat index of the first element in the tensor
    length: int = -1  # elements; -1 for all of the tensor
    sums: bool = True  # whether micro-batches were added in the tensor's `.grad`, and not in another tensor


class Patches(contextlib.ExitStack):
    """Replaced attributes and other hooks, undone in reverse order when the stack closes."""

    def replace(self, holder: Any, name: str, watched: Callable[..., Any]) -> None:
        """Replace `holder.name` by a function that calls `watched(original, *args, **kwargs)`."""
        original = getattr(holder, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return watched(original, *args, **kwargs)

        own = name in vars(holder)
        setattr(holder, name, call)

        def restore() -> None:
            if getattr(holder, name, None) is call:
                if own:
                    setattr(holder, name, original)
                else:
                    delattr(holder, name)

        self.callback(restore)


class Adapter:
    """Finds the parameters in the tensors that one library packs. Most methods are optional."""

    def __init__(self, state: WatchState) -> None:
        """Hook on the library, now or when it is imported, before any model was seen."""
        self._state = state

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        """Return the parameters in a tensor of an optimizer; None for a tensor of another library."""
        return None

    def carried(self, column: Column, tensor: torch.Tensor) -> Sequence[LiveParameter]:
        """Return the parameters that a collective carries, for a tensor whose memory is no parameter's."""
        return ()

    def claims(self, module: torch.nn.Module) -> bool:
        """Return True if the adapter itself records the models of this module."""
        return False

    def models(self) -> Iterable[ModelRecord]:
        return ()


class WatchState:
    """Everything that is known of a run that is watched."""

    def __init__(self, only: Any, may_finish: Callable[[], None]) -> None:
        self.active = True
        self.only = only
        self.thread: int | None = None  # the thread whose calls are watched; None until one trains
        self.several = False
        self.models: list[LiveModel] = []
        self.patches = Patches()
        self.process = ProcessRecord(rank=0, world=1, steps=0, models=[])
        self.adapters: list[Adapter] = []
        self.may_finish = may_finish
        """Finishes if every step was seen; called before a forward that trains."""
        self.memory: Owners[LiveParameter] = Owners()
        self.gradient_memory: Owners[LiveParameter] = Owners()
        self.rested = False  # whether parameters may have moved since `memory` was filled
        self.looked = False  # whether the innermost module's parameters were found since they may have moved
        self.packed: list[list[LiveParameter]] = []
        """Stack of the library calls under way: the parameters of the collectives that each issues."""
        self.in_backward = 0
        self.passes = 0
        self.counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Engine, or first parameter of an optimizer, which a run may replace -> its steps."""
        self.skipped = 0  # times that a `GradScaler` was updated since the last step of an optimizer
        self.is_scaled = False  # whether a `GradScaler` scaled the loss of the backward under way
        self.scaled: set[LiveParameter] = set()  # parameters whose gradients have a loss scale in them
        self.optimized: dict[int, Any] = {}
        """The parts of each tensor that an optimizer updates, by the tensor's id."""
        self._settled = 0  # number of steps at the start of the last backward

    def safely(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Call while the run is watched; an error ends the watching."""
        if not self.active:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.broken(error)
            return otherwise

    def broken(self, error: Exception) -> None:
        """Stop watching, and note that the rest was not seen."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.name}, line {where.lineno} of {where.filename.rpartition('/')[2]}"
        defect = f"The observer stopped, by a defect of zerodrift: {type(error).__name__}: {error}"
        self.process.notes.append(f"{defect} ({place}).")
        self.active = False  # hooks stay, and do nothing: one of them may be running
        self.process.ended = "broken"

    def before(self, holder: Any, name: str, watched: Callable[..., Any]) -> None:
        """Call `watched` with the same arguments before each call of `holder.name`."""

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.safely(lambda: watched(*args, **kwargs), None)
            return original(*args, **kwargs)

        self.patches.replace(holder, name, call)

    def when_imported(self, name: str, call: Callable[[Any], None]) -> None:
        """Call with a library's module when it is imported. A note says if that fails."""

        def imported(module: Any) -> None:
            try:
                call(module)
            except Exception as error:
                unseen = f"{name} differs from the tested versions, and is not watched"
                why = f"{type(error).__name__}: {str(error).partition(' (')[0]}"
                self.note(f"{unseen} ({why}).")

        self.patches.callback(when_imported(name, imported))

    def note(self, text: str) -> None:
        if text not in self.process.notes:
            self.process.notes.append(text)

    def model_of(self, module: torch.nn.Module) -> LiveModel:
        """Return the model that this module is, wraps, or is a part of."""
        for model in self.models:
            if id(module) in model.paths:
                return model
        made = LiveModel(module)
        for model in self.models:
            if id(model.root) in made.paths:  # a wrapper around it, or a module that it is a part of
                model.root = made.root
                model.scan()
                self.forget_parts()
                return model
        self.models.append(made)
        return made

    def parameters(self) -> list[LiveParameter]:
        return [parameter for model in self.models for parameter in model.parameters]

    def forget_parts(self) -> None:
        """Find the parameters in the tensors of each optimizer again at its next step."""
        for updated in self.optimized.values():
            updated.is_stale = True

    def resting(self, tensor: torch.Tensor) -> LiveParameter | None:
        """Return the parameter that this tensor is."""
        found = (model.resting(tensor) for model in self.models)
        return next((parameter for parameter in found if parameter is not None), None)

    def remember(self) -> None:
        """Fill `memory` with the parameters' tensors, if parameters may have moved."""
        if self.rested:
            self.rested = False
            for parameter in self.parameters():
                tensor = parameter.tensor()
                if tensor is not None and local(tensor).numel():
                    self.memory.put(tensor, parameter)

    @contextlib.contextmanager
    def packing(self, members: Callable[[], list[LiveParameter]]) -> Iterator[None]:
        """Attribute the collectives inside the block to these parameters."""
        self.packed.append(self.safely(members, []))
        try:
            yield
        finally:
            self.packed.pop()

    def has_stepped(self, what: Any, micro_batches: int) -> None:
        """Count a step of a parameter or an engine."""
        self.counts[what] = self.counts.get(what, 0) + 1
        self.process.steps = max(self.counts.values())
        self.process.micro_batches = micro_batches
        self.see_place()

    def event(self, kind: str, line: str, **rest: str) -> None:
        event = {"kind": kind, "line": line, **rest}
        if event not in self.process.events:
            self.process.events.append(event)

    def arrives(self, parameter: LiveParameter, gradient: torch.Tensor, sample: bool) -> None:
        """Hand a gradient to its parameter, and note whether a loss scale is in it."""
        parameter.arrives(gradient, sample)
        if self.is_scaled:
            self.scaled.add(parameter)

    def settle(self) -> None:
        since, self._settled = self.process.steps > self._settled, self.process.steps
        for parameter in self.parameters():
            parameter.stepped(since)

    def see_place(self) -> None:
        """Record the rank and the world size, before a program leaves its group."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.process.rank = torch.distributed.get_rank()
            self.process.world = torch.distributed.get_world_size()
        self.several = self.process.world > 1


def guarded(method: Method) -> Method:
    """Make a watcher's method do nothing once the watching is over, or while code is being compiled."""

    @functools.wraps(method)
    def call(part: Any, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        state: WatchState = part.state
        return state.safely(lambda: method(part, *args), None)

    return cast(Method, call)
