"""Sharded parameters without an engine: made by `zero.Init`, or left by an engine that was destroyed.

Each rank holds a shard, in the dtype in which the model made the parameter. The parameter itself has its
shape and no values (`engine/habits/absent_parameter.py`). `GatheredParameters` gathers it, and so does an
engine that takes it over. While a model is built, a parameter is lent to code that uses its values: gathered,
and sharded again later.

Invariant: the shards together are rank 0's values, bit for bit, until a `GatheredParameters` with a
`modifier_rank` replaces them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from zerodrift.deepspeed.parameters.attributes import mark, show_shard
from zerodrift.deepspeed.parameters.values import unmark_parameters
from zerodrift.deepspeed.tools import collectives as comm
from zerodrift.engine import (
    ELSEWHERE,
    STAYS,
    AbsentParameter,
    Engine,
    absent_class,
    mark_absent,
    mark_gathered,
    native,
)
from zerodrift.errors import ModelError

SHARD = "_zerodrift_slice"

_INSIDE = "Do so inside `zero.GatheredParameters`, with a `modifier_rank` to change it, or "
BEFORE_ENGINE = f"{_INSIDE}give the model to `initialize` first."
AFTER_ENGINE = f"{_INSIDE}call `initialize` again, for its engine was destroyed."


@dataclass(slots=True)
class ParameterShard:
    number: int
    """Its place in the order of gathers, which is the same on every rank."""
    shape: torch.Size
    flat: torch.Tensor
    """The values that this rank holds. Shape [elements of this rank], which may be [0]."""
    absent: type[AbsentParameter]
    """The class of the parameter while it is sharded."""
    count: int
    """Elements per rank of the flat buffer that was divided, of which the parameter may be a part."""
    parts: int
    """Number of different shards. Rank `parts` holds the same shard as rank 0."""
    offset: int = 0
    """Offset of the parameter in the buffer."""
    placeholder: torch.Tensor | None = None
    """One element, expanded to the parameter's shape while it is sharded; None while it is gathered."""
    casts: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    """Placeholders in other dtypes. A parameter with one of them as its data was cast."""
    lent: nn.Parameter | None = None
    """The parameter while it is lent."""

    @property
    def is_gathered(self) -> bool:
        return self.placeholder is None and self.lent is None

    def span(self, rank: int) -> slice:
        """Return the elements that a rank holds."""
        start, numel = rank % self.parts * self.count - self.offset, math.prod(self.shape)
        low = min(max(start, 0), numel)
        return slice(low, max(low, min(start + self.count, numel)))

    def keep(self, values: torch.Tensor) -> None:
        """Replace the shard by this rank's part of the values."""
        self.flat = values.reshape(-1)[self.span(dist.get_rank())].clone()

    def whole(self) -> torch.Tensor:
        """Gather the values. Collective."""
        numel, ranks = math.prod(self.shape), dist.get_world_size()
        most = min(self.count, numel)
        sent = self.flat.new_zeros(most)
        sent[: self.flat.numel()] = self.flat
        received = self.flat.new_empty(most * ranks)
        comm.all_gather_into_tensor(received, sent)
        if self.offset == 0:  # only the last parts are shorter
            return received[:numel].view(self.shape)
        whole = self.flat.new_empty(numel)
        for rank in range(self.parts):
            span = self.span(rank)
            whole[span] = received[rank * most :][: span.stop - span.start]
        return whole.view(self.shape)

    def values_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Gather the values, unless another tensor was put in the parameter's place. Collective."""
        self.take_back()
        if self.placeholder is not None and not self.follow_cast(parameter):
            must = "must be written inside `zero.GatheredParameters` while it is sharded"
            do = "Pass `modifier_rank=0`, and write into it there."
            raise ModelError(self.absent.path, must, got="another tensor in its place", do=do)
        return self.whole()

    def gather(self, parameter: nn.Parameter) -> None:
        """Replace the placeholder by the values. Collective."""
        values = self.values_of(parameter)
        mark_gathered([parameter])
        parameter.data, self.placeholder = values, None

    def release(self, parameter: nn.Parameter) -> None:
        """Replace the values by a placeholder."""
        self.placeholder = _placeholder(self.flat.dtype, self.flat.device)
        self.casts = {}
        self.absent.cast, self.absent.whole = staticmethod(self.cast), staticmethod(self.values_of)
        mark_gathered([parameter])
        parameter.data = self.placeholder.expand(self.shape)
        mark_absent([parameter], [self.absent])
        show_shard(parameter, self.flat)

    def take_back(self) -> None:
        """Shard a lent parameter again. Rank 0's values are kept. Collective."""
        lent, self.lent = self.lent, None
        if lent is not None:
            values = lent.detach().contiguous()
            comm.broadcast(values, 0)
            self.keep(values)
            self.release(lent)

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor | None:
        self.follow_cast(parameter)
        if not (self.flat.is_floating_point() and dtype.is_floating_point):
            return None
        element = self.casts.setdefault(dtype, _placeholder(dtype, self.flat.device))
        expanded = element.expand(self.shape)
        expanded.__class__ = self.absent
        return expanded

    def follow_cast(self, parameter: nn.Parameter) -> bool:
        """Cast the shard if the parameter was cast. Return False if the parameter has no placeholder."""
        if self.placeholder is None:
            return False
        place = parameter.data_ptr()
        if place == self.placeholder.data_ptr():
            return True
        cast = self.casts.get(parameter.dtype)
        if cast is None or place != cast.data_ptr():
            return False
        self.flat, self.placeholder, self.casts = self.flat.to(cast.dtype), cast, {}
        show_shard(parameter, self.flat)
        return True


