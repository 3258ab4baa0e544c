"""A caller's `torch.optim` object as an `Updater`: its own `step` on fp32 views of this rank's shards.

Parameter groups and their options stay; their parameters become views of the fp32 masters. With fp32 storage
these are views of storage itself. A split master is joined before a step and split after it, so its fp32
form has memory only then.

A view is a flat piece of a parameter, or, if this rank owns all of it, the parameter in its shape.
`elementwise` decides which classes may step pieces.

Invariant: an element's update is what the same optimizer would do to it in a plain loop.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import BLOCK
from zerodrift.errors import UnsupportedError
from zerodrift.optim import schemes
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.statistics import Statistics, account
from zerodrift.optim.updater import Counters, Owned, Written, empty_statistics, no_callback, scheme_of
from zerodrift.optimizers import ALGORITHMS, ELEMENTWISE, either
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Master, State

UNSUPPORTED = {
    "LBFGS": "looks at all parameters at once and calls the model itself",
    "SparseAdam": "needs sparse gradients, and gradients are summed dense here",
}
"""Classes that no placement helps."""


class TorchOptimizerUpdater:
    """An `Updater` around a torch optimizer."""

    def __init__(
        self,
        plan: Plan,
        owned: Sequence[Owned],
        optimizer: torch.optim.Optimizer,
        group_of: Mapping[str, int],
    ) -> None:
        self._pieces = {piece.number: piece.without_values() for piece in owned}
        self._schemes = {piece.number: _scheme(piece) for piece in owned}
        self._slices = {
            piece.number: schemes.allocate(self._schemes[piece.number], piece.storage, 0, piece.initial)
            for piece in owned
        }
        self._values = {number: self._fp32(number) for number in self._pieces}
        """Flat fp32 masters: storage itself, the copy, or for a split master what `_join` fills."""
        views = self._views()
        self._state_owners = state_owners(optimizer)
        first: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(optimizer.param_groups):
            held = [name for name, place in group_of.items() if place == number]
            for name, parameter in zip(held, group["params"], strict=True):
                first[name] = self._state(parameter)
                for owner in self._state_owners.values():
                    owner.state.pop(parameter, None)
                for view in views.get(name, ()):
                    view.__dict__.update(_attributes(parameter))
            group["params"] = [view for name in held for view in views.get(name, ())]
        self._shard_first_state(first)
        for number in self._pieces:
            self._free_joined(number)
        self.groups = optimizer
        self.group_of = group_of
        in_groups = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._members = [entry for entry in self._spans if id(entry[2]) in in_groups]
        self._skipped: frozenset[str] = frozenset()
        self._statistics = empty_statistics(plan, owned)

    def _views(self) -> dict[str, list[nn.Parameter]]:
        """Return parameter name -> its views, none if this rank owns nothing of it."""
        views: dict[str, list[nn.Parameter]] = {}
        self._spans: list[tuple[int, slice, nn.Parameter]] = []
        self._names: dict[nn.Parameter, str] = {}
        for number, piece in self._pieces.items():
            for row in piece.rows:
                span = piece.span(row)
                mine: list[nn.Parameter] = []
                if span.stop > span.start:
                    view = self._values[number][span]
                    whole = span.stop - span.start == row.numel
                    # A scalar stays flat: its moments must not look like step counts.
                    parameter = nn.Parameter(view.view(row.shape) if whole and row.shape else view)
                    self._names[parameter] = row.name
                    self._spans.append((number, span, parameter))
                    mine.append(parameter)
                views[row.name] = mine
        return views

    def _shard_first_state(self, first: Mapping[str, Mapping[str, Any]]) -> None:
        """Give every view its part of the state that was made before any step, as Adagrad does."""
        for number, span, view in self._spans:
            state = first.get(self._names[view])
            if state:
                piece = self._pieces[number]
                offset = next(row.offset for row in piece.rows if row.name == self._names[view])
                begin = piece.start + span.start - offset
                values = {
                    key: value.reshape(-1)[begin : begin + view.numel()].view(view.shape).to(view, copy=True)
                    if isinstance(value, torch.Tensor) and value.dim()
                    else copy.deepcopy(value)
                    for key, value in state.items()
                }
                self._set_state(view, values)

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

    @property
    def statistics(self) -> Mapping[int, Statistics]:
        """Statistics that take the change of the fp32 master for the wanted one: the class tells no more."""
        return self._statistics

    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.groups.param_groups)

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
        for number in ready:
            self._join(number)
        for number, span, parameter in self._members:
            if number in ready and self._names[parameter] not in self._skipped:
                parameter.grad = ready[number][span].view(parameter.shape)
        before = {
            number: (self._values[number].clone(), self._slices[number].storage.clone())
            for number in ready
            if number in self._statistics
        }
        self.groups.step()
        for number, span, parameter in self._members:
            parameter.grad = None
            view = self._values[number][span]
            if parameter.data_ptr() != view.data_ptr():  # the class assigned to `p.data`
                view.copy_(parameter.reshape(-1))
                parameter.data = view.view(parameter.shape)
        for number in ready:
            schemes.write(self._schemes[number], self._slices[number], self._values[number])
        for number, span, parameter in self._members:
            if number in before:
                self._account(number, span, parameter, before[number], ready[number])
        for number in ready:
            self._free_joined(number)
            written(number)

    def _account(
        self,
        number: int,
        span: slice,
        parameter: nn.Parameter,
        before: tuple[torch.Tensor, torch.Tensor],
        gradient: torch.Tensor,
    ) -> None:
        """Fill the statistics of one view's blocks."""
        weight, seen = (values[span] for values in before)
        moments = [value for value in self._state(parameter).values() if _is_moment(value, parameter)]
        master = self._values[number][span]
        account(
            self._statistics[number].blocks[span.start // BLOCK : -(-span.stop // BLOCK)],
            master - weight,
            (weight, seen, gradient[span]),
            (master, self._slices[number].storage[span], moments[-1].reshape(-1) if moments else None),
        )

    def _fp32(self, number: int) -> torch.Tensor:
        piece, of = self._pieces[number], self._slices[number]
        if self._schemes[number].master is Master.SPLIT:
            return torch.empty_like(piece.storage, dtype=torch.float32)
        return piece.storage if of.master is None else of.master

    def _join(self, number: int) -> None:
        """Fill the fp32 form of a split master."""
        if self._schemes[number].master is Master.SPLIT:
            values = self._values[number]
            values.untyped_storage().resize_(values.numel() * values.element_size())
            values.copy_(schemes.read(self._schemes[number], self._slices[number]))

    def _free_joined(self, number: int) -> None:
        """Free the memory of a split master's fp32 form."""
        if self._schemes[number].master is Master.SPLIT:
            self._values[number].untyped_storage().resize_(0)

    def master(self, number: int) -> torch.Tensor:
        return schemes.read(self._schemes[number], self._slices[number])

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        schemes.write(self._schemes[number], self._slices[number], values)

    def states(self, number: int) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = {}
        for segment, span, parameter in self._members:
            if segment != number:
                continue
            for key, value in self._state(parameter).items():
                if _is_moment(value, parameter):
                    flat = states.setdefault(
                        key, torch.zeros_like(self._pieces[number].storage, dtype=torch.float32)
                    )
                    flat[span] = value.reshape(-1).float()
        return states

    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        for segment, span, parameter in self._members:
            held = self._state(parameter).get(key) if segment == number else None
            if held is not None:
                held.copy_(values[span].view(held.shape))

    @property
    def kind(self) -> str:
        return type(self.groups).__name__

    def counters(self) -> Counters:
        """Return the state, with the name of its dtype in place of each moment.

        torch makes moments in the first step, so a load must make them: a step without any begins anew.
        """
        counters: Counters = {}
        for _, _, parameter in self._members:
            if state := self._state(parameter):
                mine = counters[self._names[parameter]] = {}
                for key, value in state.items():
                    mine[key] = dtype_name(value) if _is_moment(value, parameter) else value
        return counters

    def set_counters(self, counters: Counters) -> None:
        for owner in self._state_owners.values():
            owner.state.clear()
        for _, _, parameter in self._members:
            mine = counters.get(self._names[parameter])
            if mine is not None:
                state = {
                    key: torch.zeros_like(parameter, dtype=getattr(torch, value), requires_grad=False)
                    if isinstance(value, str)
                    else copy.deepcopy(value)
                    for key, value in mine.items()
                }
                self._set_state(parameter, state)

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        return tuple(key for key, value in counters.get(name, {}).items() if isinstance(value, str))

    def resting(self, number: int) -> tuple[torch.dtype | None, tuple[torch.dtype, ...]]:
        held, dtypes = self._slices[number].master, []
        for segment, _, parameter in self._members:
            values = self._state(parameter).values() if segment == number else ()
            dtypes += [value.dtype for value in values if _is_moment(value, parameter)]
        return None if held is None else held.dtype, tuple(dict.fromkeys(dtypes))


_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.bool)
"""Dtypes of moments whose every value is an fp32 number."""


