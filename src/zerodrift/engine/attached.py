"""Whether the model's parameters still are what the engine was given, and how to load into them.

`load_state_dict(assign=True)`, `.half()`, `.to()` and module surgery give a module other tensors than the
segments' views; the engine would go on with the old ones and nobody would see it. So every forward and
every step looks at each parameter's place, and loading asks first.

Invariant: a parameter that is not its segment's view is named in an error before anything is computed with
it, or its values have been taken over.

[Note: modules] What else the model may have become since is told by a comparison of who hangs where. Modules
without parameters may come, go and wrap others: nothing is trained in them. A parameter in a module that the
engine was not given is trained by nobody, a known one in another module would be gathered by nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from zerodrift.engine.segment import FlatSegment, are_nowhere, stand_ins
from zerodrift.engine.trained import TrainedSegment
from zerodrift.engine.ungathered import UngatheredParameter, UngatheredValue, lost_error, mark_lost
from zerodrift.errors import ModelError, Problem, Problems, UnsupportedError
from zerodrift.kernels.prints import BYTES
from zerodrift.optim.updater import Updater
from zerodrift.plan.table import Row
from zerodrift.policy.nouns import Master


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Where a parameter hangs; a tied one hangs in several places."""

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter
    segment: FlatSegment
    index: int
    """Its place in the segment."""

    @property
    def row(self) -> Row:
        return self.segment.rows[self.index]

    @property
    def home(self) -> torch.Tensor:
        """What it must be a view of now."""
        return self.segment.shown[self.index]

    @property
    def trained(self) -> bool:
        return isinstance(self.segment, TrainedSegment)

    @property
    def current(self) -> torch.Tensor | None:
        return self.module._parameters.get(self.attribute)

    def problem(self, *, stepping: bool) -> Problem | None:
        now, trained = self.current, self.trained
        if now is not self.parameter:
            must = "must stay the parameter that the engine was given"
            return Problem(self.name, must, got="another one", do=LOAD)
        if not _is_view(self.parameter, self.home):
            return Problem(self.name, "must stay a view of its segment", got="memory of its own", do=LOAD)
        # What is frozen for a while, as one of two adversaries is, is not updated meanwhile.
        if self.parameter.requires_grad and not trained and (stepping or torch.is_grad_enabled()):
            return Problem(
                self.name,
                "must stay frozen, as planned",
                got="requires_grad=True",
                do="Thaw it before `initialize`, and freeze it again until it is to be trained.",
            )
        return None


LOAD = (
    "Load weights inside `engine.gathered(write=True)`, cast through the config's `precision`, and change "
    "the model before `initialize`."
)


LATER = "Change the model before `initialize`, or build the engine anew."
WRITE = "must be written inside `engine.gathered(write=True)`"
READ = "a write inside `engine.gathered()`, which shows values"


def without_engine(*args: Any, **kwargs: Any) -> None:
    """What a hook of an engine is in a copy of its module."""


def _without_engine() -> Any:
    return without_engine


