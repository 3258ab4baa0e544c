"""Check that the model still has the engine's parameters, and refuse loads that would not reach them.

`load_state_dict(assign=True)`, `.half()`, `.to()` and module surgery replace the segments' views by other
tensors. So every forward and every step compares each parameter's memory with its view, and which modules
hold which modules and parameters. Modules without parameters may be added, removed and wrapped.

Invariant: a parameter that is not its segment's view is named in an error before anything is computed with
it, or its values have been copied into the view.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from zerodrift.engine.habits import storage_writes as writes
from zerodrift.engine.habits.absent_parameter import AbsentParameter, AbsentValue, lost_error
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import ModelError, Problem, Problems, UnsupportedError
from zerodrift.plan import Row

LOAD = (
    "Load weights inside `engine.gathered(write=True)`, cast through the config's `precision`, and change "
    "the model before `initialize`."
)
_LATER = "Change the model before `initialize`, or build a new engine."


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A place in a module where a parameter is registered; a tied parameter has several."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    segment: FlatSegment
    index: int

    @property
    def row(self) -> Row:
        return self.segment.rows[self.index]

    @property
    def home(self) -> torch.Tensor:
        """The tensor of which the parameter must be a view now."""
        return self.segment.expected_views[self.index]

    @property
    def current(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.attribute)

    def problem(self, *, stepping: bool) -> Problem | None:
        if self.current is not self.parameter:
            must = "must stay the parameter that the engine was given"
            return Problem(self.name, must, got="another one", do=LOAD)
        if not _is_view(self.parameter, self.home) and not writes.may_stand_in(self.segment, self.index):
            return Problem(self.name, "must stay a view of its segment", got="memory of its own", do=LOAD)
        # A trained parameter may be frozen for a while, as in a GAN. Then it is not updated.
        thawed = self.parameter.requires_grad and not isinstance(self.segment, TrainedSegment)
        if thawed and (stepping or torch.is_grad_enabled()):
            must = "must stay frozen, as planned"
            do = "Unfreeze it before `initialize`, and freeze it again until you train it."
            return Problem(self.name, must, got="requires_grad=True", do=do)
        return None


# --- hooks of an engine in a model, in its copies, and when the engine is gone ----------------------------


def without_engine(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the hook of an engine in a copy of its module."""


def _without_engine() -> Any:
    return without_engine


