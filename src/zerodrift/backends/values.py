"""Full values out of an `fsdp2` engine and back in: the counterpart of `engine/values.py`.

Inside `gathered` the model's parameters are plain tensors of our own making, so what a user does with them
(write, `load_state_dict`, assign) cannot meet torch's own bookkeeping; at the end they are compared with
storage and what was changed is taken over.

Invariant: reading changes nothing; writing goes to storage, and an element that was not changed keeps
every bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerodrift.backends.group import Member
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.errors import ModelError, Problems, UnsupportedError, did_you_mean

if TYPE_CHECKING:
    from zerodrift.backends.fsdp2 import FsdpEngine


class TensorValues:
    """Access to the full values of one engine."""

    def __init__(self, engine: FsdpEngine) -> None:
        self._engine = engine

    @contextlib.contextmanager
    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters by name, full, in their compute dtype. With `write`, rank 0's values at the end of the
        context become everybody's."""
        wanted = [row.name for row in self._engine.plan.rows] if names is None else list(names)
        found = {name: self._member(name) for name in wanted}
        members = {member.row.name: member for member in found.values()}
        for group in self._engine.units:
            group.drop()
        before = {name: hanging(member) for name, member in members.items()}
        shown = {name: self._show(member) for name, member in members.items()}
        values = {name: shown[member.row.name].data for name, member in found.items()}
        showing = self._engine.attached.showing(shown, write=write)
        try:
            if not write:
                then = {name: value.clone() for name, value in values.items()}
                with showing:
                    yield values
                _require_unwritten(then, values)
                return
            with showing, raise_on_all_ranks(self._engine.comm):
                yield values
            for name, member in members.items():
                self._take_over(member, shown[name])
        finally:
            for name, member in members.items():
                hang(member, before[name])  # of an outer context, what that shows

    def _show(self, member: Member) -> nn.Parameter:
        compute = member.row.columns.compute.torch
        whole = member.whole(member.storage().to(compute), self._engine.comm)
        parameter = nn.Parameter(whole, requires_grad=member.sharded.requires_grad)
        if parameter.requires_grad:
            parameter.register_hook(_refusal(member.row.name))
        hang(member, parameter)
        return parameter

    @torch.no_grad()
    def _take_over(self, member: Member, shown: nn.Parameter) -> None:
        found = hanging(member)
        values = shown if found is None or found is member.sharded else found
        values = values.detach().to(shown.dtype).contiguous()
        self._engine.comm.broadcast(values.view(-1), 0, "world")
        storage, mine = member.storage(), member.mine(values)
        storage.copy_(torch.where(storage.to(mine.dtype) == mine, storage, mine.to(storage.dtype)))

    # --- masters ----------------------------------------------------------------------------------------

    def master(self, name: str) -> torch.Tensor:
        member = self._member(name)
        return member.whole(member.storage().float(), self._engine.comm)

    @torch.no_grad()
    def set_master(self, name: str, value: torch.Tensor) -> None:
        member = self._member(name)
        for group in self._engine.units:
            group.drop()
        member.storage().copy_(member.mine(value))

    # --- gradients --------------------------------------------------------------------------------------

    @torch.no_grad()
    def gradient(self, name: str) -> torch.Tensor:
        member = self._trained(name)
        self._engine.passes.flush()
        if member.sharded.grad is None:
            return torch.zeros(member.shape, device=member.storage().device)
        whole = member.whole(member.gradient().float(), self._engine.comm)
        return whole * self._engine.progress.unscale

    @torch.no_grad()
    def set_gradient(self, name: str, value: torch.Tensor) -> None:
        member = self._trained(name)
        self._engine.passes.flush()
        if member.sharded.grad is None:
            raise UnsupportedError(
                name,
                "must have a gradient to replace",
                got="none in this step",
                do="Call it after `engine.backward` and before `engine.step`.",
            )
        member.gradient().copy_(member.mine(value / self._engine.progress.unscale))

    # --- moments ----------------------------------------------------------------------------------------

    def state(self, name: str) -> dict[str, torch.Tensor]:
        member = self._trained(name)
        return {
            key: member.whole(part.float(), self._engine.comm) for key, part in self._moments(member).items()
        }

    @torch.no_grad()
    def set_state(self, name: str, key: str, value: torch.Tensor) -> None:
        member = self._trained(name)
        held = self._moments(member)
        if key not in held:
            raise ModelError(
                name,
                f"must have optimizer state {key!r}",
                got=", ".join(held) or "none yet",
                do="State is there after the first step.",
            )
        held[key].copy_(member.mine(value))

    def _moments(self, member: Member) -> dict[str, torch.Tensor]:
        updater = self._engine.updater
        return {} if updater is None else updater.moments(member.row.name)

    # --- rows -------------------------------------------------------------------------------------------

    def _member(self, name: str) -> Member:
        row = self._engine.plan.row(name)
        if row is None:
            known = [name for row in self._engine.plan.rows for name in row.names]
            todo = did_you_mean(name, known)
            raise ModelError(name, "must be a parameter of the model", got="no such name", do=todo)
        return self._engine.members[row.name]

    def _trained(self, name: str) -> Member:
        member = self._member(name)
        if not member.row.trained:
            raise ModelError(name, "must be trained", got="a frozen parameter")
        return member


def _require_unwritten(then: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    problems = Problems()
    for name, value in values.items():
        if not torch.equal(_bits(then[name]), _bits(value)):
            got = "a write inside `engine.gathered()`, which shows values"
            problems.add(
                name, "must be written inside `engine.gathered(write=True)`", got=got, do="It is dropped."
            )
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
