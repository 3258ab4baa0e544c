"""Watch gradients: those that arrive at leaves, the collectives that carry them, and their clipping.

Whoever issues a collective, torch's Python or its C++, goes through its dispatcher. Kernels of ours see it
there, at a key where torch has none, and hand it on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerodrift.inspect.trace.operations import floating
from zerodrift.inspect.trace.parameter import PLAIN, LiveParameter, local
from zerodrift.inspect.trace.places import line_of_script
from zerodrift.inspect.trace.records import Column, dtype_name
from zerodrift.inspect.trace.script.watch import ScriptWatch
from zerodrift.inspect.trace.state import WatchState, guarded


class GradientWatch:
    """Hooks on leaves: tensors that modules compute with, and parameters that rest."""

    def __init__(self, state: WatchState, script: ScriptWatch) -> None:
        self.state = state
        self._script = script

    def begin(self) -> None:
        replace = self.state.patches.replace
        for name in ("backward", "grad"):
            replace(torch.autograd, name, self._backward)
        is_scaled, state = False, self.state

        def clips(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if state.active and is_scaled and threading.get_ident() == state.thread:
                state.event("clipped_scaled", line_of_script())
            return original(*args, **kwargs)

        def scales(original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_scaled
            is_scaled = original.__name__ == "scale" and bool(scaler.is_enabled())
            return original(scaler, *args, **kwargs)

        for name in ("clip_grad_norm_", "clip_grad_value_"):
            for module in (torch.nn.utils, torch.nn.utils.clip_grad):
                replace(module, name, clips)
        for name in ("scale", "unscale_", "update"):
            replace(torch.amp.GradScaler, name, scales)
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            replace(torch.nn.parallel.DistributedDataParallel, name, self._registers_hook)

    def _registers_hook(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = self.state
        if state.active:
            hook = kwargs.get("hook", kwargs.get("comm_hook_type", args[-1] if args else None))
            name = getattr(hook, "__qualname__", "") or str(hook).rpartition(".")[2]
            state.event("communication-hook", line_of_script(), name=name)
        return original(*args, **kwargs)

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
            if was_on:
                state.safely(self._script.enter, None)

    @guarded
    def _begins(self, losses: Any) -> None:
        state = self.state
        self._script.losses.reaches(losses)
        state.passes += 1
        state.gradient_memory.forget_freed()
        state.settle()  # the step before is over, if its optimizer was given the gradients that had arrived
        state.see_place()
        for model in state.models:
            for parameter in model.parameters:
                tensor = parameter.tensor()
                if parameter.record.trained and not parameter.is_hooked and tensor is not None:
                    self.hook(parameter, tensor)
                    parameter.is_hooked = tensor.requires_grad

    def hook(self, parameter: LiveParameter, leaf: torch.Tensor) -> None:
        """See gradients arrive at a leaf: the tensor that rests, or another that a module computes with."""
        if not leaf.requires_grad or not leaf.is_leaf or getattr(leaf, "_zerodrift_watched", False):
            return
        if hasattr(leaf, "_shard_param_infos"):
            return  # FSDP's adapter sees the gradients of the parameters that are packed in it
        leaf._zerodrift_watched = True  # type: ignore[attr-defined]
        holder, state = weakref.ref(leaf), self.state

        def accumulated(tensor: torch.Tensor) -> None:
            gradient = tensor.grad
            if state.several and gradient is not None and not torch.compiler.is_compiling():
                state.safely(lambda: state.gradient_memory.put(gradient, parameter), False)

        def forget() -> None:
            tensor: Any = holder()
            if tensor is not None:
                del tensor._zerodrift_watched

        state.patches.undo(leaf.register_hook(lambda g: self._arrives(parameter, g, holder())).remove)
        state.patches.undo(leaf.register_post_accumulate_grad_hook(accumulated).remove)
        state.patches.undo(forget)

    @guarded
    def _arrives(self, parameter: LiveParameter, gradient: torch.Tensor, leaf: torch.Tensor | None) -> None:
        parameter.arrives(gradient, self.state.several)
        held, record = None if leaf is None else leaf.grad, parameter.record
        if held is None or record.has("accumulate", dtype_name(held.dtype)):
            return
        if local(held).any():  # zeros are no sum: DeepSpeed's BF16_Optimizer leaves them
            record.add("accumulate", dtype_name(held.dtype), ".grad", "", line_of_script)


_KEY = "ADInplaceOrView"  # of the dispatcher, between autograd and the backends

_FIRST_SENT = frozenset(("allreduce_", "allreduce_coalesced_", "reduce_"))
_FIRST_SENT |= {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"}
_SECOND_SENT = frozenset(("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_"))
_SECOND_SENT |= {"_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"}
"""Collectives of c10d by the argument that they send."""

_LEAST_PACKED = 64  # elements that may be of parameters; norms, losses and flags are fewer


class CollectiveWatch:
    """Attributes a collective by the memory of its tensor, by DDP's buckets, or by a library's adapter."""

    def __init__(self, state: WatchState) -> None:
        self.state = state
        self.unknown: dict[str, int] = {}  # counts of reductions and gathers whose parameters nobody knows

    def begin(self) -> None:
        for namespace in ("c10d", "_c10d_functional"):
            operations = getattr(torch.ops, namespace)
            library = torch.library.Library(namespace, "IMPL")
            self.state.patches.undo(library._destroy)
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
        for tensor in floating((args[operation in _SECOND_SENT],), None, also_bytes="gather" in name):
            if type(tensor) not in PLAIN or torch._is_functional_tensor(tensor):
                continue  # one without values, of code that is being compiled
            for parameter in self._carried(column, tensor):
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
        if tensor.numel() < 2 or not state.models:
            return ()
        if column == "reduce" and state.in_backward:
            # DDP's parameters of a bucket's dtype, or all of them if a hook cast the bucket.
            trained = self._replicated()
            if trained:
                return [p for p in trained if p.record.has("grad", dtype_name(tensor.dtype))] or trained
        for adapter in state.adapters:
            carried = adapter.carried(column, tensor)
            if carried:
                return carried
        if tensor.dtype.is_floating_point and tensor.numel() >= _LEAST_PACKED:
            name = "reductions" if column == "reduce" else "gathers"
            self.unknown[name] = self.unknown.get(name, 0) + 1
        return ()
