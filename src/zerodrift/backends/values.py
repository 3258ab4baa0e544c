"""The values of parameters under `fully_shard`: whole by name, as flat pieces, and updated by torch.

Inside `gathered` the model shows plain tensors of our own, so that a user's writes, `load_state_dict` and
assignments cannot disturb torch's bookkeeping. At the end changed elements are copied into storage. The piece
of a segment is the local parts of its parameters, one after the other. All replicas hold the same piece, and
each reads a share of it.

The optimizer is torch's, built from the config's `optimizer` block (fused, if torch has that), or the
caller's, whose parameters are replaced by the sharded ones. Storage is the master, and the moments are
DTensors of the same dtype and layout. The state of AdamW, Adam and SGD has the native engine's form, so that
the other backend can resume a saved run; the state of other classes has that of `TorchOptimizerUpdater`. An
update multiplies the gradient once in fp32, before torch's step.

Invariants: reading changes nothing; writing changes storage, except for elements that stay the same. Over all
ranks the shares are every element of the model, each exactly once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerodrift.backends.group import Backwards, LiveGroup, Member, register, registered
from zerodrift.backends.tensor_guard import TensorGuard
from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine import READ, WRITE, SegmentShard, Span
from zerodrift.errors import ModelError, Problems, UnsupportedError
from zerodrift.optim import (
    Counters,
    RefuseNewData,
    flat,
    group_of,
    loaded_state,
    require_for_dtensors,
    saved_state,
)
from zerodrift.optimizers import SGD
from zerodrift.plan import Plan, Row


@dataclass(frozen=True, slots=True)
class TensorValues:
    """Reads and writes whole values of one rank's members, which are given by row name."""

    members: Mapping[str, Member]
    groups: Sequence[LiveGroup]
    updater: TensorUpdater | None
    backwards: Backwards
    guard: TensorGuard
    comm: Collectives

    @contextlib.contextmanager
    def gathered(self, rows: Mapping[str, Row], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        members_by_name = {name: self._of(row) for name, row in rows.items()}
        members = {member.row.name: member for member in members_by_name.values()}
        self._drop()
        before = {name: registered(member.places) for name, member in members.items()}
        shown = {name: self._show(member) for name, member in members.items()}
        values = {name: shown[member.row.name].data for name, member in members_by_name.items()}
        showing = self.guard.showing(shown, write=write)
        try:
            if not write:
                then = {name: value.clone() for name, value in values.items()}
                with showing:
                    yield values
                _require_unwritten(then, values)
                return
            with showing, raise_on_all_ranks(self.comm):
                yield values
            for name, member in members.items():
                self._take_over(member, shown[name])
        finally:
            for name, member in members.items():
                register(member.places, before[name])  # an outer context may show another

    def _show(self, member: Member) -> nn.Parameter:
        compute = member.row.columns.compute.torch
        whole = member.whole(member.storage().to(compute), self.comm)
        parameter = nn.Parameter(whole, requires_grad=member.sharded.requires_grad)
        if parameter.requires_grad:
            parameter.register_hook(_refuse_gradients(member.row.name))
        register(member.places, parameter)
        return parameter

    @torch.no_grad()
    def _take_over(self, member: Member, shown: nn.Parameter) -> None:
        current = registered(member.places)
        values = shown if current is None or current is member.sharded else current
        values = values.detach().to(shown.dtype).contiguous()
        self.comm.broadcast(values.view(-1), 0, "world")
        storage, mine = member.storage(), member.part_of(values)
        storage.copy_(torch.where(storage.to(mine.dtype) == mine, storage, mine.to(storage.dtype)))

    def _drop(self) -> None:
        for group in self.groups:
            group.drop()

    # --- values and masters -----------------------------------------------------------------------------

    def shape(self, row: Row) -> tuple[int, ...]:
        return self._of(row).shape

    def value(self, row: Row) -> torch.Tensor:
        with self.gathered({row.name: row}, write=False) as shown:
            return shown[row.name].clone()

    def set_value(self, row: Row, value: torch.Tensor) -> None:
        with self.gathered({row.name: row}, write=True) as shown, torch.no_grad():
            shown[row.name].copy_(value)

    def master(self, row: Row) -> torch.Tensor:
        member = self._of(row)
        return member.whole(member.storage().float(), self.comm)

    @torch.no_grad()
    def set_master(self, row: Row, value: torch.Tensor) -> None:
        member = self._of(row)
        self._drop()
        member.storage().copy_(member.part_of(value))

    # --- gradients and moments --------------------------------------------------------------------------

    @torch.no_grad()
    def has_gradient(self, row: Row) -> bool:
        self.backwards.flush()
        return self._of(row).sharded.grad is not None

    @torch.no_grad()
    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        member = self._of(row)
        return member.whole(member.gradient().float(), self.comm) * unscale

    @torch.no_grad()
    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        member = self._of(row)
        member.gradient().copy_(member.part_of(value))

    def moment_names(self, row: Row) -> tuple[str, ...]:
        return tuple(self._moments(row))

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        member = self._of(row)
        return {key: member.whole(part.float(), self.comm) for key, part in self._moments(row).items()}

    @torch.no_grad()
    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None:
        self._moments(row)[key].copy_(self._of(row).part_of(value))

    def _moments(self, row: Row) -> dict[str, torch.Tensor]:
        return {} if self.updater is None else self.updater.moments(row.name)

    def _of(self, row: Row) -> Member:
        return self.members[row.name]


def _require_unwritten(then: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    problems = Problems()
    for name, value in values.items():
        bits = [each.reshape(-1).view(torch.uint8) for each in (then[name], value)]
        if not torch.equal(*bits):
            problems.add(name, WRITE, got=READ, do="It is dropped.")
    problems.raise_as(ModelError)


def _refuse_gradients(name: str) -> Callable[[torch.Tensor], NoReturn]:
    """Return a hook that refuses a gradient of a shown parameter, which the engine would not get."""

    def refuse(gradient: torch.Tensor) -> NoReturn:
        must = "must get its gradients from the model's forward on backend fsdp2"
        got = "a gradient of a value from `engine.gathered()`"
        do = "Use the native backend, or leave the context for the loss."
        raise UnsupportedError(name, must, got=got, do=do)

    return refuse


# --- this rank's pieces: see `engine/shards.py` -----------------------------------------------------------


class DTensorShard(SegmentShard):
    """This rank's piece of one segment, without padding."""

    def __init__(
        self, members: Sequence[Member], updater: TensorUpdater | None, copy: tuple[int, int]
    ) -> None:
        self._members = members
        self._updater = updater if any(member.row.trained for member in members) else None
        self.updated = self._updater is not None
        ends = list(itertools.accumulate((member.range.numel for member in members), initial=0))
        self.numel = ends[-1]
        self._places = [(member, slice(*ends[n : n + 2])) for n, member in enumerate(members)]
        self.held = self.filled = tuple(_spans(members, 0, self.numel))
        index, copies = copy
        self.share = tuple(_spans(members, *(self.numel * n // copies for n in (index, index + 1))))
        self.rows: tuple[Row, ...] = tuple(member.row for member in members)
        self.dtype = torch.float32 if self.updated else members[0].row.columns.storage.dtype.torch

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.numel, dtype=self.dtype, device=self._members[0].storage().device)

    def weights(self) -> torch.Tensor:
        return self.stored().to(self.dtype)

    def stored(self) -> torch.Tensor:
        return torch.cat([member.storage() for member in self._members])

    def moments(self) -> dict[str, torch.Tensor]:
        moments: dict[str, torch.Tensor] = {}
        for member, place in self._places:
            for key, held in self._moments_of(member).items():
                if key not in moments:
                    moments[key] = torch.zeros(self.numel, device=held.device)
                moments[key][place] = held
        return moments

    @torch.no_grad()
    def set_weights(self, values: torch.Tensor) -> None:
        for member, place in self._places:
            member.storage().copy_(values[place])

    def set_moment(self, key: str, values: torch.Tensor) -> None:
        for member, place in self._places:
            held = self._moments_of(member).get(key)
            if held is not None:
                held.copy_(values[place])

    def _moments_of(self, member: Member) -> dict[str, torch.Tensor]:
        return {} if self._updater is None else self._updater.moments(member.row.name)


def _spans(members: Sequence[Member], low: int, high: int) -> Iterator[Span]:
    """Yield the spans in [low, high) of the parts of all members, one after the other."""
    begin = 0
    for member in members:
        first, last = max(begin, low), min(begin + member.range.numel, high)
        if first < last:
            yield Span(member.row, member.range.start + first - begin, slice(first, last))
        begin += member.range.numel


# --- the optimizer ------------------------------------------------------------------------------------------


class TensorUpdater:
    """An `OptimizerState` around a torch optimizer over DTensors."""

    def __init__(
        self,
        plan: Plan,
        groups: Sequence[LiveGroup],
        optimizer: torch.optim.Optimizer | None,
        names: Mapping[int, str],
    ) -> None:
        members = {member.row.name: member for group in groups for member in group.trained}
        if optimizer is None:
            assert plan.policy.optimizer is not None
            algorithm, arguments = flat.arguments(plan.policy.optimizer)
            # torch's fused SGD does not know DTensors (2.13).
            fused = {} if algorithm is SGD else {"fused": True}
            parameters = [member.sharded for member in members.values()]
            self.groups = getattr(torch.optim, algorithm.torch)(parameters, **arguments, **fused)
            self.group_of: Mapping[str, int] = dict.fromkeys(members, 0)
        else:
            self.groups = optimizer
            self.group_of = group_of(optimizer, names, plan)
            if flat.algorithm_of(optimizer) is None:
                require_for_dtensors(optimizer, self.group_of, plan)
            for number, group in enumerate(optimizer.param_groups):
                held = [name for name, place in self.group_of.items() if place == number]
                group["params"] = [members[name].sharded for name in held if name in members]
        self._members = members
        self._updated = [member for name, member in members.items() if name in self.group_of]
        ours = flat.algorithm_of(self.groups)
        self._algorithm = ours[0] if ours is not None else None
        self.kind = type(self.groups).__name__ if ours is None else ours[0].kind
        self._steps = 0

    @torch.no_grad()
    def step(self, multiplier: float) -> None:
        """Step. A parameter without a gradient gets zeros, as on the native backend."""
        gradients = [member.gradient() for member in self._updated]
        if multiplier != 1.0 and gradients:
            torch._foreach_mul_(gradients, multiplier)
        first_of_a_class = self._steps == 0 and self._algorithm is None
        with RefuseNewData(self.groups) if first_of_a_class else contextlib.nullcontext():
            self.groups.step()
        self._steps += 1

    def moments(self, name: str) -> dict[str, torch.Tensor]:
        """Return views of this rank's parts of one parameter's moments."""
        parameter = self._members[name].sharded
        state, shape = self.groups.state.get(parameter, {}), parameter.shape
        moments = {k: v for k, v in state.items() if isinstance(v, DTensor) and v.shape == shape}
        return {key: value.to_local().view(-1) for key, value in moments.items()}

    # --- state that is not one number per element ---------------------------------------------------------

    def counters(self) -> Counters:
        if self._algorithm is not None:
            return {"": {"steps": self._steps}}
        state = self.groups.state
        held = [member for member in self._updated if member.sharded in state]
        return {member.row.name: saved_state(state[member.sharded], member.sharded) for member in held}

    def set_counters(self, counters: Counters) -> None:
        if self._algorithm is None:
            for member in self._updated:
                if member.row.name in counters:
                    mine = loaded_state(counters[member.row.name], member.sharded)
                    self.groups.state[member.sharded] = mine
            return
        # Make the state that torch would have made by now.
        self._steps = steps = int(counters[""]["steps"])
        names = self.moment_names("", counters)
        for member in self._updated:
            state = {name: torch.zeros_like(member.sharded, requires_grad=False) for name in names}
            if self._algorithm is not SGD and steps:
                # Fused updates read it on the device of the parameter.
                state["step"] = torch.tensor(float(steps), device=member.storage().device)
            self.groups.state.pop(member.sharded, None)
            if state:
                self.groups.state[member.sharded] = state

    def moment_names(self, name: str, counters: Counters) -> tuple[str, ...]:
        if self._algorithm is None:
            return tuple(key for key, value in counters.get(name, {}).items() if isinstance(value, str))
        if (name and name not in self.group_of) or not counters[""]["steps"]:
            return ()
        return self._algorithm.kept(self.groups.param_groups)
