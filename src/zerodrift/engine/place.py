"""Move a model's parameters and buffers to where the plan says, once, when an engine is made.

Rank 0 broadcasts the values of a parameter that has memory, in the dtype in which the model holds them. A
parameter without memory is filled from a source (files, or the initialization that its module recorded): each
rank reads the elements of its own share, and ranks exchange the shares of buffers that rest whole.

Invariant: afterwards every parameter is a view of its segment, in the compute dtype, with the same values at
every stage and on every number of ranks. Masters are made of the given bits, never of rounded ones.

[Note: filling] Reading may fail on one rank. So all segments are read first, and ranks exchange shares only
after all of them have read theirs. The shares of a segment are equal: where something is sharded, a rank's
share is the slice that it owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import nn

from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.dtypes import BLOCK, DType, from_torch
from zerodrift.engine.accumulation import GradientBuffers
from zerodrift.engine.habits.parameter_guard import find_other_engines
from zerodrift.engine.segment import FlatSegment, SecondaryCopy
from zerodrift.engine.step.gather import LiveUnit
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import ModelError, Problems
from zerodrift.kernels import PackedRun, resting_zeros
from zerodrift.model import is_dtensor, recipe
from zerodrift.optim import split
from zerodrift.plan import Plan, Row, gathered_bytes, round_up
from zerodrift.policy import Master

Masters = dict[int, torch.Tensor]
"""Segment number -> the part of the first masters that this rank's optimizer owns, as `Owned.initial`."""

ELSEWHERE = "_zerodrift_values"
"""Attribute of a parameter whose values are in pieces on all ranks: a function that puts the pieces together.
Every rank calls it once, in the order of the plan."""

WINDOW = 1 << 20
"""Elements that are read or broadcast at once."""


class ValueSource(Protocol):
    """Values of parameters or buffers by name, a run of elements at a time."""

    def exact(self, name: str) -> torch.dtype:
        """Return a dtype that holds all values of the name exactly."""

    def fill(self, name: str, start: int, out: torch.Tensor) -> None:
        """Write the elements from `start` on of the row-major flattening into flat `out`, cast to its
        dtype."""

    def fill_packed(self, name: str, start: int, run: PackedRun, at: int, numel: int) -> bool:
        """Write `numel` elements from `start` on into a packed run, from its element `at` on. Return False if
        the source does not hold their codes and scales in the run's format."""


ValueSources = Mapping[str, ValueSource]
"""Sources of values that the model does not hold, by the first name of a parameter or buffer."""