def _placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return NaN, or the smallest integer."""
    value = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((), value, dtype=dtype, device=device)


def shard_of(parameter: torch.Tensor) -> ParameterShard | None:
    return getattr(parameter, SHARD, None)


def _attach(parameter: nn.Parameter, shard: ParameterShard) -> None:
    reference = weakref.ref(parameter)

    def values_for_engine() -> torch.Tensor:
        """Return the values for an engine that takes the parameter over."""
        parameter = reference()
        if parameter is None:
            return shard.whole()
        values = shard.values_of(parameter)
        mark_gathered([parameter])
        return values

    setattr(parameter, SHARD, shard)
    setattr(parameter, ELSEWHERE, values_for_engine)
    mark(parameter, shard.number)
    shard.release(parameter)


# --- before an engine -------------------------------------------------------------------------------------


def shard_parameter(
    parameter: nn.Parameter, number: int, dtype: torch.dtype | None, path: str, lend: Callable[[bool], bool]
) -> None:
    """Shard rank 0's values. On one rank the parameter stays whole. Collective."""
    if shard_of(parameter) is not None or parameter.is_meta:
        return
    values = parameter.detach()
    if dtype is not None and values.is_floating_point():
        values = values.to(dtype)
    ranks = dist.get_world_size()
    if ranks == 1:
        mark(parameter, number)
        parameter.data = values
        show_shard(parameter, values.reshape(-1))
        return
    values = values.contiguous()
    comm.broadcast(values, 0)
    absent = absent_class(path, BEFORE_ENGINE)
    absent.borrow = staticmethod(lend)
    shard = ParameterShard(number, values.shape, values, absent, -(-values.numel() // ranks), ranks)
    shard.keep(values)
    _attach(parameter, shard)
    setattr(parameter, STAYS, True)


def guard(module: nn.Module) -> None:
    """Make a forward before `initialize` an error, because it would compute with placeholders."""
    if _require_gathered not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_require_gathered)


def _require_gathered(module: nn.Module, args: object) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        shard = shard_of(parameter)
        if shard is not None and shard.follow_cast(parameter):
            made = "by `zero.Init`, or by `from_pretrained` at stage 3"
            must = f"must run in the engine of `deepspeed.initialize`, because the model was sharded {made}"
            got = f"`{name}` of shape {list(shard.shape)} without its values"
            do = "Give the model to `initialize`, or run it inside `zero.GatheredParameters`."
            raise ModelError(f"forward of {type(module).__name__}", must, got=got, do=do)


def forget_shards(model: nn.Module) -> None:
    """Remove the attributes and hooks of sharded parameters that an engine has taken over."""
    for parameter in model.parameters():
        if shard_of(parameter) is not None:
            delattr(parameter, SHARD)
    unmark_parameters(model)
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _require_gathered]:
            del hooks[key]


# --- after an engine --------------------------------------------------------------------------------------


def keep_shards(engine: Engine) -> Callable[[], None]:
    """Record the shards of an engine before it is destroyed. Call the returned function afterwards, so that
    the parameters stay sharded and can be gathered or given to another engine."""
    shards: list[tuple[nn.Parameter, ParameterShard]] = []
    for segment in native(engine.executor).segments:
        if not segment.sharded or segment.axis != "shard":
            continue
        count = segment.spec.padded // segment.ranks
        for row, parameter in zip(segment.rows, segment.parameters, strict=True):
            if row.parts > 1:
                continue  # experts differ between ranks
            flat = segment.storage[row.within(segment.rank * count, count)]
            absent = absent_class(row.name, AFTER_ENGINE)
            place = count, segment.ranks, row.offset
            shards.append((parameter, ParameterShard(len(shards), parameter.shape, flat, absent, *place)))

    def attach() -> None:
        for parameter, shard in shards:
            if isinstance(parameter, AbsentParameter):  # not one that was gathered meanwhile
                _attach(parameter, shard)

    return attach
