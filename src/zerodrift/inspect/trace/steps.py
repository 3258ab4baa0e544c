"""Watch optimizer steps and saved files: masters, optimizer states, rounding between steps, and exports.

A few elements of each weight and of each state are copied at the end of a step and at the beginning of the
next, and compared when all steps are over, so that no device waits. If 16 or 8 bits hold all of the later
elements, and did not hold the earlier ones, the script has rounded them. Weights of 16 bits are also compared
before and after an update: elements that did not change lost their update.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zerodrift.inspect.trace.model import LiveModel
from zerodrift.inspect.trace.operations import line_of_script
from zerodrift.inspect.trace.parameter import LiveParameter, local, sample
from zerodrift.inspect.trace.records import dtype_name, narrowest
from zerodrift.inspect.trace.script import ScriptWatch
from zerodrift.inspect.trace.state import OptimizedPart, Patches, WatchState, guarded
from zerodrift.inspect.trace.values import NARROW
from zerodrift.startup import when_imported

_WIDE = frozenset((torch.float32, torch.float64))
_SAMPLED = 64  # elements of a tensor
_LEAST = 4  # elements other than zero that show a rounding
_STEPS = 2  # pairs of steps that are compared
_SKIPPED = 32  # steps that a gradient scaler skips, one after the other, before it is said to skip all

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class _OptimizedTensor:
    """A tensor that an optimizer updates, with samples of it and of its states."""

    tensor: weakref.ref[torch.Tensor]
    parts: Sequence[OptimizedPart]
    is_stale: bool = False  # whether its parts are to be found anew
    kept: list[Any] | None = field(default_factory=list)  # dtypes of its state when that was last seen
    _narrow: torch.Tensor | None = None  # elements of a tensor of 16 bits before the update under way
    _updates: list[Pair] = field(default_factory=list)  # elements before and after each update
    _ended: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name of a state, empty for the tensor itself -> its elements at the end of the last step."""
    pairs: dict[str, list[Pair]] = field(default_factory=dict)  # those, and the same at the next step

    def renew(self, parts: Sequence[OptimizedPart]) -> None:
        """Set other parts, whose cells are recorded at the next step."""
        self.parts, self.kept, self.is_stale = parts, None, False

    def begins(self, tensor: torch.Tensor, states: dict[Any, Any]) -> None:
        """Sample at the beginning of a step."""
        if tensor.dtype in NARROW and tensor.grad is not None and len(self._updates) < _STEPS:
            self._narrow = sample(tensor, _SAMPLED).clone()
        for key, value in _wide(tensor, states):
            ended = self._ended.pop(key, None)
            if ended is not None:
                begun = sample(value, _SAMPLED).clone()
                if begun.shape == ended.shape:
                    self.pairs.setdefault(key, []).append((ended, begun))

    def ends(self, tensor: torch.Tensor, states: dict[Any, Any]) -> None:
        """Sample at the first end of a step."""
        if self._narrow is not None:
            self._updates.append((self._narrow, sample(tensor, _SAMPLED).clone()))
            self._narrow = None
        for key, value in _wide(tensor, states):
            if key not in self._ended and len(self.pairs.get(key, ())) < _STEPS:
                self._ended[key] = sample(value, _SAMPLED).clone()

    def lost(self) -> float | None:
        """Return the share of sampled elements that updates did not change; None if none was sampled."""
        shares = [float((before == after).float().mean()) for before, after in self._updates if len(after)]
        return sum(shares) / len(shares) if shares else None