def place(
    plan: Plan,
    model: nn.Module,
    comm: Collectives,
    pools: GradientBuffers,
    sources: ValueSources | None = None,
) -> tuple[list[FlatSegment], list[LiveUnit], Masters]:
    """Make the segments and units of a plan, with their values, and the first masters."""
    sources = sources or {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    check(plan, model, parameters, sources)
    tie(plan, model, parameters)
    segments: list[FlatSegment] = []
    fillers: list[SegmentFiller | PackedFiller] = []
    for number, spec in enumerate(plan.segments):
        rows = [plan.rows[index] for index in spec.rows]
        held = [parameters[row.name] for row in rows]
        unit = plan.units[spec.unit].name
        if spec.columns.update is None:
            segment = FlatSegment(number, spec, rows, held, comm, unit)
        else:
            segment = TrainedSegment(number, spec, rows, held, comm, pools, unit)
        again = plan.secondary_axis(spec)
        if again is not None:
            segment.secondary = SecondaryCopy(comm, spec, again, segment.label)
        packed = segment.packed
        filler = SegmentFiller(segment) if packed is None else PackedFiller(segment, packed)
        for row, parameter in zip(rows, held, strict=True):
            if row.name not in sources:
                for at, values in broadcast_values(row, parameter, comm):
                    filler.give(row.offset + at, values)
            free_parameter(parameter, comm.mesh.device)
        segment.adopt()
        segments.append(segment)
        fillers.append(filler)
    with raise_on_all_ranks(comm):  # see [Note: filling]
        for filler in fillers:
            for row in filler.segment.rows:
                if row.name in sources:
                    filler.fill(row, sources[row.name])
        buffers = read_buffers(plan, comm, sources)
    for filler in fillers:
        if any(row.name in sources for row in filler.segment.rows):
            filler.exchange(comm)
    place_buffers(plan, model, comm, buffers)
    masters = {
        filler.segment.number: filler.segment.owned if filler.master is None else filler.master
        for filler in fillers
        if isinstance(filler, SegmentFiller) and isinstance(filler.segment, TrainedSegment)
    }
    modules = dict(model.named_modules())
    units = [
        LiveUnit(
            number,
            spec,
            modules[spec.name],
            [segments[index] for index in spec.segments],
            gathered_bytes(plan, spec),
            plan.policy.sharding.keep_gathered,
        )
        for number, spec in enumerate(plan.units)
    ]
    return segments, units, masters


def check(
    plan: Plan, model: nn.Module, parameters: Mapping[str, nn.Parameter], sources: ValueSources
) -> None:
    """Refuse a model that differs from the planned one, or has a value without a source."""
    problems = Problems()
    alive, gone = find_other_engines(model)
    if alive:
        problems.add("model", "must not have another engine", got="one that is still alive", do=_DESTROY)
    for path in _script_modules(model):
        must = "must run in Python, where its parameters are gathered and cast"
        problems.add(path or "model", must, got="a module of TorchScript", do=_SCRIPT)
    for row in plan.rows:
        parameter = parameters.get(row.name)
        if parameter is None:
            must = "must be a parameter of the model, as planned"
            problems.add(row.name, must, got="no such parameter", do=_PLAN)
        elif is_dtensor(parameter):
            problems.add(
                row.name, "must be a plain tensor on the native backend", got="a DTensor", do=_SPREAD
            )
        elif tuple(parameter.shape) != row.whole_shape:
            must = f"must have shape {list(row.whole_shape)}, as planned"
            problems.add(row.name, must, got=list(parameter.shape), do=_PLAN)
        elif gone.intersection(row.names) and row.name not in sources:
            problems.add(
                row.name, "must hold values", got="one that was sharded when its engine ended", do=_KEEP
            )
        elif parameter.is_meta and row.name not in sources:
            problems.add(row.name, "must hold values", got="the meta device", do=_BUILD)
        elif from_torch(parameter.dtype) is not row.source:
            problems.add(row.name, f"must be {row.source}, as planned", got=parameter.dtype, do=_PLAN)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in sources:
            problems.add(name, "must hold values, being a buffer", got="the meta device", do=_BUILD)
    problems.raise_as(ModelError)


def _script_modules(model: nn.Module) -> list[str]:
    """Return the paths of outermost TorchScript modules with parameters. Their forward runs no hooks."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        is_script = isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters())
        if is_script and not is_inside:
            found.append(path)
    return found


_PLAN = "Plan from the module that is trained."
_SCRIPT = "Pass the module that `torch.jit.trace` or `torch.jit.script` was given."
_SPREAD = "Set `backend: fsdp2`, or build the model without tensor parallelism."
_DESTROY = "Call its `destroy` first."
_KEEP = "Call `destroy` inside `engine.gathered()`, or build the model again and load a checkpoint."
_BUILD = "Build the model on a real device, or inside `zerodrift.empty()`."


def tie(plan: Plan, model: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Register one parameter under all names that the model declares to be tied."""
    for row in plan.rows:
        for name in row.names[1:]:
            if parameters.get(name) is not parameters[row.name]:
                path, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(path), attribute, parameters[row.name])


# --- one segment ----------------------------------------------------------------------------------------


