"""Watch forwards: which module's is under way, and the dtypes that its operations compute in.

[Note: once is enough] Operations are seen by a Python mode of torch's, through which each takes some 20
microseconds longer. The dtypes of a module's call follow from its inputs: so its operations are watched until
one call of its kind was watched to the end, and not again. Calls are of one kind if they are of the same
module, in the same state of training and autocast, and are given the same dtypes. All are of another kind
once names or dtypes of parameters change, or a gradient has arrived at a parameter that no operation was seen
to use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from zerodrift.inspect.trace import operations
from zerodrift.inspect.trace.gradients import GradientWatch
from zerodrift.inspect.trace.model import is_compiled
from zerodrift.inspect.trace.places import is_from_script, line_of_script
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.script.losses import is_product
from zerodrift.inspect.trace.script.watch import ScriptWatch
from zerodrift.inspect.trace.state import WatchState, guarded

CallKind = tuple[Any, ...]  # see [Note: once is enough]


class ForwardWatch:
    """Hooks on every module: the one whose forward a script called, and all inside of it."""

    def __init__(self, state: WatchState, gradients: GradientWatch, script: ScriptWatch) -> None:
        self.state = state
        self._gradients, self._script = gradients, script
        self._mode = operations.every_operation(self._called, compiled=False)
        self._entered = -1
        """Number of modules that were under way when the mode was entered; -1 outside of it."""
        self._calls: list[tuple[torch.nn.Module, CallKind]] = []
        self._known: set[CallKind] = set()
        self._compiles = False
        """Whether torch compiles code here, which takes other ways under a mode and is not watched."""
        self._is_training = False  # whether the forward under way trains, and no backward inside of it runs
        accelerator = torch.accelerator.current_accelerator()
        self._devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        """Devices whose autocast may be on."""

    def begin(self) -> None:
        patches = self.state.patches
        patches.undo(register_module_forward_pre_hook(self.begins).remove)
        patches.undo(register_module_forward_hook(self._ends, always_call=True).remove)
        patches.replace(torch, "compile", self._compiled)

    def leave(self) -> None:
        """Drop whatever is under way."""
        if self._entered >= 0 and threading.get_ident() == self.state.thread:
            self._mode.__exit__(None, None, None)
        self._entered, self._is_training = -1, False
        self._calls.clear()

    @guarded
    def begins(self, module: torch.nn.Module, args: Any) -> None:
        state, calls = self.state, self._calls
        if threading.get_ident() != state.thread and not self._is_first_thread():
            return
        if calls and calls[0][0] is module and self._is_training:
            self.leave()  # torch calls no hook for an interrupt that the script has caught
        if not calls:
            trains = torch.is_grad_enabled() and not state.in_backward
            if trains:
                state.may_finish()
            if not state.active or any(adapter.claims(module) for adapter in state.adapters):
                return
            if trains and state.only is not None and not self._is_part(module):
                return
            self._script.leave()
            if trains:
                self._root_begins(module)
        kind: CallKind = ()
        if self._is_training and not self._compiles:
            casts = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in self._devices]
            dtypes = [arg.dtype if isinstance(arg, torch.Tensor) else None for arg in args]
            kind = (id(module), module.training, *casts, *dtypes)
            if self._entered < 0 and kind not in self._known:
                state.remember()
                self._mode.__enter__()
                self._entered = len(calls)
        calls.append((module, kind))
        state.looked = False

    def _ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls, state = self._calls, self.state
        if not calls or calls[-1][0] is not module or threading.get_ident() != state.thread:
            return
        _, kind = calls.pop()
        state.looked = False
        if self._entered >= 0:
            if kind and sys.exc_info()[0] is None:
                self._known.add(kind)
            if self._entered == len(calls):
                self._entered = -1
                self._mode.__exit__(None, None, None)
        elif self._is_training:
            state.safely(lambda: self._look(module, is_watched=False), None)
        if not calls:
            self._is_training = False
            if state.models and not self._compiles:
                state.safely(self._script.enter, None)

    def _is_part(self, module: torch.nn.Module) -> bool:
        only = self.state.only
        modules = only.modules() if isinstance(only, torch.nn.Module) else ()
        return any(module is part for part in modules) or any(only is part for part in module.modules())

    def _root_begins(self, module: torch.nn.Module) -> None:
        state = self.state
        self._script.copies.rests()
        model = state.model_of(module)
        changed = model.look()
        if changed:
            state.optimized.clear()
        if changed or any(parameter.is_used_unseen for parameter in model.parameters):
            self._known.clear()
        if any(map(is_compiled, model.root.modules())) or operations.anything_compiled() or self._compiles:
            self._compiles = True
            state.note(
                "Code is compiled by torch.compile, which goes other ways where operations are watched: "
                "compute is not seen. Run it with TORCH_COMPILE_DISABLE=1 to see it."
            )
        self._is_training = state.rested = True

    def _is_first_thread(self) -> bool:
        """Return True if no other thread has run a forward."""
        if not torch.is_grad_enabled():
            return False
        if self.state.thread is None:
            self.state.thread = threading.get_ident()
            return True
        self.state.note("Modules run on several threads: those of the first are seen.")
        return False

    def _compiled(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Libraries decorate functions with it that may never run; `anything_compiled` knows what has run.
        self._compiles |= is_from_script()
        return original(*args, **kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if not self._is_training or self.state.packed:  # else a library packs and unpacks
            return
        if name := operations.computing(func):
            self._computed(name, args, kwargs, out)
        if not torch.is_grad_enabled() and func.namespace == "aten":  # as where an average is updated
            self._script.copies.computed(operations.name_of(func), args, kwargs, out, False)

    @guarded
    def _computed(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        state = self.state
        if not state.looked:
            state.looked = True
            self._look(self._calls[-1][0], is_watched=True)
        module, tensors = self._calls[-1][0], list(operations.floating(args, kwargs))
        path = next((path for model in state.models if (path := model.path(module)) is not None), "")
        owners = (state.memory.of(tensor) for tensor in tensors if is_product(operation))
        weight = next((owner.record.name for owner in owners if owner is not None), None)
        home = path if weight is None else weight.rpartition(".")[0]
        self._script.losses.computed(operation, args, kwargs, out, home)
        for tensor in tensors:
            parameter = state.memory.of(tensor)
            if parameter is None:
                continue
            if operation in operations.CASTS:
                state.memory.put(out, parameter)
            elif tensor.dtype not in parameter.computed_in:
                parameter.computed_in.add(tensor.dtype)
                dtype = dtype_name(tensor.dtype)
                parameter.record.add("compute", dtype, operation, path, line_of_script)

    def _look(self, module: torch.nn.Module, is_watched: bool) -> None:
        """Find a module's tensors, which a library may have replaced for its forward."""
        for model in self.state.models:
            for parameter, tensor in model.held(module):
                dtype = parameter.compute_dtype
                is_new = parameter.computes_with(tensor)
                if is_new or is_watched:
                    is_new |= self.state.memory.put(tensor, parameter)
                if is_new:
                    self._gradients.hook(parameter, tensor)
                    if not is_watched and parameter.compute_dtype is not dtype:
                        self._known.clear()
