"""Whole values of parameters that `fully_shard` holds, out and in: see `engine/parameter.py`.

Inside `gathered` the model's parameters are plain tensors of our own making, so what a user does with them
(write, `load_state_dict`, assign) cannot meet torch's own bookkeeping; at the end they are compared with
storage and what was changed is taken over.

Invariant: reading changes nothing; writing goes to storage, and an element that was not changed keeps
every bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.backends.attached import TensorsAttached
from zerodrift.backends.backwards import Passes
from zerodrift.backends.group import LiveGroup, Member
from zerodrift.backends.optimizer import TensorUpdater
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.attached import READ, WRITE
from zerodrift.errors import ModelError, Problems, UnsupportedError
from zerodrift.plan.table import Row


@dataclass(frozen=True, slots=True)
class TensorValues:
    """The whole values of one rank's members."""

    members: Mapping[str, Member]
    """By row name."""
    groups: Sequence[LiveGroup]
    updater: TensorUpdater | None
    passes: Passes
    attached: TensorsAttached
    comm: Collectives

    @contextlib.contextmanager
    def gathered(self, rows: Mapping[str, Row], write: bool) -> Iterator[dict[str, torch.Tensor]]:
        members_by_name = {name: self._of(row) for name, row in rows.items()}
        members = {member.row.name: member for member in members_by_name.values()}
        self._drop()
        before = {name: hanging(member) for name, member in members.items()}
        shown = {name: self._show(member) for name, member in members.items()}
        values = {name: shown[member.row.name].data for name, member in members_by_name.items()}
        showing = self.attached.showing(shown, write=write)
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
                hang(member, before[name])  # of an outer context, what that shows

    def _show(self, member: Member) -> nn.Parameter:
        compute = member.row.columns.compute.torch
        whole = member.whole(member.storage().to(compute), self.comm)
        parameter = nn.Parameter(whole, requires_grad=member.sharded.requires_grad)
        if parameter.requires_grad:
            parameter.register_hook(_refusal(member.row.name))
        hang(member, parameter)
        return parameter

    @torch.no_grad()
    def _take_over(self, member: Member, shown: nn.Parameter) -> None:
        current = hanging(member)
        values = shown if current is None or current is member.sharded else current
        values = values.detach().to(shown.dtype).contiguous()
        self.comm.broadcast(values.view(-1), 0, "world")
        storage, mine = member.storage(), member.mine(values)
        storage.copy_(torch.where(storage.to(mine.dtype) == mine, storage, mine.to(storage.dtype)))

    def _drop(self) -> None:
        """Give up what is gathered."""
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
        member.storage().copy_(member.mine(value))

    # --- gradients --------------------------------------------------------------------------------------

    @torch.no_grad()
    def has_gradient(self, row: Row) -> bool:
        self.passes.flush()
        return self._of(row).sharded.grad is not None

    @torch.no_grad()
    def gradient(self, row: Row, unscale: float) -> torch.Tensor:
        member = self._of(row)
        return member.whole(member.gradient().float(), self.comm) * unscale

    @torch.no_grad()
    def set_gradient(self, row: Row, value: torch.Tensor) -> None:
        member = self._of(row)
        member.gradient().copy_(member.mine(value))

    # --- moments ----------------------------------------------------------------------------------------

    def moment_names(self, row: Row) -> tuple[str, ...]:
        return tuple(self._moments(row))

    def moments(self, row: Row) -> dict[str, torch.Tensor]:
        member = self._of(row)
        return {key: member.whole(part.float(), self.comm) for key, part in self._moments(row).items()}

    @torch.no_grad()
    def set_moment(self, row: Row, key: str, value: torch.Tensor) -> None:
        self._moments(row)[key].copy_(self._of(row).mine(value))

    def _moments(self, row: Row) -> dict[str, torch.Tensor]:
        return {} if self.updater is None else self.updater.moments(row.name)

    def _of(self, row: Row) -> Member:
        return self.members[row.name]


def _require_unwritten(then: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    problems = Problems()
    for name, value in values.items():
        if not torch.equal(_bits(then[name]), _bits(value)):
            problems.add(name, WRITE, got=READ, do="It is dropped.")
    problems.raise_as(ModelError)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def _refusal(name: str) -> Any:
    """A hook on what is shown of a parameter: the parameter itself would get nothing."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UnsupportedError(
            name,
            "must get its gradients from the model's forward on backend fsdp2",
            got="one of what `engine.gathered()` shows",
            do="Use the native backend, or leave the context for the loss.",
        )

    return refuse


def hanging(member: Member) -> Any:
    """What the model holds in the parameter's first place."""
    module, attribute = member.places[0]
    return module._parameters.get(attribute)


def hang(member: Member, parameter: nn.Parameter) -> None:
    """Put a parameter into all of its places."""
    for module, attribute in member.places:
        module._parameters[attribute] = parameter