class SegmentFiller:
    """Writes the first values of one segment to its storage and its master."""

    def __init__(self, segment: FlatSegment) -> None:
        self.segment = segment
        kind = segment.update.master if isinstance(segment, TrainedSegment) else Master.SAME
        self._split = kind is Master.SPLIT
        owned = segment.owned
        self.master: torch.Tensor | None = None
        """Values in fp32, or the low halves of a split master. None where storage is the master."""
        if kind is not Master.SAME:
            dtype = torch.int16 if self._split else torch.float32
            self.master = resting_zeros(owned.shape, dtype, owned.device)
        self._buffers = [segment.storage] if self.master is None else [segment.storage, self.master]

    def give(self, offset: int, values: torch.Tensor) -> None:
        """Write a run of the segment's values, from element `offset` on, as far as they rest on this rank."""
        for flat in self._buffers:
            start = self.segment.start_of(flat)
            low, high = max(start, offset), min(start + flat.numel(), offset + values.numel())
            if low < high:
                mine = values[low - offset : high - offset]
                mine = mine.float() if self._split else mine
                if flat is not self.master:
                    mine = self.segment.at_rest(mine)
                elif self._split:
                    mine = split(mine)[1]
                flat[low - start : high - start].copy_(mine)

    def fill(self, row: Row, source: ValueSource) -> None:
        """Read the elements of a row in this rank's share from a source."""
        low, high, start = _share_of_row(self.segment, row)
        if low >= high:
            return
        places = []
        for flat in self._buffers:
            first = self.segment.start_of(flat)
            places.append(flat[low - first : high - first])
        exact = from_torch(source.exact(row.name))
        if self.master is None or (self._split and exact is not None and DType.BF16.holds(exact)):
            source.fill(row.name, start, places[0])  # low halves of zero mean that storage is exact
        elif not self._split:
            source.fill(row.name, start, places[1])
            places[0].copy_(places[1])
        else:
            for first, values in _windows(source, row.name, start, high - low, places[0].device):
                self.give(low + first, values)

    def exchange(self, comm: Collectives) -> None:
        """Gather the shares of other ranks into buffers that rest whole."""
        for flat in self._buffers:
            exchange(self.segment, flat, comm)


class PackedFiller:
    """Encodes the first values of a segment whose values rest packed."""

    def __init__(self, segment: FlatSegment, packed: PackedRun) -> None:
        self.segment, self._packed = segment, packed
        self._start = segment.rank * packed.numel if segment.sharded else 0

    def give(self, offset: int, values: torch.Tensor) -> None:
        low = max(self._start, offset)
        high = min(self._start + self._packed.numel, offset + values.numel())
        if low < high:
            self._packed.encode(low - self._start, values[low - offset : high - offset])

    def fill(self, row: Row, source: ValueSource) -> None:
        low, high, start = _share_of_row(self.segment, row)
        if low >= high or source.fill_packed(row.name, start, self._packed, low - self._start, high - low):
            return
        for first, values in _windows(source, row.name, start, high - low, self._packed.data.device):
            self._packed.encode(low + first - self._start, values)

    def exchange(self, comm: Collectives) -> None:
        """Gather the codes and the scales that other ranks filled, if the run rests whole."""
        if not self.segment.sharded:
            for part in (self._packed.codes, self._packed.scales):
                _exchange_shares(self.segment, part.view(-1), comm)


def _share_of_row(segment: FlatSegment, row: Row) -> tuple[int, int, int]:
    """Return the range of a row's elements in this rank's share of a segment, and the place of the first one
    in the whole parameter."""
    share = share_of(segment, segment.rank)
    low, high = max(share.start, row.offset), min(share.stop, row.offset + row.numel)
    return low, high, low - row.offset + segment.first_of(row)