def dtype_name(value: torch.Tensor) -> str:
    if value.dtype not in _IN_FP32:
        raise UnsupportedError(
            "optimizer",
            "must keep moments whose values fp32 can hold, to be saved",
            got=value.dtype,
            do="Keep them in fp32.",
        )
    return str(value.dtype).removeprefix("torch.")


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
    """Return the nested optimizers with a state of their own, by the prefix of their moments' names here."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for each in nested(optimizer):
        owners.setdefault(id(each.state), each)
    return {f"inner{depth}_" if depth else "": owner for depth, owner in enumerate(owners.values())}


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the caller's attributes of a parameter, which an optimizer may read: `p.no_decay = True`."""
    ours = ("_zerodrift", "ds_")
    return {key: value for key, value in vars(parameter).items() if not key.startswith(ours)}


def _is_moment(value: object, parameter: nn.Parameter) -> bool:
    """Return whether a value of an optimizer's state has one number per element."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _scheme(piece: Owned) -> Scheme:
    """Return the scheme of a shard; refuse one in which torch's classes would compute something else."""
    scheme = scheme_of(piece)
    if scheme.state is not State.FP32:
        raise UnsupportedError(
            f"state: {scheme.state}",
            "must be fp32 for an optimizer that rounds its moments itself",
            do=(
                f"Name {either(known.name for known in ELEMENTWISE)} in the config's `optimizer` "
                "block, or leave `state` out."
            ),
        )
    if scheme.master is Master.SAME and piece.storage.dtype is not torch.float32:
        raise UnsupportedError(
            "master: same",
            "must have fp32 storage for a torch optimizer",
            got=piece.storage.dtype,
            do="Name the optimizer in the config's `optimizer` block, or use `master: split`.",
        )
    return scheme


