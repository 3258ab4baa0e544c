"""Any elementwise `torch.optim` class on per-parameter views of what this rank owns.

The optimizer's parameter groups stay, with their options; their parameters become flat fp32 views of this
rank's masters, so `step` is torch's own arithmetic on exactly these values. With fp32 storage the views
are of storage itself; a split master is put together for the step and taken apart after it, so its fp32
form has memory only while it is updated.

Invariant: an element's update is what the same optimizer would do to it in a plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zerodrift.errors import UnsupportedError
from zerodrift.optim import schemes
from zerodrift.optim.schemes import Scheme
from zerodrift.optim.update import Owned, scheme_of
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Master, State

MATRIX_OPTIMIZERS = ("Muon", "Adafactor", "Shampoo", "SOAP", "LBFGS", "SparseAdam")
"""Their update of an element depends on others of its parameter: flat pieces would change it."""


class TorchViews:
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
        """Flat fp32 masters: storage itself, the copy, or for a split one what `_open` fills."""
        views = self._views()
        for number, group in enumerate(optimizer.param_groups):
            held = [name for name, place in group_of.items() if place == number]
            group["params"] = [view for name in held for view in views.get(name, ())]
        for number in self._pieces:
            self._close(number)
        self.groups = optimizer
        self._members = self._find_members()

    def _views(self) -> dict[str, list[nn.Parameter]]:
        """Parameter name -> its views here, none where this rank owns nothing of it."""
        views: dict[str, list[nn.Parameter]] = {}
        self._spans: list[tuple[int, slice, nn.Parameter]] = []
        for number, piece in self._pieces.items():
            for row in piece.rows:
                span = piece.span(row)
                mine: list[nn.Parameter] = []
                if span.stop > span.start:
                    view = self._values[number][span]
                    whole = span.stop - span.start == row.numel
                    parameter = nn.Parameter(view.view(row.shape) if whole else view)
                    self._spans.append((number, span, parameter))
                    mine.append(parameter)
                views[row.name] = mine
        return views

    def _find_members(self) -> list[tuple[int, slice, nn.Parameter]]:
        held = {id(p) for group in self.groups.param_groups for p in group["params"]}
        return [entry for entry in self._spans if id(entry[2]) in held]

    def learning_rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.groups.param_groups)

    @torch.no_grad()
    def update(self, gradients: Mapping[int, torch.Tensor], multiplier: float) -> None:
        ready: dict[int, torch.Tensor] = {}
        for number, flat in gradients.items():
            wide = flat if flat.dtype is torch.float32 else flat.float()
            ready[number] = wide if multiplier == 1.0 else wide.mul_(multiplier)
        for number in ready:
            self._open(number)
        for number, span, parameter in self._members:
            if number in ready:
                parameter.grad = ready[number][span].view(parameter.shape)
        self.groups.step()
        for _, _, parameter in self._members:
            parameter.grad = None
        for number in ready:
            schemes.write(self._schemes[number], self._slices[number], self._values[number])
            self._close(number)

    def _fp32(self, number: int) -> torch.Tensor:
        piece, of = self._pieces[number], self._slices[number]
        if self._schemes[number].master is Master.SPLIT:
            return torch.empty_like(piece.storage, dtype=torch.float32)
        return piece.storage if of.master is None else of.master

    def _open(self, number: int) -> None:
        """Put a split master together."""
        if self._schemes[number].master is Master.SPLIT:
            values = self._values[number]
            values.untyped_storage().resize_(values.numel() * values.element_size())
            values.copy_(schemes.read(self._schemes[number], self._slices[number]))

    def _close(self, number: int) -> None:
        """Give its memory back."""
        if self._schemes[number].master is Master.SPLIT:
            self._values[number].untyped_storage().resize_(0)

    def master(self, number: int) -> torch.Tensor:
        return schemes.read(self._schemes[number], self._slices[number])

    @torch.no_grad()
    def set_master(self, number: int, values: torch.Tensor) -> None:
        schemes.write(self._schemes[number], self._slices[number], values)

    def states(self, number: int) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for owner, span, parameter in self._members:
            if owner != number:
                continue
            for key, value in self.groups.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    flat = found.setdefault(
                        key, torch.zeros_like(self._pieces[number].storage, dtype=torch.float32)
                    )
                    flat[span] = value.reshape(-1).float()
        return found

    def set_state(self, number: int, key: str, values: torch.Tensor) -> None:
        for owner, span, parameter in self._members:
            if owner == number and key in self.groups.state.get(parameter, {}):
                held = self.groups.state[parameter][key]
                held.copy_(values[span].view(held.shape))


def _scheme(piece: Owned) -> Scheme:
    """What the plan says of a piece; refused where torch's classes would do something else."""
    scheme = scheme_of(piece)
    if scheme.state is not State.FP32:
        raise UnsupportedError(
            f"`state: {scheme.state}`: must be fp32 for an optimizer that rounds its moments itself. Name "
            f"AdamW, Adam, SGD or Lion in the config's `optimizer` block, or leave `state` out."
        )
    if scheme.master is Master.SAME and piece.storage.dtype is not torch.float32:
        raise UnsupportedError(
            f"`master: same`: must have fp32 storage for a torch optimizer; got {piece.storage.dtype}. Name "
            f"the optimizer in the config's `optimizer` block, or use `master: split`."
        )
    return scheme


def group_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str], plan: Plan) -> dict[str, int]:
    """Row name -> the optimizer's group it is in; checks that the optimizer can serve this model."""
    kind = type(optimizer).__name__
    if kind in MATRIX_OPTIMIZERS:
        raise UnsupportedError(
            f"`optimizer`: must be elementwise, because a rank holds flat pieces of parameters; got {kind}. "
            f"Use an elementwise optimizer (AdamW, SGD, Lion, ...)."
        )
    if optimizer.state:
        raise UnsupportedError(
            f"`optimizer`: must not have taken a step before `initialize`; got {kind} with state. Build it "
            f"anew."
        )
    found: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            row = plan.row(names.get(id(parameter), ""))
            if row is None:
                raise UnsupportedError(
                    f"`optimizer`: must be built over the model's own parameters; got one of shape "
                    f"{tuple(parameter.shape)} that the model does not have."
                )
            found[row.name] = number
    return found