def _windows(
    source: ValueSource, name: str, start: int, numel: int, device: torch.device
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (place, values) of `numel` elements of a name in fp32, a window at a time. All windows share the
    same memory."""
    window = torch.empty(min(WINDOW, numel), device=device)
    for first in range(0, numel, WINDOW):
        values = window[: min(WINDOW, numel - first)]
        source.fill(name, start + first, values)
        yield first, values


def share_of(segment: FlatSegment, rank: int) -> slice:
    """Return the elements of a segment that a rank fills; see [Note: filling]."""
    padded, ranks = segment.spec.padded, segment.ranks
    equal = padded % (ranks * BLOCK) == 0
    count = padded // ranks if equal else round_up(-(-padded // ranks), BLOCK)
    return slice(min(padded, rank * count), min(padded, (rank + 1) * count))


def exchange(segment: FlatSegment, flat: torch.Tensor, comm: Collectives) -> None:
    """Gather the shares that other ranks filled, if the buffer is whole on every rank."""
    if flat.numel() == segment.spec.padded:
        _exchange_shares(segment, flat, comm)


def _exchange_shares(segment: FlatSegment, flat: torch.Tensor, comm: Collectives) -> None:
    """Gather the shares of a buffer with all elements of a segment, or with a number of bytes for each block
    of them."""
    padded = segment.spec.padded
    if segment.ranks == 1 or not padded:
        return
    if padded % (segment.ranks * BLOCK) == 0:
        moved = flat.view(torch.uint8)  # nothing is computed on the way, and gloo knows few dtypes
        comm.all_gather(moved, segment.slice_of(moved), segment.axis)
        return
    for rank in range(segment.ranks):
        share = share_of(segment, rank)
        ends = (at * flat.numel() // padded for at in (share.start, share.stop))
        comm.broadcast(flat[slice(*ends)], rank, segment.axis)


def broadcast_values(
    row: Row, parameter: nn.Parameter, comm: Collectives
) -> Iterator[tuple[int, torch.Tensor]]:
    """Broadcast rank 0's values of a parameter, in its own dtype, a window at a time. Yield (place in this
    rank's row, values from there on)."""
    elsewhere = getattr(parameter, ELSEWHERE, None)
    if elsewhere is not None:
        delattr(parameter, ELSEWHERE)
    flat = (parameter.detach() if elsewhere is None else elsewhere()).reshape(-1)
    device = comm.mesh.device
    own = comm.mesh.rank("expert") * row.numel if row.parts > 1 else 0
    for first in range(0, row.whole_numel, WINDOW):
        values = flat[first : first + WINDOW].to(device, copy=True)
        comm.broadcast(values, 0, "data")
        low, high = max(first, own), min(first + values.numel(), own + row.numel)
        if low < high:
            yield low - own, values[low - first : high - first]


def free_parameter(parameter: nn.Parameter, device: torch.device) -> None:
    """Free a parameter's memory. A parameter of the meta device moves to `device` and stays the same object,
    because an optimizer may hold it."""
    empty = torch.empty(0, dtype=parameter.dtype, device=device)
    if torch._has_compatible_shallow_copy_type(parameter.data, empty):
        parameter.data = parameter.data.new_empty(0)
        return
    attributes = {key: value for key, value in parameter.__dict__.items() if key != recipe.ATTRIBUTE}
    torch.utils.swap_tensors(parameter, nn.Parameter(empty, parameter.requires_grad))
    parameter.__dict__.update(attributes)


def read_buffers(plan: Plan, comm: Collectives, sources: ValueSources) -> dict[str, torch.Tensor]:
    """Read the buffers that come from a source, on rank 0."""
    values = {}
    for row in plan.buffers:
        source = sources.get(row.name)
        if source is not None and comm.mesh.rank("data") == 0:
            values[row.name] = torch.empty(row.numel, dtype=row.source.torch)
            source.fill(row.name, 0, values[row.name])
    return values


def place_buffers(plan: Plan, model: nn.Module, comm: Collectives, read: Mapping[str, torch.Tensor]) -> None:
    """Put buffers on the device, in the dtype of their row, with rank 0's values."""
    rows = {row.name: row for row in plan.buffers}
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            path = f"{prefix}.{name}".lstrip(".")
            row = rows.get(path)
            if row is None:
                continue
            if path in read:
                buffer = read[path].view(row.shape)
            elif buffer.is_meta:
                buffer = torch.empty_like(buffer, device="cpu")
            moved = buffer.to(comm.mesh.device, row.storage.torch)
            if moved.numel() and not moved.is_contiguous():
                moved = moved.contiguous()
            comm.broadcast(moved, 0, "data")
            setattr(module, name, moved)
