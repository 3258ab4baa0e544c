"""Forwards of a run that is watched: which module's is under way, and what its operations compute in.

[Note: once is enough] Operations are seen by a Python mode of torch's, through which each takes some 20
microseconds longer. What a call of a module computes in follows from what goes into it: so its operations are
watched until one call of its kind was watched to the end, and not again. Calls are of one kind if they are of
the same module, in the same state of training and autocast, and are given the same dtypes. All are of another
kind once names or dtypes of parameters change, or a gradient has arrived at a parameter that no operation was
seen to use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zerodrift.observer.adapter import Adapter
from zerodrift.observer.calls import computing, floating
from zerodrift.observer.guard import guarded
from zerodrift.observer.lines import is_from_script, line_of_script
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.operations import CASTS, anything_compiled, every_operation
from zerodrift.observer.owners import Owners
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches
from zerodrift.observer.seen import SeenProcess

Kind = tuple[Any, ...]
"""See [Note: once is enough]."""


class ForwardsWatcher(Protocol):
    """What a watcher does for them."""

    active: bool
    only: Any
    thread: int | None
    models: list[WatchedModel]
    adapters: tuple[Adapter, ...]
    memory: Owners[WatchedParameter]
    packed: list[list[WatchedParameter]]
    in_backward: int
    rested: bool
    patches: Patches
    process: SeenProcess

    def broken(self, error: Exception) -> None: ...
    def may_finish(self) -> None: ...
    def model_of(self, module: torch.nn.Module) -> WatchedModel: ...
    def forget(self) -> None: ...
    def remember(self) -> None: ...
    def hook(self, parameter: WatchedParameter, leaf: torch.Tensor) -> None: ...


class WatchedForwards:
    """Of modules whose forward a script called, and of all inside of them."""

    def __init__(self, watcher: ForwardsWatcher) -> None:
        self._watcher = watcher
        self._mode = every_operation(self._called, compiled=False)
        self._entered = -1
        """How many modules were under way when the mode was entered; -1 where it is not."""
        self._calls: list[tuple[torch.nn.Module, Kind]] = []
        self._known: set[Kind] = set()
        self._names: dict[Any, str] = {}
        """Operation -> its name, if it computes."""
        self._compiles = False
        """Whether torch compiles code here: such code goes other ways under a mode, so it is not watched."""
        self.under_way = False
        """Whether it is a forward that trains, and no backward inside of one."""
        self.looked = False
        """Whether the parameters of the innermost module were looked at since another's forward or a
        collective: its own are where they were."""
        self._devices = _devices()

    def begin(self) -> None:
        patches = self._watcher.patches
        patches.undo(register_module_forward_pre_hook(self.begins).remove)
        patches.undo(register_module_forward_hook(self._ends, always_call=True).remove)
        patches.replace(torch, "compile", self._compiled)

    def leave(self) -> None:
        """Whatever is under way is not watched to its end."""
        if self._entered >= 0 and threading.get_ident() == self._watcher.thread:
            self._mode.__exit__(None, None, None)
        self._entered, self.under_way = -1, False
        self._calls.clear()

    def look_closely(self) -> None:
        """What was known of calls may be so no more."""
        self._known.clear()

    # --- modules --------------------------------------------------------------------------------------

    @guarded
    def begins(self, module: torch.nn.Module, args: Any) -> None:
        watcher, calls = self._watcher, self._calls
        if threading.get_ident() != watcher.thread and not self._is_first_thread():
            return
        if calls and calls[0][0] is module and self.under_way:
            self.leave()  # torch calls no hook for an interrupt that the script has caught
        if not calls:
            trains = torch.is_grad_enabled() and not watcher.in_backward
            if trains:
                watcher.may_finish()
            if not watcher.active or any(adapter.claims(module) for adapter in watcher.adapters):
                return
            if trains:
                if watcher.only is not None and not _is_part(module, watcher.only):
                    return
                self._root_begins(module)
        kind: Kind = ()
        if self.under_way and not self._compiles:
            kind = self._kind(module, args)
            if self._entered < 0 and kind not in self._known:
                watcher.remember()
                self._mode.__enter__()
                self._entered = len(calls)
        calls.append((module, kind))
        self.looked = False

    def _ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls
        if not calls or calls[-1][0] is not module or threading.get_ident() != self._watcher.thread:
            return
        _, kind = calls.pop()
        self.looked = False
        if self._entered >= 0:
            if kind and sys.exc_info()[0] is None:
                self._known.add(kind)
            if self._entered == len(calls):
                self._entered = -1
                self._mode.__exit__(None, None, None)
        elif self.under_way and any(model.has_others(module) for model in self._watcher.models):
            self._look_after(module)
        if not calls:
            self.under_way = False

    def _root_begins(self, module: torch.nn.Module) -> None:
        watcher = self._watcher
        model = watcher.model_of(module)
        if model.look():
            watcher.forget()
            self.look_closely()
        if any(parameter.is_used_unseen for parameter in model.parameters):
            self.look_closely()
        if model.compiled or anything_compiled() or self._compiles:
            self._compiles = True
            self._say(
                "Code is compiled by torch.compile, which goes other ways where operations are watched: "
                "compute is not seen. Run it with TORCH_COMPILE_DISABLE=1 to see it."
            )
        self.under_way = watcher.rested = True

    def _kind(self, module: torch.nn.Module, args: Any) -> Kind:
        """See [Note: once is enough]."""
        kind: list[Any] = [id(module), module.training]
        for device in self._devices:
            kind.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for arg in args:
            kind.append(arg.dtype if isinstance(arg, torch.Tensor) else None)
        return tuple(kind)

    def _is_first_thread(self) -> bool:
        """Whether no other has run a forward."""
        if self._watcher.thread is None and torch.is_grad_enabled():
            self._watcher.thread = threading.get_ident()
            return True
        if torch.is_grad_enabled():
            self._say("Modules run on several threads: those of the first are seen.")
        return False

    def _compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Libraries decorate functions with it that may never run; what has run is asked for by itself.
        self._compiles |= is_from_script()
        return original(*args, **kwargs)

    def _say(self, note: str) -> None:
        notes = self._watcher.process.notes
        if note not in notes:
            notes.append(note)

    # --- operations -----------------------------------------------------------------------------------

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = computing(func)
        if name and self.under_way and not self._watcher.packed:  # else a library packs and unpacks
            self._computed(name, args, kwargs, out)

    @guarded
    def _computed(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        """An operation of a forward that is no view."""
        if not self.looked:
            self._look_at(self._calls[-1][0])
        memory = self._watcher.memory
        for tensor in floating(args, kwargs):
            parameter = memory.of(tensor)
            if parameter is None:
                continue
            if operation in CASTS:
                memory.put(out, parameter)
            elif tensor.dtype not in parameter.computed_in:
                self._see_compute(parameter, tensor.dtype, operation)

    def _look_at(self, module: torch.nn.Module) -> None:
        """A library may have put other tensors in the place of a module's parameters for its forward."""
        self.looked = True
        for parameter, tensor in self._held(module):
            moved = self._watcher.memory.put(tensor, parameter)
            if parameter.is_computed_with(tensor) or moved:
                self._watcher.hook(parameter, tensor)

    @guarded
    def _look_after(self, module: torch.nn.Module) -> None:
        """The same after a call that was not watched: only what is new."""
        for parameter, tensor in self._held(module):
            dtype = parameter.computed_with
            if parameter.is_computed_with(tensor):
                self._watcher.memory.put(tensor, parameter)
                self._watcher.hook(parameter, tensor)
                if parameter.computed_with is not dtype:
                    self.look_closely()

    def _held(self, module: torch.nn.Module) -> Iterator[tuple[WatchedParameter, torch.Tensor]]:
        for model in self._watcher.models:
            yield from model.held(module)

    def _see_compute(self, parameter: WatchedParameter, dtype: torch.dtype, operation: str) -> None:
        parameter.computed_in.add(dtype)
        module = self._calls[-1][0]
        path = next((model.path(module) for model in self._watcher.models if model.has(module)), "")
        parameter.seen.see("compute", word(dtype), operation, path, line_of_script)


def _devices() -> tuple[str, ...]:
    """Whose autocast may be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _is_part(module: torch.nn.Module, whole: Any) -> bool:
    """Whether a module is in the other, or the other way around."""
    modules = whole.modules() if isinstance(whole, torch.nn.Module) else ()
    return any(module is part for part in modules) or any(whole is part for part in module.modules())
