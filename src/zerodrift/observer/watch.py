"""Watches whatever model trains in this process, with whatever library, and writes down what it saw.

Everything hangs on doors that every library goes through: forwards of modules, the dispatcher below autograd
and autocast, gradients that arrive at leaves, steps of torch's optimizers. What a library packs into buffers
of its own is unpacked by its `Adapter` in `libraries`.

A cell is seen where it is a tensor or a call:

    storage     a parameter between steps
    gather      collectives that carry parameters
    compute     what enters the first operation that is no view and no cast, in a forward
    grad        what arrives at the leaf
    accumulate  what a gradient is added to, and what the optimizer is given
    reduce      collectives that carry gradients
    master      the tensor that the optimizer updates
    state       the tensors that it keeps of each
    export      tensors in files that were written

Invariant: watching changes no value, and leaves nothing behind when it ends.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerodrift.observer.adapter import Adapter, OptimizedPart
from zerodrift.observer.calls import SENDING, floating, kind_of, moments, optimized
from zerodrift.observer.collectives import WatchedCollectives
from zerodrift.observer.files import Exports
from zerodrift.observer.lines import is_from_script, line_of_script
from zerodrift.observer.loss_scale import WatchedScale
from zerodrift.observer.models import WatchedModel
from zerodrift.observer.observed import name as word
from zerodrift.observer.operations import CASTS, anything_compiled, every_operation
from zerodrift.observer.owners import Owners, local
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.patches import Patches
from zerodrift.observer.seen import SeenProcess

TRIED = ("2.13", "2.15")
"""Versions of torch."""

Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")


def _guarded(method: Method) -> Method:
    """A defect of ours ends the watching, and nothing else."""

    @functools.wraps(method)
    def call(watcher: Watcher, *args: Any) -> Any:
        if watcher.active:
            try:
                return method(watcher, *args)
            except Exception as error:
                watcher.broken(error)
        return None

    return cast(Method, call)


class Watcher:
    """The hooks on torch in this process. One at a time."""

    def __init__(
        self,
        steps: int,
        finished: Callable[[SeenProcess], None],
        adapters: Iterable[Adapter] = (),
        files_after: bool = False,
    ) -> None:
        """`files_after`: see the files that are written after these steps too, until `files_end`."""
        self.models: list[WatchedModel] = []
        self.patches = Patches()
        self.process = SeenProcess(rank=0, world=1, steps=0, models=[])
        self.memory: Owners[WatchedParameter] = Owners()
        self.gradients: Owners[WatchedParameter] = Owners()
        self.packed: list[list[WatchedParameter]] = []
        """Whose collectives these are, as an adapter says; the innermost last."""
        self._steps, self._finished = steps, finished
        self._files_after, self.ended = files_after, False
        self.adapters = tuple(adapters)
        self._mode = every_operation(self._called, compiled=False)
        self._compiles = False
        """Whether torch compiles code here: such code goes other ways under a mode, so it is not watched."""
        self._kinds: dict[Any, tuple[bool, bool, str]] = {}
        """Operation -> whether it computes, whether it sends, its name."""
        self._parts: dict[int, tuple[weakref.ref[torch.Tensor], Sequence[OptimizedPart]]] = {}
        """By the id of a tensor that an optimizer updates."""
        self._looked = False
        """Whether the parameters of the innermost module were looked at since another's forward or a
        collective: its own are where they were."""
        self._several = False
        """Whether there are other ranks."""
        self._in_forward = False
        self._depth = 0
        self._entered = False
        self._calls: list[torch.nn.Module] = []
        self.thread = threading.get_ident()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The backward passes there had been at its last step."""
        self._backwards = 0
        self._settled = 0
        """Steps that there had been when a backward last began."""
        self.in_backward = 0
        self._collectives = WatchedCollectives(self)
        self._exports = Exports()
        self.active = False
        self.only: Any = None
        """The module or the engine to watch; None for all."""

    # --- its life -------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.active = True
        handles = (
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ends, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        )
        for handle in handles:
            self.patches.undo(handle.remove)
        patch = self.patches.replace
        patch(torch.autograd, "backward", self._watched_backward)
        patch(torch.autograd, "grad", self._watched_backward)
        patch(torch.optim.Optimizer, "__init__", self._watched_init)
        patch(torch, "compile", self._watched_compile)
        WatchedScale(self).begin()
        if torch.distributed.is_available():
            for name in SENDING:
                for module in (torch.distributed, torch.distributed.distributed_c10d):
                    patch(module, name, self._watched_send)
        self._exports.begin()
        for adapter in self.adapters:
            adapter.begin(self)

    def end(self) -> None:
        """Remove every hook."""
        self._exports.end()
        if self.active:
            self.active = False
            self.patches.restore()

    def files_end(self) -> None:
        """Hand over once more what was seen, with the files that were written since."""
        if self._files_after and self.ended:
            self._exports.see(self.models)
            self._exports.end()
            self._finished(self.process)

    def finish(self, ended: str) -> None:
        """Look at what rests, end, and hand over what was seen."""
        broken = self.process.ended == "broken"
        if not self.active and not broken:
            return
        self.active = False
        try:
            if not broken:
                self._settle()
                self._rest()
        except Exception as error:
            self.broken(error)
        finally:
            while self._depth:
                self._leave()
            self.patches.restore()
        process = self.process
        if process.ended != "broken":
            process.ended = ended
        self._see_place()
        process.libraries = _versions()
        if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
            process.notes.append(
                f"torch {torch.__version__} is not among those that were tried ({', '.join(TRIED)}): what it "
                "does elsewhere than they do may be missing."
            )
        for name, times in sorted(self._collectives.unknown.items()):
            process.notes.append(
                f"{times} {name} in the observed steps carried what no adapter could tell the parameters of."
            )
        self._exports.see(self.models)
        if not self._files_after:
            self._exports.end()
        self.ended = True
        process.models = [model.seen(self.process.world) for model in self.models]
        process.models += [model for adapter in self.adapters for model in adapter.models()]
        self._finished(process)

    def safely(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """Call while the run is watched; where that fails, the run goes on without."""
        if not self.active:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.broken(error)
            return otherwise

    def broken(self, error: Exception) -> None:
        """Stop watching: what was seen is told, and that the rest was not."""
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.process.notes.append(
            f"The observer stopped, a defect of zerodrift's: {type(error).__name__}: {error} "
            f"({where.name}, line {where.lineno} of {where.filename.rpartition('/')[2]})."
        )
        self.active = False  # hooks stay, and do nothing: one of them may be running
        self.process.ended = "broken"

    def may_finish(self) -> None:
        """Finish where every step was seen: a forward begins that is of the next."""
        if self._all_stepped():
            self.finish("steps")

    def _all_stepped(self) -> bool:
        """Whether every optimizer that is in use has made its steps."""
        if not self._optimizers:
            return False
        counts = list(self._optimizers.values())
        if max(counts) >= 4 * self._steps:
            return True
        waiting = (
            any(self.resting(tensor) is not None for tensor in optimized(made))
            for made in self._made
            if made not in self._optimizers
        )
        return min(counts) >= self._steps and not any(waiting)

    # --- forwards -------------------------------------------------------------------------------------

    @_guarded
    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        if not self._calls and not self.in_backward and torch.is_grad_enabled():
            self.may_finish()
            if not self.active or any(adapter.claims(module) for adapter in self.adapters):
                return
            if self.only is not None and not _is_part(module, self.only):
                return
            self._root_begins(module)
        elif not self._calls and any(adapter.claims(module) for adapter in self.adapters):
            return
        self._calls.append(module)
        self._looked = False

    def _forward_ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._calls or self._calls[-1] is not module or threading.get_ident() != self.thread:
            return
        self._calls.pop()
        self._looked = False
        if not self._calls and self._in_forward:
            self._in_forward = False
            self._leave()

    def _root_begins(self, module: torch.nn.Module) -> None:
        model = self.model_of(module)
        if model.look(self.memory):
            self.forget_parts()
        self.memory.forget_freed()
        self.gradients.forget_freed()
        self._compiles |= model.compiled
        self._enter()
        self._in_forward = True

    def model_of(self, module: torch.nn.Module) -> WatchedModel:
        """The model that this module is, wraps, or is a part of."""
        for model in self.models:
            if model.has(module):
                return model
        made = WatchedModel(module)
        for model in self.models:
            if made.has(model.root):  # a wrapper around it, or what it is a part of
                model.become(made)
                self.forget_parts()
                return model
        self.models.append(made)
        return made

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1 and not self._may_compile():
            self._entered = True
            self._mode.__enter__()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._entered:
            self._entered = False
            self._mode.__exit__(None, None, None)

    def _may_compile(self) -> bool:
        if not self._compiles and not anything_compiled():
            return False
        note = (
            "Code is compiled by torch.compile, which goes other ways where operations are watched: compute, "
            "gather and reduce are not seen. Run it with TORCH_COMPILE_DISABLE=1 to see them."
        )
        if note not in self.process.notes:
            self.process.notes.append(note)
        return True

    def _watched_compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Libraries decorate functions with it that may never run; what has run is asked for by itself.
        self._compiles |= is_from_script()
        return original(*args, **kwargs)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any) -> None:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = kind_of(func)
        computes, sends, name = kind
        if computes:
            if self._in_forward and not self.packed:  # else a library packs and unpacks
                self._computed(name, args, kwargs, out)
        elif sends:
            self._looked = False
            self._sent(name, args)

    @_guarded
    def _computed(self, operation: str, args: Any, kwargs: Any, out: Any) -> None:
        """An operation of a forward that is no view."""
        if not self._looked:
            self._look_at(self._calls[-1])
        for tensor in floating(args, kwargs):
            parameter = self.memory.of(tensor)
            if parameter is None:
                continue
            if operation in CASTS:
                self.memory.put(out, parameter)
            elif tensor.dtype not in parameter.computed_in:
                self._see_compute(parameter, tensor.dtype, operation)

    def _look_at(self, module: torch.nn.Module) -> None:
        """A library may have put other tensors in the place of a module's parameters for its forward."""
        self._looked = True
        for model in self.models:
            model.look_at(module, self.memory, self._hook)

    def _see_compute(self, parameter: WatchedParameter, dtype: torch.dtype, operation: str) -> None:
        parameter.computed_in.add(dtype)
        module = self._calls[-1]
        path = next((model.path(module) for model in self.models if model.has(module)), "")
        parameter.seen.see("compute", word(dtype), operation, path, line_of_script)

    # --- gradients ------------------------------------------------------------------------------------

    def _hook(self, parameter: WatchedParameter, leaf: torch.Tensor) -> None:
        """See gradients arrive at a leaf. The tensor that a module computes with may not be the one that
        rests in it."""
        if not leaf.requires_grad or not leaf.is_leaf or getattr(leaf, "_zerodrift_watched", False):
            return
        if hasattr(leaf, "_shard_param_infos"):
            return  # FSDP's adapter sees the gradients of what is packed in it
        leaf._zerodrift_watched = True  # type: ignore[attr-defined]
        holder = weakref.ref(leaf)

        def arrives(gradient: torch.Tensor) -> None:
            self._arrives(parameter, holder(), gradient)

        def accumulated(tensor: torch.Tensor) -> None:
            if self._several:
                self._accumulated(parameter, tensor.grad)

        def forget() -> None:
            tensor = holder()
            if tensor is not None:
                del tensor._zerodrift_watched  # type: ignore[attr-defined]

        self.patches.undo(leaf.register_hook(arrives).remove)
        self.patches.undo(leaf.register_post_accumulate_grad_hook(accumulated).remove)
        self.patches.undo(forget)

    @_guarded
    def _arrives(
        self, parameter: WatchedParameter, leaf: torch.Tensor | None, gradient: torch.Tensor
    ) -> None:
        parameter.arrives(gradient, self._several)
        held = None if leaf is None else leaf.grad
        if held is None or parameter.seen.has("accumulate", word(held.dtype)):
            return
        if local(held).any():  # and not zeros, as DeepSpeed's BF16_Optimizer leaves them
            parameter.seen.see("accumulate", word(held.dtype), ".grad", "", line_of_script)

    @_guarded
    def _accumulated(self, parameter: WatchedParameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self.gradients.put(gradient, parameter)

    def _watched_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.active or threading.get_ident() != self.thread:
            return original(*args, **kwargs)
        self._backward_begins()
        self.in_backward += 1
        forward, self._in_forward = self._in_forward, False
        # Of operations of a backward, only collectives say anything.
        sends = torch.distributed.is_available() and torch.distributed.is_initialized()
        try:
            with self.watching() if sends else contextlib.nullcontext():
                return original(*args, **kwargs)
        finally:
            self._in_forward = forward
            self.in_backward -= 1

    @_guarded
    def _backward_begins(self) -> None:
        if not self.in_backward:
            self._backwards += 1
            self._settle()
            self._see_place()
            for model in self.models:
                model.hook(self._hook)

    # --- collectives ---------------------------------------------------------------------------------

    def _watched_send(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.active or threading.get_ident() != self.thread:
            return original(*args, **kwargs)
        with self.watching():
            return original(*args, **kwargs)

    @_guarded
    def _sent(self, operation: str, args: Any) -> None:
        self._collectives.sent(operation, args)

    # --- the optimizer --------------------------------------------------------------------------------

    def _watched_init(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(optimizer, *args, **kwargs)
        if self.active:
            with contextlib.suppress(TypeError):
                self._made.add(optimizer)
        return out

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        """The parameters that an optimizer updates in a tensor."""
        known = self._parts.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        parts = self._find_parts(optimizer, tensor)
        if parts:
            self._parts[id(tensor)] = weakref.ref(tensor), parts
        return parts

    def forget_parts(self) -> None:
        """Names or packs are others than they were."""
        self._parts.clear()

    def _find_parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        for adapter in self.adapters:
            parts = adapter.parts(optimizer, tensor)
            if parts is not None:
                return parts
        parameter = self.resting(tensor)
        if parameter is not None:
            return (OptimizedPart(parameter, parameter.begin),)
        for model in self.models:
            parameter = model.copied(tensor)
            if parameter is not None:
                return (OptimizedPart(parameter),)
        return ()

    def resting(self, tensor: torch.Tensor) -> WatchedParameter | None:
        """The parameter that this tensor is."""
        for model in self.models:
            parameter = model.resting(tensor)
            if parameter is not None:
                return parameter
        return None

    @_guarded
    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for tensor in optimized(optimizer):
            gradient = tensor.grad
            for part in self.parts(optimizer, tensor):
                part.parameter.optimized = True
                self._see_master(part, tensor)
                if gradient is not None:
                    if part.sums:
                        dtype = word(gradient.dtype)
                        part.parameter.seen.see("accumulate", dtype, ".grad", "", line_of_script)
                    if self._several or not part.parameter.has_gradient:
                        part.parameter.used(local(gradient), part.begin, part.at, part.length)

    def _see_master(self, part: OptimizedPart, tensor: torch.Tensor) -> None:
        parameter = part.parameter
        if parameter.is_resting(tensor):
            parameter.seen.see("master", "same", "the parameter itself")
            return
        parameter.seen.see("master", word(tensor.dtype), "a tensor of the optimizer's own")
        parameter.began(local(tensor), part.at, part.length)

    @_guarded
    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name = type(optimizer).__name__
        for tensor in optimized(optimizer):
            state = optimizer.state.get(tensor) if hasattr(optimizer, "state") else None
            kept = moments(state, tensor)
            for part in self.parts(optimizer, tensor):
                for key, moment in kept:
                    part.parameter.seen.see("state", word(moment.dtype), f"{name} {key}")
                if not kept and local(tensor).numel():
                    part.parameter.seen.unseen["state"] = f"{name} keeps none"
        since = self._backwards - self._stepped.get(optimizer, 0)
        if since:  # none for a group of a step that was counted, and for a step without gradients
            self._stepped[optimizer] = self._backwards
            self.has_stepped(optimizer, since)

    def has_stepped(self, optimizer: Any, micro_batches: int) -> None:
        """Count a step."""
        self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        self.process.steps = max(self._optimizers.values())
        self.process.micro_batches = micro_batches
        self._see_place()

    def event(self, kind: str, line: str, **rest: Any) -> None:
        """Something happened that a finding is made of; once per line."""
        event = {"kind": kind, "line": line, **rest}
        if event not in self.process.events:
            self.process.events.append(event)

    def _settle(self) -> None:
        """A step may be over: what its optimizer was given belongs to what had arrived."""
        since, self._settled = self.process.steps > self._settled, self.process.steps
        for model in self.models:
            model.stepped(since)

    def _see_place(self) -> None:
        """The rank and the world, before a program leaves them."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.process.rank = torch.distributed.get_rank()
            self.process.world = torch.distributed.get_world_size()
        self._several = self.process.world > 1

    # --- between steps --------------------------------------------------------------------------------

    def _rest(self) -> None:
        for model in self.models:
            model.look(self.memory)


def _is_part(module: torch.nn.Module, whole: Any) -> bool:
    """Whether a module is in the other, or the other way around."""
    modules = whole.modules() if isinstance(whole, torch.nn.Module) else ()
    return any(module is part for part in modules) or any(whole is part for part in module.modules())


_LIBRARIES = (
    *("torch", "deepspeed", "accelerate", "transformers", "lightning", "pytorch_lightning", "zerodrift"),
)


def _versions() -> dict[str, str]:
    versions = {}
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", "unknown"))
    return versions
