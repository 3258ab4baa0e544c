"""Parameters that are in pieces before there is an engine: what `zero.Init` leaves.

Each rank holds an equal part of a parameter, in the dtype in which the model made it, and the parameter has
its shape and no values; see `engine/habits/absent_parameter.py`. Whoever needs the values puts the parts
together (`GatheredParameters`, or the engine when it takes them over, one at a time). While a model is being
made they are lent to whoever asks for them.

Invariant: the parts together are rank 0's values, bit for bit, until a `GatheredParameters` with a
`modifier_rank` replaces them.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from zerodrift.deepspeed import comm
from zerodrift.deepspeed.parameters import mark, unmark
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.absent_parameter import (
    STAYS,
    AbsentParameter,
    absent_class,
    mark_absent,
    mark_gathered,
)
from zerodrift.engine.native import native
from zerodrift.engine.place import ELSEWHERE
from zerodrift.errors import ModelError

SLICE = "_zerodrift_slice"
"""The attribute of a parameter that is in pieces."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Of each rank, what it holds of a parameter that lay in a segment; several may hold the same."""

    offset: int
    """Of the parameter in the segment."""
    numel: int
    count: int
    """Elements of the segment that a rank held."""
    parts: int
    """How many there were: rank `parts` held what rank 0 did."""

    def of(self, rank: int) -> slice:
        start = rank % self.parts * self.count - self.offset
        low = min(max(start, 0), self.numel)
        return slice(low, max(low, min(start + self.count, self.numel)))


