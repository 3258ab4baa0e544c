"""A caller's `torch.optim` object as an `Updater`: its own `step` on fp32 views of this rank's shards.

Parameter groups keep their options. During a step their parameters are views of the fp32 masters, or of fp32
storage; between steps they are the model's own, without optimizer state. A split master is joined before a
step and split after it, so its fp32 form takes memory during a step only.

A view is a flat piece of a parameter, or the parameter in its shape if this rank owns all of it.
`elementwise` decides which classes may step pieces.

Invariant: an element's update is what the same optimizer would do to it in a plain loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from zerodrift.dtypes import BLOCK
from zerodrift.errors import UnsupportedError, ZerodriftError, said
from zerodrift.optim import schemes
from zerodrift.optim.elementwise import WHOLE
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.updater import Counters, Owned, Written, empty_statistics, no_callback
from zerodrift.optim.updates import account
from zerodrift.optimizers import ALGORITHMS, ELEMENTWISE, either
from zerodrift.plan import Plan, Row
from zerodrift.policy import Master, State

UNSUPPORTED = {
    "LBFGS": "uses all parameters at once and calls the model itself",
    "SparseAdam": "needs sparse gradients, and gradients are summed dense here",
    "BlockOptimizer": "changes its set of trained parameters, which an engine cannot",
}
"""Classes that are refused with any placement."""


@dataclass(frozen=True, slots=True)
class _View:
    """The part of one row that this rank owns, as the optimizer sees it."""

    number: int
    """The number of the segment."""
    span: slice
    """The place of the view in this rank's piece of the segment."""
    row: Row
    parameter: nn.Parameter

    def moments(self, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the values of a state that have one number per element."""
        return {key: value for key, value in state.items() if _is_moment(value, self.parameter)}


class _MovedState(dict[str, Any]):
    """The state of a model's parameter between steps: reading a value raises."""

    def _refuse(self, *_: Any) -> NoReturn:
        must = "must be read from the engine between steps, when the optimizer has no values"
        do = "Use `engine.parameter(name).state`. No method but `step` can use the state."
        raise UnsupportedError("optimizer.state", must, do=do)

    __contains__ = __getitem__ = __setitem__ = __len__ = get = _refuse


class TorchOptimizerUpdater:
    """An `Updater` around a torch optimizer."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[Owned],
        optimizer: torch.optim.Optimizer,
        group_of: Mapping[str, int],
    ) -> None:
        self.groups = optimizer
        self.group_of = group_of
        self.kind = type(optimizer).__name__
        self._pieces = {piece.number: piece.without_values() for piece in owned}
        self._slices = {
            piece.number: schemes.allocate(_scheme(piece), piece.storage, 0, piece.initial) for piece in owned
        }
        self._values: dict[int, torch.Tensor] = {}
        """Flat fp32 masters: storage itself, the copy, or for a split master what `_join` fills."""
        self._joined = [n for n, of in self._slices.items() if of.scheme.master is Master.SPLIT]
        for number, of in self._slices.items():
            is_joined = number in self._joined
            joined = torch.empty_like(of.storage, dtype=torch.float32) if is_joined else of.master
            self._values[number] = of.storage if joined is None else joined
        self._state_owners = state_owners(optimizer)
        views = {view.row.name: view for view in self._make_views()}
        self._groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        """Each parameter group with its views."""
        for number, group in enumerate(optimizer.param_groups):
            names = [name for name, place in group_of.items() if place == number]
            for name, parameter in zip(names, group["params"], strict=True):
                state = self._state(parameter)
                for owner in self._state_owners.values():
                    owner.state.pop(parameter, None)
                if name in views:
                    # The caller's attributes, which an optimizer may read: `p.no_decay = True`.
                    private = ("_zerodrift", "ds_")
                    own = {k: v for k, v in vars(parameter).items() if not k.startswith(private)}
                    views[name].parameter.__dict__.update(own)
                    self._set_state(views[name].parameter, self._shard_of(state, views[name]))
            self._groups.append((group, [views[name].parameter for name in names if name in views]))
        self._views = [view for name, view in views.items() if name in group_of]
        self._free_joined()
        self._skipped: frozenset[str] = frozenset()
        self.statistics: Mapping[int, torch.Tensor] = empty_statistics(plan, owned)
        """Count the change of the fp32 master, because a class does not report its intended change."""

    def _make_views(self) -> Iterator[_View]:
        for number, piece in self._pieces.items():
            for row in piece.rows:
                span = piece.span(row)
                if span.stop > span.start:
                    values = self._values[number][span]
                    # A scalar stays flat: its moments must not look like step counts.
                    if span.stop - span.start == row.numel and row.shape:
                        values = values.view(row.shape)
                    yield _View(number, span, row, nn.Parameter(values))

    def _shard_of(self, state: Mapping[str, Any], view: _View) -> dict[str, Any]:
        """Return a view's part of a state that exists before the first step, as Adagrad's does."""
        begin = self._pieces[view.number].start + view.span.start - view.row.offset
        parameter, part = view.parameter, slice(begin, begin + view.parameter.numel())
        return {
            key: value.reshape(-1)[part].view(parameter.shape).to(parameter, copy=True)
            if isinstance(value, torch.Tensor) and (value.dim() or (not view.row.shape and key != "step"))
            else copy.deepcopy(value)
            for key, value in state.items()
        }

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        return {
            prefix + key: value
            for prefix, owner in self._state_owners.items()
            for key, value in owner.state.get(parameter, {}).items()
        }

    def _set_state(self, view: nn.Parameter, values: Mapping[str, Any]) -> None:
        left = dict(values)
        for prefix, owner in reversed(self._state_owners.items()):
            mine = [key for key in left if key.startswith(prefix)]
            if mine:
                owner.state[view] = {key.removeprefix(prefix): left.pop(key) for key in mine}

    def leave_alone(self, names: Collection[str]) -> None:
        self._skipped = frozenset(names)

    @torch.no_grad()
    def update(
        self, gradients: Mapping[int, torch.Tensor], multiplier: float, written: Written = no_callback
    ) -> None:
        ready: dict[int, torch.Tensor] = {}
        for number, flat in gradients.items():
            wide = flat if flat.dtype is torch.float32 else flat.float()
            ready[number] = wide if multiplier == 1.0 else wide.mul_(multiplier)
        for number in self._joined:
            values = self._values[number]
            values.untyped_storage().resize_(values.numel() * values.element_size())
            values.copy_(schemes.read(self._slices[number]))
        for view in self._views:
            if view.number in ready and view.row.name not in self._skipped:
                view.parameter.grad = ready[view.number][view.span].view(view.parameter.shape)
        before = {
            number: (self._values[number].clone(), self._slices[number].storage.clone())
            for number in ready
            if number in self.statistics
        }
        self._step_groups()
        for view in self._views:
            view.parameter.grad = None
            values = self._values[view.number][view.span]
            if view.parameter.data_ptr() != values.data_ptr():  # the class assigned to `p.data`
                values.copy_(view.parameter.reshape(-1))
                view.parameter.data = values.view(view.parameter.shape)
        for number in ready:
            schemes.write(self._slices[number], self._values[number])
        for view in self._views:
            if view.number in before:
                self._account(view, before[view.number], ready[view.number])
        self._free_joined()
        for number in ready:
            written(number)

    def _step_groups(self) -> None:
        """Call the optimizer's own `step`. An error there is reported with the flat pieces that it got."""
        shown = [(group, group["params"]) for group, _ in self._groups]
        self._guard_states(None)
        try:
            for group, views in self._groups:
                group["params"] = views
            self.groups.step()
        except (ZerodriftError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            flat = [view.row.name for view in self._views if view.parameter.shape != view.row.shape]
            if not flat:
                raise
            must = "must be able to step flat pieces of parameters, as elementwise optimizers are"
            got = f"{self.kind}, whose `step` raised {said(error)}, and a piece of {flat[0]}"
            do = f"Place its parameters whole, with a rule such as {WHOLE}, or train at stage 0."
            raise UnsupportedError("optimizer", must, got=got, do=do) from error
        finally:
            for group, parameters in shown:
                group["params"] = parameters
            self._guard_states(_MovedState())

    def _guard_states(self, guard: _MovedState | None) -> None:
        """Set this state on the model's parameters. Without it, a method that reads states between steps,
        such as `eval` of a schedule-free optimizer, would find no state."""
        for owner in self._state_owners.values():
            for parameter in (each for group, _ in self._groups for each in group["params"]):
                owner.state.pop(parameter, None)
                if guard is not None:
                    owner.state[parameter] = guard

    def _account(
        self, view: _View, before: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor
    ) -> None:
        """Fill the statistics of one view's blocks."""
        span, storage = view.span, self._slices[view.number].storage
        master, (weight, visible) = self._values[view.number][span], (values[span] for values in before)
        moments = [moment.reshape(-1) for moment in view.moments(self._state(view.parameter)).values()]
        account(
            self.statistics[view.number][span.start // BLOCK : -(-span.stop // BLOCK)],
            master - weight,
            (weight, visible, gradient[span]),
            (master, storage[span], moments[-1] if moments else None),
        )

    def _free_joined(self) -> None:
        """Free the memory of the fp32 form of split masters."""
        for number in self._joined:
            self._values[number].untyped_storage().resize_(0)

    def master(self, number: int) -> torch.Tensor:
        return schemes.read(self._slices[number])

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        schemes.write(self._slices[number], values)

    def states(self, number: int) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {}
        for view in self._views:
            if view.number == number:
                for key, value in view.moments(self._state(view.parameter)).items():
                    if key not in states:
                        states[key] = torch.zeros_like(self._pieces[number].storage, dtype=torch.float32)
                    states[key][view.span] = value.reshape(-1).float()
        return states

    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        for view in self._views:
            moment = self._state(view.parameter).get(key) if view.number == number else None
            if moment is not None:
                moment.copy_(values[view.span].view(moment.shape))

    def counters(self) -> Counters:
        states = {view.row.name: (self._state(view.parameter), view.parameter) for view in self._views}
        return {name: saved_state(state, parameter) for name, (state, parameter) in states.items() if state}

    def set_counters(self, counters: Counters) -> None:
        for owner in self._state_owners.values():
            owner.state.clear()
        for view in self._views:
            self._set_state(view.parameter, loaded_state(counters.get(view.row.name, {}), view.parameter))
        self._guard_states(_MovedState() if counters else None)

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        return tuple(key for key, value in counters.get(name, {}).items() if isinstance(value, str))

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        master = self._slices[number].master
        states = [view.moments(self._state(view.parameter)) for view in self._views if view.number == number]
        dtypes = dict.fromkeys(moment.dtype for state in states for moment in state.values())
        return None if master is None else master.dtype, tuple(dtypes)


# --- the state of a parameter -----------------------------------------------------------------------------


_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool)
"""Dtypes of moments whose every value is an fp32 number."""


def saved_state(state: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state of a parameter, with the name of its dtype in place of each moment.

    torch makes moments in the first step, so a load must make them: without moments a step would start over.
    """
    saved = dict(state)
    for key, value in state.items():
        if _is_moment(value, parameter):
            if value.dtype not in _IN_FP32:
                must, do = "must keep moments that fp32 can hold, to be saved", "Keep them in fp32."
                raise UnsupportedError("optimizer", must, got=value.dtype, do=do)
            saved[key] = str(value.dtype).removeprefix("torch.")
    return saved


def loaded_state(saved: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Return the state that `saved_state` returned, with moments of zero."""
    return {
        key: torch.zeros_like(parameter, dtype=getattr(torch, value), requires_grad=False)
        if isinstance(value, str)
        else copy.deepcopy(value)
        for key, value in saved.items()
    }


def _is_moment(value: object, parameter: nn.Parameter) -> bool:
    """Return True if a value of an optimizer's state has one number per element."""
    return isinstance(value, type(parameter.data)) and value.shape == parameter.shape


def nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it wraps, as Lookahead does, each once."""
    found: list[torch.optim.Optimizer] = []
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if any(each is other for other in found):
            continue
        found.append(each)
        for value in vars(each).values():
            values = value if isinstance(value, list | tuple) else [value]
            waiting += [inner for inner in values if isinstance(inner, torch.optim.Optimizer)]
    return found


def state_owners(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return the nested optimizers that have a state, by the prefix of their moments' names."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for each in nested(optimizer):
        owners.setdefault(id(each.state), each)
    return {f"inner{depth}_" if depth else "": owner for depth, owner in enumerate(owners.values())}


# --- what is refused ----------------------------------------------------------------------------------------


def _scheme(piece: Owned) -> Scheme:
    """Return the scheme of a shard; refuse a scheme in which torch's classes would compute other numbers."""
    scheme = piece.scheme
    if scheme.state is not State.FP32:
        must = "must be fp32 for an optimizer that rounds its moments itself"
        names = either(known.name for known in ELEMENTWISE)
        do = f"Name {names} in the config's `optimizer` block, or leave `state` out."
        raise UnsupportedError(f"state: {scheme.state}", must, do=do)
    if scheme.master is Master.SAME and piece.storage.dtype is not torch.float32:
        must = "must have fp32 storage for a torch optimizer"
        do = "Name the optimizer in the config's `optimizer` block, or use `master: split`."
        raise UnsupportedError("master: same", must, got=piece.storage.dtype, do=do)
    return scheme


def group_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str], plan: Plan) -> dict[str, int]:
    """Return row name -> its parameter group, after checking that the optimizer can serve this model."""
    _require_supported(optimizer, names)
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            row = plan.row(names.get(id(parameter), ""))
            if row is None:
                must = "must be built over the model's own parameters"
                got = f"one of shape {tuple(parameter.shape)} that the model does not have"
                raise UnsupportedError("optimizer", must, got=got, do="Build it over `model.parameters()`.")
            groups[row.name] = number
    return groups


def _require_supported(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that the engine cannot step with any placement."""
    kind = type(optimizer).__name__
    use = f"Use {either(known.name for known in ALGORITHMS)}."

    def refuse(must: str, got: str, do: str) -> NoReturn:
        raise UnsupportedError("optimizer", must, got=f"{kind}{got}", do=do)

    for base in type(optimizer).__mro__:
        if base.__name__ in UNSUPPORTED:
            got = f", which {UNSUPPORTED[base.__name__]}"
            refuse("must update the same parameters in every step, each from its own gradient", got, use)
    shared = {id(group) for group in optimizer.param_groups}
    for inner in nested(optimizer):
        own = [group for group in inner.param_groups if id(group) not in shared]
        if any(id(parameter) in names for group in own for parameter in group["params"]):
            wrapped = type(inner).__name__
            must = "must share its parameter groups with the optimizer that it wraps, or it steps nothing"
            do = f"Set the {kind}'s `param_groups` to those of the {wrapped}."
            refuse(must, f" around {wrapped} with groups of its own", do)
    if needs_closure(type(optimizer)):
        must = "must have a `step` that needs no closure: the engine's gradients are reduced before it"
        refuse(must, f".step{inspect.signature(type(optimizer).step)}", use)
    states = (state for owner in state_owners(optimizer).values() for state in owner.state.values())
    if any(map(_has_stepped, states)):
        refuse("must not have taken a step before `initialize`", " with state", "Build it anew.")


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Return True if the state of a parameter comes from a step. Marks and zeros may exist before a step."""
    if "step" in state:
        return float(state["step"]) != 0
    return any(isinstance(value, torch.Tensor) for value in state.values())


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Return True if the `step` of a class cannot be called without an argument."""
    _, *rest = inspect.signature(inspect.unwrap(kind.step)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is each.empty and each.kind not in kinds for each in rest)
