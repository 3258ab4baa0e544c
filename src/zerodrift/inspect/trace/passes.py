"""Watch forwards and backwards: the dtypes that operations compute in, gradients at leaves and their
clipping, and collectives, which kernels in torch's dispatcher see whichever library issues them.

[Note: once is enough] Operations are seen by a Python mode of torch's, through which each takes some 20
microseconds longer. The dtypes of a module's call follow from its inputs: so its operations are watched until
one call of its kind was watched to the end. Calls are of one kind if they are of the same module, in the same
state of training and autocast, and are given the same dtypes. Every call is watched anew once names or dtypes
of parameters change, or a gradient has arrived at a parameter that no operation was seen to use.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from zerodrift.inspect.trace import operations
from zerodrift.inspect.trace.model import LiveModel, is_compiled
from zerodrift.inspect.trace.operations import floating, is_from_script, line_of_script
from zerodrift.inspect.trace.parameter import PLAIN, LiveParameter, local, sample
from zerodrift.inspect.trace.records import Column, dtype_name
from zerodrift.inspect.trace.script import ScriptWatch
from zerodrift.inspect.trace.state import WatchState, guarded
from zerodrift.inspect.trace.values import is_product

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
        """Whether torch compiles code here: it would run differently under a mode, and is not watched."""
        self._is_training = False  # whether the forward under way trains, and no backward inside of it runs
        accelerator = torch.accelerator.current_accelerator()
        self._devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
        """Devices whose autocast may be on."""
        state.patches.callback(register_module_forward_pre_hook(self.begins).remove)
        state.patches.callback(register_module_forward_hook(self._ends, always_call=True).remove)
        state.before(torch, "compile", self._compiled)

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
            self._compiles |= operations.anything_compiled() or any(map(is_compiled, module.modules()))
            if trains:
                self._script.losses.given(args)
                self._root_begins(module)
        kind: CallKind = ()
        if (self._is_training or not torch.is_grad_enabled()) and not self._compiles:
            casts = [torch.is_autocast_enabled(d) and torch.get_autocast_dtype(d) for d in self._devices]
            dtypes = [arg.dtype if isinstance(arg, torch.Tensor) else None for arg in args]
            kind = (id(module), module.training, self._is_training, *casts, *dtypes)
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
            if not self._compiles:
                state.safely(self._script.enter, None)

    def _is_part(self, module: torch.nn.Module) -> bool:
        only = self.state.only
        modules = only.modules() if isinstance(only, torch.nn.Module) else ()
        return any(module is part for part in modules) or any(only is part for part in module.modules())

    def _root_begins(self, module: torch.nn.Module) -> None:
        state = self.state
        self._script.copies.end_step()
        model = state.model_of(module)
        changed = model.look()
        if changed:
            state.forget_parts()
        if changed or any(parameter.is_used_unseen for parameter in model.parameters):
            self._known.clear()
        if self._compiles:
            state.note(operations.COMPILED)
        else:
            self._gradients.hook_modules(model)
        self._is_training = state.rested = True

    def _is_first_thread(self) -> bool:
        """Return True if no other thread has trained, nor run a forward before on the main thread."""
        state, is_main = self.state, threading.current_thread() is threading.main_thread()
        if not torch.is_grad_enabled() and not (is_main and state.thread is None):
            return False
        if not state.models:
            state.thread = threading.get_ident()
            return True
        self.state.note("Modules run on several threads: only the first thread is watched.")
        return False

    def _compiled(self, *args: Any, **kwargs: Any) -> None:
        # Libraries decorate functions that may never run; `anything_compiled` knows whether any did.
        self._compiles |= is_from_script()

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        if self.state.packed:  # a library packs and unpacks
            return
        if name := operations.computing(func):
            self._computed(name, args, kwargs, out)
        is_inside = self._is_training and not torch.is_grad_enabled()  # as where an average is updated
        if is_inside and func.namespace == "aten":
            self._script.copies.computed(operations.name_of(func), args, kwargs, out, False)

    @guarded
    def _computed(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        state = self.state
        if self._is_training and not state.looked:
            state.looked = True
            self._look(self._calls[-1][0], is_watched=True)
        module, tensors = self._calls[-1][0], floating(args, kwargs)
        path = next((model.paths[id(module)] for model in state.models if id(module) in model.paths), "")
        owners = (state.memory.of(tensor) for tensor in tensors if is_product(operation))
        weight = next((owner.record.name for owner in owners if owner is not None), None)
        home = path if weight is None else weight.rpartition(".")[0]
        self._script.losses.computed(operation, args, kwargs, out, home)
        for tensor in tensors if self._is_training else ():  # of a reference, the values alone are followed
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


class GradientWatch:
    """Hooks on leaves: the tensors that modules compute with, and parameters between steps."""

    def __init__(self, state: WatchState, script: ScriptWatch) -> None:
        self.state = state
        self._script = script
        self._hooked = WeakTensorKeyDictionary()  # leaves that are hooked on
        self._events: dict[tuple[torch.nn.Module, str], dict[str, Any]] = {}
        """Module and kind of its backward hooks -> an event with gradients before and after them."""
        for name in ("backward", "grad"):
            state.patches.replace(torch.autograd, name, self._backward)

        def scales(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if scaler.is_enabled():
                self._script.losses.scales()
                state.is_scaled = True  # until the next backward has ended

        state.before(torch.amp.GradScaler, "scale", scales)

        def updates(scaler: Any, *args: Any, **kwargs: Any) -> None:
            state.scaled.clear()
            state.skipped += scaler.is_enabled()

        state.before(torch.amp.GradScaler, "update", updates)
        state.before(torch.amp.GradScaler, "unscale_", lambda *args, **kwargs: state.scaled.clear())
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            state.before(torch.nn.parallel.DistributedDataParallel, name, self._registers_hook)

    def _registers_hook(self, *args: Any, **kwargs: Any) -> None:
        hook = kwargs.get("hook", kwargs.get("comm_hook_type", args[-1] if args else None))
        name = getattr(hook, "__qualname__", "") or str(hook).rpartition(".")[2]
        self.state.event("communication-hook", line_of_script(), name=name)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if not state.active or threading.get_ident() != state.thread:
            return original(*args, **kwargs)
        if not state.in_backward:
            self._begins(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        was_on = self._script.leave()
        state.in_backward += 1
        try:
            return original(*args, **kwargs)
        finally:
            state.in_backward -= 1
            state.is_scaled &= state.in_backward > 0
            if was_on:
                state.safely(self._script.enter, None)

    @guarded
    def _begins(self, losses: Any) -> None:
        state = self.state
        self._script.losses.reaches(losses)
        state.passes += 1
        state.settle()  # the step before is over, if its optimizer was given the gradients that had arrived
        state.see_place()
        for parameter in state.parameters():
            tensor = parameter.tensor()
            if parameter.record.trained and not parameter.is_hooked and tensor is not None:
                self.hook(parameter, tensor)
                parameter.is_hooked = tensor.requires_grad

    def hook(self, parameter: LiveParameter, leaf: torch.Tensor) -> None:
        """Record the gradients that arrive at a leaf, which may be another tensor than between steps."""
        if not leaf.requires_grad or not leaf.is_leaf or leaf in self._hooked:
            return
        if hasattr(leaf, "_shard_param_infos"):
            return  # FSDP's adapter sees the gradients of the parameters that are packed in it
        self._hooked[leaf] = True
        holder, state = weakref.ref(leaf), self.state

        def accumulated(tensor: torch.Tensor) -> None:
            gradient = tensor.grad
            if state.several and gradient is not None and not torch.compiler.is_compiling():
                state.safely(lambda: state.gradient_memory.put(gradient, parameter), False)

        handle = leaf.register_hook(lambda gradient: self._arrives(parameter, gradient, holder()))
        hooks: Any = leaf._backward_hooks  # before the script's hooks, which may round the gradient
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)  # torch calls them in the order of insertion
        state.patches.callback(handle.remove)
        state.patches.callback(leaf.register_post_accumulate_grad_hook(accumulated).remove)

    def hook_modules(self, model: LiveModel) -> None:
        """Sample gradients before and after the full backward hooks that a script has on its modules."""
        for module in model.root.modules():
            kinds: dict[str, Any] = {"full_backward_pre_hook": module._backward_pre_hooks}
            kinds |= {"full_backward_hook": module._backward_hooks} if module._is_full_backward_hook else {}
            for kind, hooks in kinds.items():
                if not hooks or (module, kind) in self._events:
                    continue
                event = self._events[module, kind] = {"kind": "backward-hook"}
                event["line"] = operations.line_of_function(next(iter(hooks.values())))
                event["module"] = model.paths.get(id(module), "")
                for key in ("given", "returned"):
                    event[key] = []
                    handle = getattr(module, f"register_{kind}")(functools.partial(self._passes, event[key]))
                    hooks.move_to_end(handle.id, last=key == "returned")
                    self.state.patches.callback(handle.remove)

    def _passes(self, samples: list[torch.Tensor], module: torch.nn.Module, gradients: Any, *_: Any) -> None:
        def take() -> None:
            picked = (sample(gradient, 64)[:64] for gradient in floating(gradients))
            samples.extend(elements.to(torch.float64, copy=True) for elements in picked)

        if len(samples) < 4:
            self.state.safely(take, None)

    def record(self) -> None:
        """Hand over what was sampled around hooks, once the run is over."""
        for event in self._events.values():
            for key in ("given", "returned"):
                event[key] = [value for each in event[key] for value in each.tolist()]
            self.state.process.events.append(event)

    @guarded
    def _arrives(self, parameter: LiveParameter, gradient: torch.Tensor, leaf: torch.Tensor | None) -> None:
        self.state.arrives(parameter, gradient, self.state.several or not parameter.has_gradient)
        held, record = None if leaf is None else leaf.grad, parameter.record
        if held is None or record.has("accumulate", dtype_name(held.dtype)):
            return
        if local(held).any():  # zeros are no sum: DeepSpeed's BF16_Optimizer leaves them
            record.add("accumulate", dtype_name(held.dtype), ".grad", "", line_of_script)


_KEY = "ADInplaceOrView"  # of the dispatcher, between autograd and the backends

_FIRST_SENT = frozenset(("allreduce_", "allreduce_coalesced_", "reduce_", "send"))
_FIRST_SENT |= {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}
_SECOND_SENT = frozenset(("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"))
_SECOND_SENT |= {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
"""Collectives of c10d, by the place of the argument that they send."""

_LEAST_SENT = 64  # elements of activations; norms, losses and flags have fewer


class CollectiveWatch:
    """Attributes a collective by the memory of its tensor, by DDP's buckets, or by a library's adapter."""

    def __init__(self, state: WatchState, script: ScriptWatch) -> None:
        self.state = state
        self._script = script
        for namespace in ("c10d", "_c10d_functional") if torch.distributed.is_available() else ():
            operations = getattr(torch.ops, namespace)
            library = torch.library.Library(namespace, "IMPL")
            state.patches.callback(library._destroy)
            for name in _FIRST_SENT | _SECOND_SENT:
                if hasattr(operations, name):
                    operation = getattr(operations, name).default
                    library.impl(operation, self._kernel(name, operation), _KEY)

    def _kernel(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        state = self.state

        def issued(*args: Any, **kwargs: Any) -> Any:
            if state.in_backward or threading.get_ident() == state.thread:
                self._sent(name, args)
            with torch._C._AutoDispatchBelowADInplaceOrView():
                return operation(*args, **kwargs)

        return issued

    @guarded
    def _sent(self, operation: str, args: Any) -> None:
        self.state.looked = False  # a collective may have put parameters elsewhere
        column: Column = "reduce" if "reduce" in operation else "gather"
        reduction = "reduce_scatter" if "scatter" in operation else "all_reduce"
        name = "all_gather" if column == "gather" else reduction
        if column == "gather" and self.state.in_backward and not self.state.packed and self._replicated():
            column = "reduce"  # a hook of DDP's that gathers what it has quantized
        for tensor in operations.tensors_of(args[operation in _SECOND_SENT]):
            if type(tensor) not in PLAIN or torch._is_functional_tensor(tensor):
                continue  # a tensor without values, in code that is being compiled
            is_packed = "gather" in name and tensor.dtype in (torch.uint8, torch.int8)
            if not is_packed and not tensor.is_floating_point():
                continue
            is_gradient = bool(not self.state.packed and self.state.gradient_memory.all_of(tensor))
            if operation == "send" and tensor.numel() >= _LEAST_SENT and not is_gradient:
                self.state.event("sent-to-a-rank", "")
            if column == "gather" and is_gradient:
                column = "reduce"  # by a script that adds what it gathers
            for parameter in self._carried(column, tensor) if operation != "send" else ():
                dtype = dtype_name(tensor.dtype)
                if column == "gather" and tensor.dtype is torch.uint8:
                    dtype = parameter.gather_dtype or dtype
                parameter.record.add(column, dtype, name, "", line_of_script)

    def _replicated(self) -> list[LiveParameter]:
        replicated = [m for m in self.state.models if "DistributedDataParallel" in m.wrappers]
        return [p for model in replicated for p in model.parameters if p.record.trained]

    def _carried(self, column: Column, tensor: torch.Tensor) -> Sequence[LiveParameter]:
        state = self.state
        if state.packed:
            return state.packed[-1]
        if column == "gather":
            state.remember()
        own = (state.gradient_memory if column == "reduce" else state.memory).all_of(tensor)
        if own:
            return own
        if not state.in_backward and (weights := self._script.copies.weights_of(tensor)):
            for parameter in weights if column == "reduce" else ():
                parameter.record.facts["averaged"] = True
            return list(weights) if column == "gather" else ()
        if tensor.numel() < 2 or not state.models:
            return ()
        if column == "reduce" and state.in_backward and (trained := self._replicated()):
            if operations.is_in_function():
                return ()
            # DDP's parameters of a bucket's dtype, or all of them if a hook cast the bucket.
            return [p for p in trained if p.record.has("grad", dtype_name(tensor.dtype))] or trained
        carried = (adapter.carried(column, tensor) for adapter in state.adapters)
        return next((parameters for parameters in carried if parameters), ())