class EngineHook:
    """A hook of an engine: a copy of the module, in memory or in a file, is a plain one, and code that is
    compiled calls it where it is. That is private in torch (2.13 to 2.15), and imports the compiler no sooner
    than the public one."""

    __slots__ = ("_apart", "_call", "_require")

    def __init__(self, call: Callable[..., Any], require: Callable[[], None] | None = None) -> None:
        self._call, self._apart, self._require = call, _disable_dynamo(call), require

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._apart if torch.compiler.is_dynamo_compiling() else self._call)(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()[0]()

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        if self._require is not None:
            self._require()
        return _without_engine, ()


def own(handles: Iterable[Any], require: Callable[[], None] | None = None) -> None:
    """Make the hooks behind these handles an engine's; a module with them is copied where `require` lets it.

    A handle's id and the dict that its hook is in have no underscore, and no promise (torch 2.11 to 2.15).
    """
    for handle in handles:
        held = handle.hooks_dict_ref() if isinstance(handle, RemovableHandle) else None
        if held is not None and not isinstance(held[handle.id], EngineHook):
            held[handle.id] = EngineHook(held[handle.id], require)


class Gone:
    """What is left on a module whose values went with their engine."""

    def __init__(self, places: list[ParameterSlot]) -> None:
        self._module = places[0].module
        self._held = [(place.name, place.attribute, place.parameter, place.home) for place in places]

    @property
    def names(self) -> list[str]:
        """The parameters that still stand for values which are not there."""
        return [
            name
            for name, attribute, parameter, stub in self._held
            if self._module._parameters.get(attribute) is parameter and _is_view(parameter, stub)
        ]

    def require(self) -> None:
        for name in self.names[:1]:
            raise lost_error(name)

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        self.require()

    def __deepcopy__(self, memo: Any) -> Any:
        return without_engine

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _without_engine, ()


def left_by_others(model: nn.Module) -> tuple[bool, set[str]]:
    """(Whether another engine is alive on some module, the parameters whose values went with one)."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    gone = {name for hook in hooks if isinstance(hook, Gone) for name in hook.names}
    return any(isinstance(hook, EngineHook) for hook in hooks), gone


def _require_there(places: Iterable[ParameterSlot]) -> None:
    for place in places:
        if not place.segment.is_full:
            raise ModelError(
                place.name,
                "must be copied or saved inside `engine.gathered()`, where its values are there",
                got="a copy or `state_dict` outside of it",
                do="Or save with `zerodrift.Checkpoints` or `zerodrift.export`.",
            )


def _enter(places: list[ParameterSlot]) -> Any:
    """What a state dict has of parameters that are not there."""

    def enter(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for place in places:
            key, parameter = prefix + place.attribute, place.parameter
            if isinstance(parameter, UngatheredParameter) and state.get(key, parameter) is not parameter:
                state[key] = UngatheredValue.of(parameter, torch.device("meta"))

    return enter


class Tree:
    """Which modules hang where, and which parameters, as they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._lengths = list(map(len, self._dicts))
        self._held = [held for each in self._dicts for held in each.values()]

    @property
    def _dicts(self) -> list[dict[str, Any]]:
        return [*map(_CHILDREN, self._modules), *map(_PARAMETERS, self._modules)]

    def same(self) -> bool:
        """Whether they still do: a comparison of identities, without a walk, in as many calls for many
        modules as for few."""
        dicts = self._dicts
        held = itertools.chain.from_iterable(map(_VALUES, dicts))
        return list(map(len, dicts)) == self._lengths and all(map(operator.is_, held, self._held))


_CHILDREN, _PARAMETERS = operator.attrgetter("_modules"), operator.attrgetter("_parameters")
_VALUES = operator.methodcaller("values")


Loading = Callable[[Mapping[str, Row], Mapping[str, Any]], contextlib.AbstractContextManager[None]]
"""Of the rows that a module loads, and the values."""


class AttachedParameters:
    """All places of a model."""

    def __init__(self, model: nn.Module, segments: list[FlatSegment], *, asynchronous: bool) -> None:
        """`asynchronous`: see `Mesh.asynchronous`."""
        self._asynchronous = asynchronous
        self._absent = stand_ins([segment for segment in segments if segment.gathers])
        home = {id(p): (segment, n) for segment in segments for n, p in enumerate(segment.parameters)}
        self._places = [
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
        self._tree = Tree(model)
        self._names_only = False
        self.replaced: set[str] = set()
        """Rows that were loaded whole since values were opened to be written."""
        self.loading: Loading | None = None
        """What a module's own `load_state_dict` happens in; None where it is refused outside of that."""
        self._loads: dict[nn.Module, contextlib.AbstractContextManager[None]] = {}
        """Modules that are loading."""
        self._opened: dict[int, tuple[FlatSegment, dict[str, Row]]] = {}
        """By number, segments whose full values are there to be written, and of which rows."""

    def check(self, *, stepping: bool = False) -> None:
        """Raise where a parameter has left its place, the model has others, or one was written that is shown
        for a moment only. Before a step, trained parameters must be trainable."""
        problems = Problems()
        # A parameter that is not there would be asked for each of its attributes: see `ungathered.py`.
        with torch._C.DisableTorchFunctionSubclass():
            self._look(problems, stepping)
        problems.raise_as(ModelError)

    def _look(self, problems: Problems, stepping: bool) -> None:
        same = self._tree.same()
        shown = {segment.number for segment in self._segments if same and segment.is_shown}
        for place in self._places if len(shown) < len(self._segments) else ():
            problem = None if place.segment.number in shown else place.problem(stepping=stepping)
            if problem is not None:
                problems.include(problem)
        if not problems and not same:
            self._check_tree(problems)
        absent = not self._asynchronous and any(not are_nowhere(held).all() for held in self._absent)
        for segment in self._segments:
            if segment.gathers and not self.is_open(segment):
                written = segment.moved
                if absent:
                    written += [row for row in segment.written_while_absent() if row not in written]
                for row in written:
                    problems.add(row.name, WRITE, got="a write to what stands for it", do="It was lost.")
                if written:
                    segment.know()

    def look(self) -> torch.Tensor | None:
        """Whether somebody has written an element that stands for what is not there, on the device; None
        where `check` looks, which must not make the host wait."""
        found = [(~are_nowhere(held)).any() for held in self._absent if self._asynchronous]
        return torch.stack(found).any().long() if found else None

    def _check_tree(self, problems: Problems) -> None:
        """See [Note: modules]."""
        for path, module in self._model.named_modules():
            if module not in self._owners and any(p is not None for p in module._parameters.values()):
                at = f"{path}." if path else ""
                names = [f"{at}{name}" for name, p in module._parameters.items() if p is not None]
                problems.add(
                    names[0], "must be in a module that the engine was given", got="a new one", do=LATER
                )
            elif module in self._owners:
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) not in self._known:
                        named = f"{path}.{name}".lstrip(".")
                        problems.add(
                            named, "must be there when the engine is made", got="a new one", do=LATER
                        )
        here = {id(module) for module in self._model.modules()}
        if not problems:
            for place in self._places:
                if id(place.module) not in here:
                    problems.add(place.name, "must stay in the model", got="a model without it", do=LATER)
        if not problems:
            self._tree = Tree(self._model)

    # --- writing ----------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Whether a context is open in which values are written."""
        return bool(self._opened)

    def is_open(self, segment: FlatSegment) -> bool:
        return segment.number in self._opened

    def require_closed(self, what: str) -> None:
        """Raise where values are being written."""
        if self._opened:
            raise UnsupportedError(
                what,
                "must not be called inside `engine.gathered(write=True)`, whose values are taken "
                "over where it ends",
                do="Call it after the context.",
            )

    def open(self, segments: Iterable[FlatSegment], rows: Iterable[Row]) -> None:
        """The parameters of these segments are gathered, and what is written to these rows will be kept."""
        if not self._opened:
            self.replaced.clear()
        for segment in segments:
            if segment.number not in self._opened:
                segment.lend()
                self._opened[segment.number] = (segment, {})
        for row in rows:
            self._opened[row.segment][1][row.name] = row

    def close(self) -> list[tuple[FlatSegment, list[Row]]]:
        """Nothing is written any more: what was open, and is to be taken back."""
        held = [(segment, list(rows.values())) for segment, rows in self._opened.values()]
        self._opened = {}
        return held

    @torch.no_grad()
    def take_over(self, segments: Iterable[FlatSegment]) -> None:
        """What was assigned to parameters of these goes where they are views of."""
        for place in self._places_of(segments):
            for tensor in (place.current, place.parameter):
                if tensor is not None and not _is_view(tensor, place.home):
                    place.home.copy_(tensor)
                    self.replaced.add(place.row.name)
        self.put_back(segments)

    def put_back(self, segments: Iterable[FlatSegment]) -> None:
        """Parameters hang in their places again, as views."""
        for place in self._places_of(segments):
            place.parameter.data = place.home
            place.module._parameters[place.attribute] = place.parameter

    def _places_of(self, segments: Iterable[FlatSegment]) -> list[ParameterSlot]:
        numbers = {segment.number for segment in segments}
        return [place for place in self._places if place.segment.number in numbers]

    @contextlib.contextmanager
    def names_only(self) -> Iterator[None]:
        """Whoever takes a state dict inside has no use for its values."""
        before, self._names_only = self._names_only, True
        try:
            yield
        finally:
            self._names_only = before

    def show_names(self) -> None:
        """From now on a state dict may be taken while values are not there: whoever reads one is told."""
        self._names_only = True

    def attach(self) -> list[Any]:
        """Hooks that refuse `load_state_dict` where its values would be lost, and `state_dict` and copies
        where values are not there; returns their handles."""
        held: dict[nn.Module, list[ParameterSlot]] = {}
        for place in self._places:
            held.setdefault(place.module, []).append(place)
        handles: list[Any] = []
        for module, places in held.items():
            handles.append(module.register_load_state_dict_pre_hook(self._asks(places)))
            handles.append(module.register_load_state_dict_post_hook(self._loaded))
            away = [place for place in places if place.segment.gathers]
            if away:
                handle = module.register_state_dict_pre_hook(self._saves(away))
                own([handle], lambda away=away: _require_there(away))  # type: ignore[misc]
                handles += [handle, module.register_state_dict_post_hook(_enter(away))]
        return handles

    def _saves(self, places: list[ParameterSlot]) -> Any:
        def save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if not self._names_only:
                _require_there(places)

        return save

    def leave(self) -> None:
        """The engine is gone: what it leaves is plain, or says that its values are not there."""
        for segment in self._segments:
            segment.part()
        held: dict[nn.Module, list[ParameterSlot]] = {}
        for place in self._places:
            mark_lost(place.parameter)
            if not place.segment.is_full:
                held.setdefault(place.module, []).append(place)
        for module, places in held.items():
            gone = Gone(places)
            module.register_forward_pre_hook(gone)
            own([module.register_state_dict_pre_hook(gone)], gone.require)

    def _asks(self, places: list[ParameterSlot]) -> Any:
        def ask(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            if module is not places[0].module:
                return  # a deep copy carries its hooks along
            mine = [place for place in places if prefix + place.attribute in state]
            if self.loading is not None and mine:
                values = {place.row.name: state[prefix + place.attribute] for place in mine}
                self._loads[module] = self.loading({place.row.name: place.row for place in mine}, values)
                self._loads[module].__enter__()
            for place in places:
                if prefix + place.attribute in state:
                    self.replaced.add(place.row.name)
                if not self.is_open(place.segment) and prefix + place.attribute in state:
                    raise ModelError(
                        place.name,
                        "must be loaded inside `engine.gathered(write=True)`, where its full value "
                        "is there and reaches the optimizer's master",
                        got="`load_state_dict` outside of it",
                    )

        return ask

    def _loaded(self, module: nn.Module, incompatible: Any) -> None:
        loading = self._loads.pop(module, None)
        if loading is not None:
            loading.__exit__(None, None, None)


def _is_view(tensor: torch.Tensor, home: torch.Tensor) -> bool:
    return tensor.data_ptr() == home.data_ptr() and tensor.dtype is home.dtype and tensor.shape == home.shape


@torch.no_grad()
def settle(segment: FlatSegment, updater: Updater | None, *, cure: bool = False) -> None:
    """What was written to storage by others than the engine becomes the master's, on this rank; see
    [Note: writing] of `segment.py`."""
    problems = Problems()
    for row in segment.written_while_absent() if segment.gathers else ():
        problems.add(row.name, WRITE, got="a write to what stands for it", do="It was lost.")
    for row in segment.written_while_gathered():
        problems.add(row.name, WRITE, got="a write to its values in a forward, through `.data`", do=GATHERED)
    problems.raise_as(ModelError)
    rows = segment.written
    if not rows or not isinstance(segment, TrainedSegment) or updater is None:
        return
    master, shown = updater.master(segment.number), segment.owned.float()
    if segment.update.master is not Master.SPLIT:
        written = segment.at_rest(master).float() != shown
    elif cure:
        blocks = segment.others.repeat_interleave(BYTES // segment.storage.element_size())
        written = segment.owned_of(blocks[: segment.spec.padded])
    else:
        problems = Problems()
        for row in rows:
            problems.add(row.name, WRITE, got="a write to its bf16 storage", do=TELL)
        problems.raise_as(ModelError)
    updater.set_master(segment.number, torch.where(written, shown, master))
    segment.know()


GATHERED = "They were gathered for the forward alone, and the write was lost."
TELL = (
    "A split master cannot tell which elements were meant. Write there, or set `precision.master: fp32`, "
    "which takes such writes over."
)