@dataclass(slots=True)
class ParameterSlice:
    """This rank's part of a parameter."""

    number: int
    """Parameters are put together in this order, on every rank alike."""
    shape: torch.Size
    flat: torch.Tensor
    """`[ceil(numel / ranks)]`; the last ones are padded."""
    absent: type[AbsentParameter]
    """The class of the parameter while it is in pieces, which says so."""
    spans: Spans | None = None
    """What ranks hold where that is not an equal part."""
    shown: torch.Tensor | None = None
    """What the parameter shows instead of its values: one element."""
    casts: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """What stands for it in other dtypes. A parameter that shows one of these was cast."""
    lent: nn.Parameter | None = None
    """The parameter, while it is whole for whoever asked."""

    @property
    def is_together(self) -> bool:
        """Whether a `GatheredParameters` shows its values."""
        return self.shown is None and self.lent is None

    def take_back(self) -> None:
        """What was lent is rank 0's from now on, and in pieces. Collective."""
        lent, self.lent = self.lent, None
        if lent is not None:
            values = lent.detach().contiguous()
            comm.broadcast(values, 0)
            self.flat = self.part_of(values)
            hide(lent, self)

    def whole(self) -> torch.Tensor:
        """The parameter's values. Collective."""
        if self.spans is not None:
            return self._joined(self.spans)
        flat = self.flat.new_empty(self.flat.numel() * comm.get_world_size())
        comm.all_gather_into_tensor(flat, self.flat)
        return flat[: math.prod(self.shape)].view(self.shape)

    def _joined(self, spans: Spans) -> torch.Tensor:
        """Of parts that are not equal."""
        most = min(spans.count, spans.numel)
        sent = self.flat.new_zeros(most)
        sent[: self.flat.numel()] = self.flat
        there = self.flat.new_empty(most * comm.get_world_size())
        comm.all_gather_into_tensor(there, sent)
        whole = self.flat.new_empty(spans.numel)
        for rank in range(spans.parts):
            span = spans.of(rank)
            whole[span] = there[rank * most :][: span.stop - span.start]
        return whole.view(self.shape)

    def part_of(self, values: torch.Tensor) -> torch.Tensor:
        """What this rank holds of `whole`, padded."""
        if self.spans is not None:
            return values.reshape(-1)[self.spans.of(comm.get_rank())]
        count = self.flat.numel()
        mine = values.reshape(-1)[comm.get_rank() * count :][:count]
        return torch.cat([mine, mine.new_zeros(count - mine.numel())])

    def replace(self, values: torch.Tensor) -> None:
        self.flat = self.part_of(values).to(self.flat)

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        """What a module that is cast sets in the parameter's place."""
        self.settle(parameter)
        if not (self.flat.is_floating_point() and dtype.is_floating_point):
            return None
        nothing = self.casts.setdefault(dtype, _nothing(dtype, self.flat.device))
        stands = nothing.expand(self.shape)
        stands.__class__ = self.absent
        return stands

    def settle(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter shows what stands for it: in another dtype, the part is cast to that."""
        if self.shown is None:
            return False
        place = parameter.data_ptr()
        if place == self.shown.data_ptr():
            return True
        cast = self.casts.get(parameter.dtype)
        if cast is None or place != cast.data_ptr():
            return False
        self.flat, self.shown, self.casts = self.flat.to(cast.dtype), cast, {}
        return True


def slice_of(parameter: torch.Tensor) -> ParameterSlice | None:
    return getattr(parameter, SLICE, None)


def take_apart(
    parameter: nn.Parameter, number: int, dtype: torch.dtype | None, path: str, lend: Callable[[], bool]
) -> None:
    """Leave this rank's part of rank 0's values; one rank's part is the whole. Collective."""
    if slice_of(parameter) is not None or parameter.is_meta:
        return
    values = parameter.detach()
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    mark(parameter, number)
    if comm.get_world_size() == 1:
        parameter.data = values
        return
    values = values.contiguous()
    comm.broadcast(values, 0)
    count = -(-values.numel() // comm.get_world_size())
    absent = absent_class(path, lend, BEFORE)
    part = ParameterSlice(number, values.shape, values.new_empty(count), absent)
    part.replace(values)
    setattr(parameter, SLICE, part)
    setattr(parameter, ELSEWHERE, functools.partial(_taken, weakref.ref(parameter), part))
    setattr(parameter, STAYS, True)
    hide(parameter, part)


def hide(parameter: nn.Parameter, part: ParameterSlice) -> None:
    """Show what cannot pass for a value, in one element's memory."""
    part.shown = _nothing(part.flat.dtype, part.flat.device)
    part.casts = {}
    part.absent.cast = staticmethod(part.cast)
    mark_gathered([parameter])
    parameter.data = part.shown.expand(part.shape)
    mark_absent([parameter], [part.absent])


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One element that cannot pass for a value."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


def guard(module: nn.Module) -> None:
    """Its parameters are in pieces: a forward before there is an engine would compute with NaN."""
    if _require_there not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_require_there)


def _require_there(module: nn.Module, args: object) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        part = slice_of(parameter)
        if part is not None and part.settle(parameter):
            raise ModelError(
                f"forward of {type(module).__name__}",
                "must come after `deepspeed.initialize`, and on its engine, where a model was made in pieces "
                "(`zero.Init`, or `from_pretrained` at stage 3)",
                got=f"`{name}` of shape {list(part.shape)}, whose values are on all ranks",
                do="Give the model to `initialize`, or run it inside `zero.GatheredParameters`.",
            )


def show(parameter: nn.Parameter, part: ParameterSlice) -> None:
    """Put it together. Collective."""
    values = _values(parameter, part)
    mark_gathered([parameter])
    parameter.data, part.shown = values, None


def _values(parameter: nn.Parameter, part: ParameterSlice) -> torch.Tensor:
    """What it is when it is put together. Collective."""
    part.take_back()
    if part.shown is not None and not part.settle(parameter):
        raise ModelError(
            part.absent.path,
            "must be written inside `zero.GatheredParameters` while it is in pieces",
            got="another tensor in its place",
            do="Pass `modifier_rank=0`, and write into it there.",
        )
    return part.whole()


def leave_in_pieces(engine: Engine) -> Callable[[], None]:
    """Before an engine is destroyed: what to call afterwards, so that what it held in slices stays where it
    is, and can be put together, or be another engine's."""
    sharded = [segment for segment in native(engine.executor).segments if segment.sharded]
    pieces: list[tuple[nn.Parameter, ParameterSlice]] = []
    for segment in sharded:
        count = segment.spec.padded // segment.ranks
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            if row.parts > 1 or segment.axis != "shard":
                continue  # a rank has experts that others have not
            spans = Spans(row.offset, row.numel, count, segment.ranks)
            mine = spans.of(comm.get_rank())
            first = row.offset + mine.start - segment.rank * count
            flat = segment.storage[first : first + mine.stop - mine.start] if mine.stop > mine.start else None
            flat = segment.storage[:0] if flat is None else flat
            absent = absent_class(row.name, lambda: False, IN_PIECES)
            part = ParameterSlice(len(pieces), parameter.shape, flat, absent, spans)
            pieces.append((parameter, part))

    def leave() -> None:
        for parameter, part in pieces:
            if not isinstance(parameter, AbsentParameter):
                continue  # it was gathered, and is an ordinary one now
            setattr(parameter, SLICE, part)
            setattr(parameter, ELSEWHERE, functools.partial(_taken, weakref.ref(parameter), part))
            mark(parameter, part.number)
            hide(parameter, part)

    return leave


def _taken(parameter: weakref.ref[nn.Parameter], part: ParameterSlice) -> torch.Tensor:
    """The values, for an engine that makes the parameter its own."""
    held = parameter()
    if held is None:
        return part.whole()
    values = _values(held, part)
    mark_gathered([held])
    return values


BEFORE = (
    "Do so inside `zero.GatheredParameters`, with a `modifier_rank` to change it, or give the model to "
    "`initialize` first."
)
IN_PIECES = (
    "Do so inside `zero.GatheredParameters`, with a `modifier_rank` to change it, or call `initialize` "
    "again, for its engine was destroyed."
)


def release(model: nn.Module) -> None:
    """The engine has taken the values over."""
    for parameter in model.parameters():
        if slice_of(parameter) is not None:
            delattr(parameter, SLICE)
        unmark(parameter)
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _require_there]:
            del hooks[key]