class EngineHook:
    """A hook of an engine. A copy or a pickle of the module has `without_engine` in its place. A compiler
    neither traces it nor compiles it by itself (private in torch 2.13 to 2.15; the public calls import the
    compiler)."""

    __slots__ = ("_call", "_require", "_uncompiled")

    def __init__(self, call: Callable[..., Any], require: Callable[[], None] | None = None) -> None:
        self._call, self._uncompiled, self._require = call, _disable_dynamo(call), require

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._uncompiled if torch.compiler.is_dynamo_compiling() else self._call)(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        if self._require is not None:
            self._require()
        return _without_engine, ()


_SKIP = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(EngineHook.__call__.__code__, eval_frame._FrameExecStrategy(_SKIP, _SKIP))


def mark_as_ours(handles: Iterable[Any], require: Callable[[], None] | None = None) -> None:
    """Turn the hooks of these handles into `EngineHook`s. `require` raises if the module must not be
    copied."""
    for handle in handles:
        held = handle.hooks_dict_ref() if isinstance(handle, RemovableHandle) else None
        if held is not None and not isinstance(held[handle.id], EngineHook):
            held[handle.id] = EngineHook(held[handle.id], require)


class LostParameters(EngineHook):
    """A hook on a module whose values were lost when its engine was destroyed."""

    def __init__(self, slots: list[ParameterSlot]) -> None:
        super().__init__(self._refuse, self._refuse)
        self._module = slots[0].module
        self._held = [(slot.name, slot.attribute, slot.parameter, slot.home) for slot in slots]

    @property
    def names(self) -> list[str]:
        """The parameters to which user code has given no new values."""
        return [
            name
            for name, attribute, parameter, placeholder in self._held
            if self._module._parameters.get(attribute) is parameter and _is_view(parameter, placeholder)
        ]

    def _refuse(self, *called: Any) -> None:
        for name in self.names[:1]:
            raise lost_error(name)


def find_other_engines(model: nn.Module) -> tuple[bool, set[str]]:
    """Return (whether a module has a living engine, the parameters whose values a destroyed one took)."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    lost = {name for hook in hooks if isinstance(hook, LostParameters) for name in hook.names}
    return any(type(hook) is EngineHook for hook in hooks), lost


def _require_values(slots: Iterable[ParameterSlot]) -> None:
    for slot in slots:
        if not slot.segment.is_full:
            must = "must be copied or saved inside `engine.gathered()`, where it has values"
            got = "a copy or `state_dict` outside of it"
            do = "Or save with `zerodrift.Checkpoints` or `zerodrift.export`."
            raise ModelError(slot.name, must, got=got, do=do)


class ModuleTree:
    """A snapshot of which modules hold which modules and parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._lengths = list(map(len, self._dicts))
        self._held = [held for each in self._dicts for held in each.values()]

    @property
    def _dicts(self) -> list[dict[str, Any]]:
        return [*map(_CHILDREN, self._modules), *map(_PARAMETERS, self._modules)]

    def is_unchanged(self) -> bool:
        """Compare the model with the snapshot. The number of Python calls does not grow with the model."""
        dicts = self._dicts
        held = itertools.chain.from_iterable(map(_VALUES, dicts))
        return list(map(len, dicts)) == self._lengths and all(map(operator.is_, held, self._held))


_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
_VALUES = operator.methodcaller("values")


Loading = Callable[[Mapping[str, Row], Mapping[str, Any]], contextlib.AbstractContextManager[None]]
"""(rows that a module loads, their values) -> a context for the load."""


class ParameterGuard:
    """All parameter slots of a model."""

    def __init__(self, model: nn.Module, segments: list[FlatSegment], *, asynchronous: bool) -> None:
        """`asynchronous`: see `Mesh.asynchronous`."""
        self._asynchronous = asynchronous
        self.placeholders = writes.share_placeholders(segment for segment in segments if segment.gathers)
        home = {id(p): (segment, n) for segment in segments for n, p in enumerate(segment.parameters)}
        self._slots = [
            ParameterSlot(
                f"{path}.{attribute}".lstrip("."), module, attribute, parameter, *home[id(parameter)]
            )
            for path, module in model.named_modules()
            for attribute, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in home
        ]
        self._model = model
        self._segments = segments
        self._owners = {
            module for module in model.modules() if any(p is not None for p in module._parameters.values())
        }
        self._known = set(home)
        self._tree = ModuleTree(model)
        self.allows_absent_values = False
        """Whether state dicts may have absent values: reading one is the error."""
        self.replaced: set[str] = set()
        """Rows that were loaded or assigned since the outermost `gathered(write=True)` began."""
        self.loading: Loading | None = None
        """Context for a module's own `load_state_dict`; None where it is refused outside of `gathered`."""
        self._loads: dict[nn.Module, contextlib.AbstractContextManager[None]] = {}
        self.opened: dict[int, tuple[FlatSegment, dict[str, Row]]] = {}
        """Segments whose full values may be written, and their rows, by number."""

    def check(self, *, stepping: bool = False) -> None:
        """Raise if a parameter has left its segment, the model has new ones, or a placeholder was written."""
        problems = Problems()
        # Without this, every attribute of an absent parameter is a call of its class.
        with torch._C.DisableTorchFunctionSubclass():
            self._check(problems, stepping)
        problems.raise_as(ModelError)

    def _check(self, problems: Problems, stepping: bool) -> None:
        same = self._tree.is_unchanged()
        good = {segment.number for segment in self._segments if same and segment.has_views_in_place}
        for slot in self._slots if len(good) < len(self._segments) else ():
            problem = None if slot.segment.number in good else slot.problem(stepping=stepping)
            if problem is not None:
                problems.include(problem)
        if not problems and not same:
            self._check_tree(problems)
        if stepping and not problems and len(good) < len(self._segments):
            self.take_over_assigned([s.segment for s in self._slots if not _is_view(s.parameter, s.home)])
        absent = not self._asynchronous and any(
            not writes.are_missing(held).all() for held in self.placeholders
        )
        for segment in self._segments:
            if segment.gathers and not self.is_open(segment):
                written = writes.rows_with_new_version(segment)
                if absent:
                    written += [
                        row for row in writes.rows_written_while_absent(segment) if row not in written
                    ]
                for row in written:
                    problems.add(row.name, writes.WRITE, got=writes.WRITTEN_ABSENT, do="It was lost.")
                if written:
                    writes.record_versions(segment)

    def _check_tree(self, problems: Problems) -> None:
        for path, module in self._model.named_modules():
            held = {
                f"{path}.{name}".lstrip("."): p for name, p in module._parameters.items() if p is not None
            }
            if module not in self._owners:
                for name in list(held)[:1]:
                    must = "must be in a module that was passed to the engine"
                    problems.add(name, must, got="a new one", do=_LATER)
                continue
            for name, parameter in held.items():
                if id(parameter) not in self._known:
                    problems.add(name, "must exist when the engine is made", got="a new one", do=_LATER)
        here = {id(module) for module in self._model.modules()}
        for slot in () if problems else self._slots:
            if id(slot.module) not in here:
                problems.add(slot.name, "must stay in the model", got="a model without it", do=_LATER)
        if not problems:
            self._tree = ModuleTree(self._model)

    # --- writing ----------------------------------------------------------------------------------------

    def is_open(self, segment: FlatSegment) -> bool:
        return segment.number in self.opened

    def is_writable(self, row: Row) -> bool:
        """Return True inside a context that keeps writes to this row."""
        return row.segment in self.opened and row.name in self.opened[row.segment][1]

    def require_closed(self, what: str) -> None:
        if self.opened:
            raise UnsupportedError(
                what,
                "must not be called inside `engine.gathered(write=True)`, which writes at its end",
                do="Call it after the context.",
            )

    def open(self, segments: Iterable[FlatSegment], rows: Iterable[Row]) -> None:
        """Hold these segments full, and keep writes to these rows."""
        if not self.opened:
            self.replaced.clear()
        for segment in segments:
            if segment.number not in self.opened:
                writes.hold_full(segment)
                self.opened[segment.number] = (segment, {})
        for row in rows:
            self.opened[row.segment][1][row.name] = row

    def close(self) -> list[tuple[FlatSegment, list[Row]]]:
        """End all writing. Return the open segments, whose holds the caller ends, and their rows."""
        held = [(segment, list(rows.values())) for segment, rows in self.opened.values()]
        self.opened = {}
        return held

    @torch.no_grad()
    def take_over_assigned(self, segments: Iterable[FlatSegment]) -> None:
        """Copy tensors that were assigned in place of parameters into the views of these segments."""
        for slot in self._slots_of(segments):
            for tensor in (slot.current, slot.parameter):
                if tensor is not None and not _is_view(tensor, slot.home):
                    slot.home.copy_(tensor)
                    self.replaced.add(slot.row.name)
        self.restore_parameters(segments)

    def restore_parameters(self, segments: Iterable[FlatSegment]) -> None:
        """Register the engine's parameters in their slots again, as views."""
        for slot in self._slots_of(segments):
            slot.parameter.data = slot.home
            slot.module._parameters[slot.attribute] = slot.parameter

    def _slots_of(self, segments: Iterable[FlatSegment]) -> list[ParameterSlot]:
        numbers = {segment.number for segment in segments}
        return [slot for slot in self._slots if slot.segment.number in numbers]

    # --- hooks ------------------------------------------------------------------------------------------

    def attach(self) -> list[Any]:
        """Put hooks on modules that refuse `load_state_dict` if its values would be lost, and `state_dict`
        and copies if values are absent. Return the handles."""
        handles: list[Any] = []
        for module, slots in _by_module(self._slots).items():
            handles.append(module.register_load_state_dict_pre_hook(self._before_load(slots)))
            handles.append(module.register_load_state_dict_post_hook(self._after_load))
            absent = [slot for slot in slots if slot.segment.gathers]
            if absent:
                handles += self._watch_saves(module, absent)
        return handles

    def _watch_saves(self, module: nn.Module, slots: list[ParameterSlot]) -> list[Any]:
        def before(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not self.allows_absent_values:
                _require_values(slots)

        def after(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            for slot in slots:
                key, parameter = prefix + slot.attribute, slot.parameter
                if isinstance(parameter, AbsentParameter) and state.get(key, parameter) is not parameter:
                    state[key] = AbsentValue.of(parameter, torch.device("meta"))

        handle = module.register_state_dict_pre_hook(before)
        mark_as_ours([handle], lambda: _require_values(slots))
        return [handle, module.register_state_dict_post_hook(after)]

    def _before_load(self, slots: list[ParameterSlot]) -> Any:
        def load(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if module is not slots[0].module:
                return  # a deep copy carries its hooks along
            mine = [slot for slot in slots if prefix + slot.attribute in state]
            if self.loading is not None and mine:
                values = {slot.row.name: state[prefix + slot.attribute] for slot in mine}
                self._loads[module] = self.loading({slot.row.name: slot.row for slot in mine}, values)
                self._loads[module].__enter__()
            for slot in mine:
                self.replaced.add(slot.row.name)
                if not self.is_open(slot.segment):
                    raise ModelError(
                        slot.name,
                        "must be loaded inside `engine.gathered(write=True)`, which also writes its master",
                        got="`load_state_dict` outside of it",
                    )

        return load

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        loading = self._loads.pop(module, None)
        if loading is not None:
            loading.__exit__(None, None, None)

    def leave(self) -> None:
        """Leave plain parameters behind. Those without values raise an error when they are used."""
        for segment in self._segments:
            segment.detach()
        for slot in self._slots:
            kind = type(slot.parameter)
            if issubclass(kind, AbsentParameter):
                kind.lost = True
        for module, slots in _by_module(s for s in self._slots if not s.segment.is_full).items():
            lost = LostParameters(slots)
            module.register_forward_pre_hook(lost)
            module.register_state_dict_pre_hook(lost)


def _by_module(slots: Iterable[ParameterSlot]) -> dict[nn.Module, list[ParameterSlot]]:
    held: dict[nn.Module, list[ParameterSlot]] = {}
    for slot in slots:
        held.setdefault(slot.module, []).append(slot)
    return held


def _is_view(tensor: torch.Tensor, home: torch.Tensor) -> bool:
    return tensor.data_ptr() == home.data_ptr() and tensor.dtype is home.dtype and tensor.shape == home.shape
