"""Parameters that are in pieces before there is an engine: what `zero.Init` leaves.

Each rank holds an equal part of a parameter, in the dtype in which the model made it, and the parameter
shows a value that cannot pass for one, in its full shape. Whoever needs the values puts the parts together
(`GatheredParameters`, or the engine when it takes them over, one at a time).

Invariant: the parts together are rank 0's values, bit for bit, until a `GatheredParameters` with a
`modifier_rank` replaces them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from zerodrift.deepspeed import comm
from zerodrift.deepspeed.parameters import mark, unmark
from zerodrift.engine.place import ELSEWHERE
from zerodrift.errors import ModelError

SLICE = "_zerodrift_slice"
"""The attribute of a parameter that is in pieces."""


@dataclass(slots=True)
class ParameterSlice:
    """This rank's part of a parameter."""

    number: int
    """Parameters are put together in this order, on every rank alike."""
    shape: torch.Size
    flat: torch.Tensor
    """`[ceil(numel / ranks)]`; the last ones are padded."""
    shown: torch.Tensor | None = None
    """What the parameter shows instead of its values: one element."""

    def whole(self) -> torch.Tensor:
        """The parameter's values. Collective."""
        if self.shown is not None and self.shown.dtype.is_floating_point and not self.shown.isnan():
            raise ModelError(
                "parameter",
                f"of shape {list(self.shape)} must be written inside "
                "`zero.GatheredParameters(parameter, modifier_rank=0)` while it is in pieces",
                got=f"{self.shown.item():g} outside of it",
            )
        flat = self.flat.new_empty(self.flat.numel() * comm.get_world_size())
        comm.all_gather_into_tensor(flat, self.flat)
        return flat[: math.prod(self.shape)].view(self.shape)

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank holds of `whole`, padded."""
        count = self.flat.numel()
        mine = values.reshape(-1)[comm.get_rank() * count :][:count]
        return torch.cat([mine, mine.new_zeros(count - mine.numel())])

    def replace(self, values: torch.Tensor) -> None:
        self.flat = self.part_of(values).to(self.flat)


def slice_of(parameter: torch.Tensor) -> ParameterSlice | None:
    return getattr(parameter, SLICE, None)


def take_apart(parameter: nn.Parameter, number: int, dtype: torch.dtype | None) -> None:
    """Leave this rank's part of rank 0's values. Collective."""
    if slice_of(parameter) is not None or parameter.is_meta or comm.get_world_size() == 1:
        return
    values = parameter.detach()
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    values = values.contiguous()
    comm.broadcast(values, 0)
    count = -(-values.numel() // comm.get_world_size())
    part = ParameterSlice(number, values.shape, values.new_empty(count))
    part.replace(values)
    setattr(parameter, SLICE, part)
    setattr(parameter, ELSEWHERE, part.whole)
    mark(parameter, number)
    hide(parameter, part)


def hide(parameter: nn.Parameter, part: ParameterSlice) -> None:
    """Show what cannot pass for a value, in one element's memory."""
    dtype = part.flat.dtype
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    part.shown = torch.full((), value, dtype=dtype, device=part.flat.device)
    parameter.data = part.shown.expand(part.shape)


def release(parameter: nn.Parameter) -> None:
    """The engine has taken the values over."""
    if slice_of(parameter) is not None:
        delattr(parameter, SLICE)
        unmark(parameter)