class StepWatch:
    """Hooks on every `torch.optim.Optimizer`."""

    def __init__(self, state: WatchState, script: ScriptWatch) -> None:
        self.state = state
        self._script = script
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._under_way: list[tuple[Any, list[Any]]] = []
        """Optimizers whose steps are under way, each inside the one before, and our hooks on each."""
        self._stepped: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Optimizer -> number of backward passes before its last step."""
        state.patches.callback(register_optimizer_step_pre_hook(self._begins).remove)
        state.patches.callback(register_optimizer_step_post_hook(self._ends).remove)
        state.patches.replace(torch.optim.Optimizer, "__init__", self._init)

    def all_took(self, steps: int) -> bool:
        """Return True if every updated tensor was updated so many times."""
        counts = list(self.state.counts.values()) or [0]
        if max(counts) >= 4 * steps or self.state.skipped >= _SKIPPED:
            return True
        idle = (tensor for made in self._made if made not in self._stepped for tensor in _tensors(made))
        return min(counts) >= steps and all(self.state.resting(tensor) is None for tensor in idle)

    def _init(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(optimizer, *args, **kwargs)
        if self.state.active:
            with contextlib.suppress(TypeError):
                self._made.add(optimizer)
        return out

    @guarded
    def _begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        hooks = []
        if getattr(optimizer, "_optimizer_step_post_hooks", None):  # the script's hooks may copy weights
            hooks.append(optimizer.register_step_post_hook(self._has_updated))
            optimizer._optimizer_step_post_hooks.move_to_end(hooks[0].id, last=False)
        while any(each is optimizer for each, _ in self._under_way):  # its last step has raised
            self._leave()
        self._under_way.append((optimizer, hooks))
        if getattr(optimizer, "_optimizer_step_pre_hooks", None):  # the script's hooks may round gradients
            hooks.append(optimizer.register_step_pre_hook(self._is_given))
        else:
            self._is_given(optimizer, args, kwargs)

    @guarded
    def _is_given(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients that an optimizer gets, after the script's hooks have run."""
        self._script.in_step = True
        if type(optimizer).__module__.startswith("torch.optim"):
            self._script.leave()
        for key, value in ((key, value) for group in optimizer.param_groups for key, value in group.items()):
            if key != "params":
                self._see_number(key, value)
        divides = getattr(optimizer, "grad_scale", None) is not None  # a fused one, by the loss scale
        for tensor, updated in self._updated(optimizer):
            updated.begins(tensor, _states(optimizer, tensor))
            if (gradient := tensor.grad) is None:
                continue
            for part in updated.parts:
                if part.parameter in self.state.scaled and not divides:
                    self.state.event("stepped_scaled", line_of_script())
                if part.sums:
                    dtype = dtype_name(gradient.dtype)
                    part.parameter.record.add("accumulate", dtype, ".grad", "", line_of_script)
                if self.state.several or not part.parameter.has_gradient:
                    part.parameter.samples.given(local(gradient), part.begin, part.at, part.length)

    @guarded
    def _has_updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Sample the updated tensors before the script's hooks run."""
        for tensor, updated in self._updated(optimizer):
            updated.ends(tensor, _states(optimizer, tensor))
        self._script.in_step = False
        self._script.enter()

    @guarded
    def _ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        state, pairs = self.state, self._updated(optimizer)  # its closure may have run the first forward
        while self._under_way and self._leave() is not optimizer:
            pass
        self._script.in_step = is_inside = bool(self._under_way)
        for tensor, updated in pairs:
            held = _states(optimizer, tensor)
            for part in updated.parts:
                if not part.parameter.optimized:
                    part.parameter.optimized = True
                    state.counts.pop(part.parameter, None)  # its steps were not by hand
                self._see_master(part.parameter, tensor, held)
            updated.ends(tensor, held)
            self._script.copies.averages.forget(held.values())
            updates = (part.parameter for part in updated.parts if part.parameter.tensor() is tensor)
            if not any(parameter.arrived for parameter in updates):
                self._script.copies.stepped(tensor, updated)
            kept = [value.dtype if isinstance(value, torch.Tensor) else None for value in held.values()]
            if kept != updated.kept or not kept:
                updated.kept = kept
                for key, value in held.items() if tensor.dim() else ():  # else every state has one element
                    self._see_number(key, value)
                _see_kept(type(optimizer).__name__, updated.parts, tensor, held)
        parameters = [part.parameter for _, updated in pairs for part in updated.parts]
        arrived = max((parameter.arrived_since_step() for parameter in parameters), default=0)
        since = state.passes - self._stepped.get(optimizer, 0)
        is_step = since or not state.passes  # else the step of another group was counted
        if is_step:
            self._stepped[optimizer] = state.passes
        skipped = getattr(optimizer, "found_inf", None)  # a gradient scaler's, where the step is fused
        if is_step and not is_inside and not (skipped is not None and skipped):
            state.skipped = 0
            what = parameters[0] if parameters else optimizer
            if parameters and optimizer in state.counts:  # steps before its masters were copied
                state.counts[what] = state.counts.get(what, 0) + state.counts.pop(optimizer)
            state.has_stepped(what, min(since, arrived or since))
        self._script.enter()

    def _leave(self) -> Any:
        """Remove the innermost optimizer under way, and our hooks on it."""
        optimizer, hooks = self._under_way.pop()
        for hook in hooks:
            hook.remove()
        return optimizer

    def _see_number(self, key: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.dtype in NARROW and not value.dim():
            self.state.event("number-in-16-bits", "", key=str(key), dtype=dtype_name(value.dtype))

    def _see_master(self, parameter: LiveParameter, tensor: torch.Tensor, states: dict[Any, Any]) -> None:
        """Record the master: the parameter itself, a tensor of the optimizer's, or a state."""
        record = parameter.record
        if parameter.tensor() is not tensor:
            record.add("master", dtype_name(tensor.dtype), "a tensor of the optimizer's own")
        elif not record.cells.get("master"):
            values = local(tensor).detach()
            for key, state in states.items() if values.dtype in NARROW else ():
                wide = local(state).detach() if isinstance(state, torch.Tensor) else values
                is_wide = wide.dtype in _WIDE and wide.shape == values.shape
                if is_wide and values.any() and torch.equal(wide.to(values.dtype), values):
                    parameter.is_written = True
                    record.add("master", dtype_name(wide.dtype), f"the optimizer's state {key}")
                    return
            parameter.residue = self._script.copies.residue(parameter, states)
            if parameter.residue:
                parameter.is_written = True
                record.add("master", "split", f"the parameter, and its rest in the state {parameter.residue}")
                return
            how = ", rounded at random" if parameter.is_drawn else ""
            record.add("master", "same", f"the parameter itself{how}")

    def record(self) -> None:
        """Add roundings between steps to the record, and whether parameters follow their masters."""
        if (skipped := self.state.skipped) and not self.state.process.steps:
            self.state.event("skipped-by-a-scaler", "")
            what = f"The gradient scaler skipped all {skipped} steps: gradients were infinite or NaN. "
            what += "Lower the loss scale until they are finite, and look for what overflows."
            self.state.process.notes += [what] if skipped >= _SKIPPED else []  # at first a scale may shrink
        optimized: list[_OptimizedTensor] = list(self.state.optimized.values())
        for key, dtype, names in _rounded(optimized):
            event = {"kind": "rounded-between-steps", "line": "", "state": key, "dtype": dtype}
            self.state.process.events.append({**event, "names": names})
        for updated in optimized:
            share, master = updated.lost(), updated.tensor()
            for part in updated.parts:
                parameter, tensor = part.parameter, part.parameter.tensor()
                if share is not None:
                    parameter.record.facts["lost"] = share
                if master is not None and (parameter.is_written or parameter.is_drawn):
                    parameter.record.facts["follows"] = True
                elif master is not None and tensor is not None and tensor is not master:
                    parameter.record.facts["follows"] = _follows(part, tensor, master)

    def _updated(self, optimizer: Any) -> list[tuple[torch.Tensor, _OptimizedTensor]]:
        """Return an optimizer's tensors with the parameters in them, which are found once."""
        pairs = []
        for tensor in _tensors(optimizer):
            known = self.state.optimized.get(id(tensor))
            if known is None or known.tensor() is not tensor:
                known = _OptimizedTensor(weakref.ref(tensor), self._parts(optimizer, tensor))
                self.state.optimized[id(tensor)] = known
            elif known.is_stale:
                known.renew(self._parts(optimizer, tensor) or known.parts)
            pairs.append((tensor, known))
        return pairs

    def _parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart]:
        for adapter in self.state.adapters:
            parts = adapter.parts(optimizer, tensor)
            if parts is not None:
                return parts
        parameter = self.state.resting(tensor)
        if parameter is not None:
            return (OptimizedPart(parameter, parameter.begin),)
        self.state.remember()
        views = ((at, end - at, p) for at, end, p in self.state.memory.ranges_of(tensor))  # of a flat buffer
        inside = [OptimizedPart(p, 0, at, numel) for at, numel, p in views if numel == p.record.numel]
        copies = (model.copied(tensor) for model in self.state.models)
        return inside or [OptimizedPart(copied) for copied in copies if copied is not None][:1]


