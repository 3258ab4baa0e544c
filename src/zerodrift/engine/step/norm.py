"""Norm: the global gradient norm of a step, whether to skip, and what all ranks must agree on.

Gradients stay summed and scaled. One factor for loss scale, average and clip goes into the update, which
multiplies once in fp32.

Invariant: the norm is the root of an exact sum of squares (`kernels/squares.py`), so that its bits are the
same at every stage and for every number of slices.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerodrift.comm import AxisName, Collectives
from zerodrift.engine.trained_segment import TrainedSegment
from zerodrift.errors import RankError
from zerodrift.kernels import squares

AXES: tuple[AxisName, ...] = ("shard", "tensor")
"""Axes whose ranks hold different parts of a gradient."""

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The global gradient norm of a step."""

    value: float
    """The norm of the averaged, unscaled gradient; not finite where a gradient is not."""
    written: bool = False
    """Whether user code wrote to visible weights on some rank."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)

    def multiplier(self, unscale: float, clip: float) -> float:
        """Return the factor of the summed gradient in the update."""
        if not clip:
            return unscale
        factor = clip / (self.value + CLIP_EPSILON)
        return unscale * factor if factor < 1.0 else unscale


@dataclass(frozen=True, slots=True)
class RankAgreement:
    """Facts of a step that must be the same on every rank."""

    order: int = 0
    """Checksum of the units in the order in which they were gathered. In different orders, ranks may have
    mixed the weights of different units."""
    unreduced: Sequence[tuple[int, str]] = ()
    """(segment, its first such parameter) of segments with gradients set by hand. If only some ranks have
    them, their reduction would wait for ever."""
    dropped: int = 0
    """Batches without a backward. If ranks have different numbers, gradients of different batches were
    paired."""
    without_update: tuple[str, ...] = ()
    """Parameters that this step does not update. If ranks differ, they would train different models."""
    rates: tuple[float, ...] = ()
    """Learning rate of each group. If ranks differ, slices of one model would move differently."""

    def checksum(self) -> int:
        """Return a checksum below 2^40, so that a sum over ranks stays far below 2^63."""
        parts = ([number for number, _ in self.unreduced], self.dropped, self.without_update, self.rates)
        return (self.order + (zlib.crc32(str(parts).encode()) if any(parts) else 0)) % (1 << 40)


def global_norm(
    gradients: Sequence[torch.Tensor],
    comm: Collectives,
    unscale: float,
    agreement: RankAgreement,
    written: torch.Tensor | None = None,
    checksum: torch.Tensor | None = None,
) -> Norm:
    """Return the norm of this rank's flat gradient slices over all ranks."""
    summed = torch.zeros(squares.DIGITS + 4, dtype=torch.int64, device=comm.mesh.device)
    squares.add_squares(gradients, summed[:-3])
    summed[-1:].fill_(agreement.checksum())  # `summed[-1] = number` would wait for the device
    if written is not None and checksum is not None:
        summed[-3], summed[-2] = written, checksum
    mine = summed[-2:].clone()
    ranks = 1
    for axis in AXES:
        if comm.mesh.size(axis) > 1:
            summed = comm.all_reduce_sum(summed, axis, "the norm")
            ranks *= comm.mesh.size(axis)
    summed[-2:] = (summed[-2:] != ranks * mine).long()
    if comm.mesh.size("pipeline") > 1:
        summed = comm.all_reduce_sum(summed, "pipeline", "the norm")
    *places, was_written, weights_differ, differ = comm.read(summed)
    if differ:
        raise _disagreement(agreement, comm)
    if weights_differ:
        must = "must show the same weights on every rank"
        do = "Some ranks wrote values that others did not: write inside `engine.gathered(write=True)`, "
        do += "where all ranks get rank 0's values."
        raise RankError("engine.module", must, got="different ones", do=do)
    return Norm(math.sqrt(squares.total(places)) * unscale, bool(was_written))


def _disagreement(agreement: RankAgreement, comm: Collectives) -> RankError:
    """Find out what ranks do not agree on, and return the error. Every rank calls this."""
    reports: list[tuple[int, RankAgreement]] = [(comm.mesh.rank(), agreement)]
    for axis in AXES:
        reports = [entry for rank in comm.all_gather_object(reports, axis) for entry in rank]
    if len({report.dropped for _, report in reports}) > 1:
        listed = ", ".join(f"rank {rank} {report.dropped}" for rank, report in reports[:8])
        must = "must follow a forward in training on every rank or on none"
        got = f"batches of this step without one: {listed}"
        do = "If a rank skips a batch, gradients of different batches are paired: skip it on all "
        do += "ranks, or multiply its loss by 0 and call `backward`."
        return RankError("backward", must, got=got, do=do)
    still: list[set[str]] = [set(report.without_update) for _, report in reports]
    if any(names != still[0] for names in still):
        return RankError(
            min(name for names in still for name in names if any(name not in other for other in still)),
            "must be trained on every rank or on none",
            got="`requires_grad` false, or a removed gradient, on some ranks only",
            do="Freeze and unfreeze it on all ranks.",
        )
    rates = {str(list(report.rates)): rank for rank, report in reversed(reports)}
    if len(rates) > 1:
        must = "must have the same learning rates on every rank"
        got = ", ".join([f"{each} on rank {rank}" for each, rank in rates.items()][:4])
        do = "Give a schedule that reads a loss, such as ReduceLROnPlateau, the mean over all ranks."
        return RankError("optimizer.param_groups", must, got=got, do=do)
    held = [dict(report.unreduced) for _, report in reports]
    some = [name for entry in held for number, name in entry.items() if any(number not in e for e in held)]
    if some:
        return set_on_some(some[0])
    must = "must be used in the same order on every rank"
    got = "different orders in this step"
    do = "A module that only some ranks run, such as an expert without tokens, cannot be a unit: "
    do += "name a larger module in `sharding.units`."
    return RankError("units", must, got=got, do=do)


def set_on_some(name: str) -> RankError:
    """Return the error for a gradient that was set on some ranks only."""
    must = "must be set on every rank or on none if it is set outside a backward"
    got = f"one of `{name}` on some ranks only"
    do = "Set it on all ranks, to zeros on a rank with nothing to add."
    return RankError("param.grad", must, got=got, do=do)


def bad_parameters(parts: Iterable[tuple[str, torch.Tensor]], comm: Collectives) -> list[str]:
    """Return the names of the first five parameters whose gradient has a NaN or an infinity on any rank.

    `parts` are this rank's slices of each gradient, in the order of the plan, the same on every rank.
    """
    mine = [(place, name) for place, (name, part) in enumerate(parts) if not torch.isfinite(part).all()]
    for axis in AXES:
        mine = sorted({entry for rank in comm.all_gather_object(mine, axis) for entry in rank})
    bad = dict.fromkeys(name for _, name in mine)
    stages = comm.all_gather_object(list(bad)[:5], "pipeline")
    return list(dict.fromkeys(name for names in stages for name in names))[:5]


def parts_of(segments: Iterable[TrainedSegment]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter, this rank's slice of its reduced gradient), also where the slice is empty."""
    for segment in segments:
        if segment.reduced is None:
            continue
        start, numel = segment.start_of(segment.reduced), segment.reduced.numel()
        yield from ((row.name, segment.reduced[row.within(start, numel)]) for row in segment.rows)