def group_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str], plan: Plan) -> dict[str, int]:
    """Return row name -> its parameter group, after checking that the optimizer can serve this model."""
    _require_supported(optimizer, names)
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            row = plan.row(names.get(id(parameter), ""))
            if row is None:
                raise UnsupportedError(
                    "optimizer",
                    "must be built over the model's own parameters",
                    got=f"one of shape {tuple(parameter.shape)} that the model does not have",
                    do="Build it over `model.parameters()`.",
                )
            groups[row.name] = number
    return groups


def _require_supported(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse a class that no placement helps, and an object that the engine cannot step."""
    kind = type(optimizer).__name__
    use = f"Use {either(known.name for known in ALGORITHMS)}."
    for base in type(optimizer).__mro__:
        if base.__name__ in UNSUPPORTED:
            raise UnsupportedError(
                "optimizer",
                "must update a parameter from its own gradient",
                got=f"{kind}, which {UNSUPPORTED[base.__name__]}",
                do=use,
            )
    shared = {id(group) for group in optimizer.param_groups}
    for inner in nested(optimizer):
        own = [group for group in inner.param_groups if id(group) not in shared]
        if any(id(parameter) in names for group in own for parameter in group["params"]):
            raise UnsupportedError(
                "optimizer",
                "must share its parameter groups with the optimizer that it wraps, which would step nothing",
                got=f"{kind} around {type(inner).__name__} with groups of its own",
                do=f"Set the {kind}'s `param_groups` to those of the {type(inner).__name__}.",
            )
    if needs_closure(type(optimizer)):
        raise UnsupportedError(
            "optimizer",
            "must have a `step` that needs no closure: the engine's gradients are reduced before it",
            got=f"{kind}.step{inspect.signature(type(optimizer).step)}",
            do=use,
        )
    begun = (state for owner in state_owners(optimizer).values() for state in owner.state.values())
    if any(not ("step" in state and float(state["step"]) == 0) for state in begun):
        raise UnsupportedError(
            "optimizer",
            "must not have taken a step before `initialize`",
            got=f"{kind} with state",
            do="Build it anew.",
        )


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether the `step` of a class cannot be called without an argument."""
    _, *rest = inspect.signature(inspect.unwrap(kind.step)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is each.empty and each.kind not in kinds for each in rest)