def _tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (tensor for tensor in group["params"] if isinstance(tensor, torch.Tensor))


def _states(optimizer: Any, tensor: torch.Tensor) -> dict[Any, Any]:
    held = getattr(optimizer, "state", {}).get(tensor)
    return held if isinstance(held, dict) else {}


def _follows(part: OptimizedPart, tensor: torch.Tensor, master: torch.Tensor) -> bool:
    """Return False if a parameter differs from its master rounded to the parameter's dtype."""
    values, wide = local(tensor).detach().reshape(-1), local(master).detach().reshape(-1)
    if part.length >= 0 or values.shape != wide.shape:
        length = wide.numel() - part.at if part.length < 0 else part.length
        values, wide = values[part.begin :][:length], wide[part.at :][:length]
    if part.begin < 0 or values.shape != wide.shape or values.device != wide.device:
        return True  # the library does more than copy
    return torch.equal(values, wide.to(values.dtype))


def _see_kept(name: str, parts: Sequence[OptimizedPart], tensor: torch.Tensor, held: dict[Any, Any]) -> None:
    """Record the states with a number for each element or block, and no counters."""
    numel = local(tensor).numel()
    least = min(max(2, numel // 4096), numel)
    tensors = {key: local(value) for key, value in held.items() if isinstance(value, torch.Tensor)}
    kept = {key: value for key, value in tensors.items() if value.numel() >= least}
    for part in parts:
        kept.pop(part.parameter.residue, None)
        for key, moment in kept.items():
            part.parameter.record.add("state", dtype_name(moment.dtype), f"{name} {key}")
        if not kept and numel:
            part.parameter.record.unseen["state"] = f"{name} keeps none"


class ExportWatch:
    """Hooks on the functions that write tensors to files."""

    def __init__(self) -> None:
        self._written: dict[str, tuple[tuple[int, ...], str, str, str]] = {}
        """Name in the file -> shape, dtype, the function that wrote it, line."""
        self._patches = Patches()
        self.end = self._patches.close
        replace, partial = self._patches.replace, functools.partial
        replace(torch, "save", partial(self._save, "torch.save"))

        def imported(module: Any) -> None:
            replace(module, "save_file", partial(self._save, "safetensors"))

        self._patches.callback(when_imported("safetensors.torch", imported))

    def _save(self, by: str, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        line = line_of_script()
        for name, tensor in _named(tensors):
            self._written[name] = (tuple(tensor.shape), dtype_name(tensor.dtype), by, line)
        return original(tensors, *args, **kwargs)

    def see(self, models: Iterable[LiveModel]) -> None:
        """Match names in files with parameters; a name may have or lack a prefix."""
        for record in (parameter.record for model in models for parameter in model.parameters):
            for name in (record.name, *record.also):
                for written, (shape, dtype, by, line) in self._written.items():
                    same = written == name or written.endswith("." + name) or name.endswith("." + written)
                    if same and shape == record.shape:
                        record.add("export", dtype, by, "", line)
                        record.unseen.pop("export", None)


def _named(value: Any, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the floating tensors of a checkpoint, a dict of dicts."""
    for key, item in value.items() if isinstance(value, dict) and depth else ():
        if not isinstance(item, torch.Tensor):
            yield from _named(item, depth - 1)
        elif isinstance(key, str) and item.is_floating_point():
            yield key, item


def _rounded(optimized: Iterable[_OptimizedTensor]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the name of a state, the dtype that it was rounded to between steps, and its parameters.

    A state of which some parameters happen to fit a narrower dtype, such as gains of norms, is yielded once.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for updated in optimized:
        names = [part.parameter.record.name for part in updated.parts]
        for key, pairs in updated.pairs.items():
            dtypes = [_rounded_to(ended.tolist(), begun.tolist()) for ended, begun in pairs]
            if "" not in dtypes:
                found.setdefault(key, {}).setdefault(dtypes[0], []).extend(names)
    for key, by_dtype in found.items():
        dtype = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
        yield key, dtype, [name for names in by_dtype.values() for name in names]


def _wide(tensor: torch.Tensor, states: dict[Any, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    least = min(_LEAST, local(tensor).numel())
    for key, value in (("", tensor), *states.items()):
        value = local(value) if isinstance(value, torch.Tensor) else None
        if value is not None and value.dtype in _WIDE and value.numel() >= max(least, 2):
            yield str(key), value


def _rounded_to(ended: list[float], begun: list[float]) -> str:
    """Return the narrowest dtype that holds all of `begun` and not `ended`; empty for none."""
    dtype = narrowest(begun) if sum(value != 0 for value in begun) >= _LEAST else ""
    wider = sum(not narrowest([value], (dtype,)) for value in ended) if dtype else 0
    return dtype if 4 * wider >= len(ended) else ""
