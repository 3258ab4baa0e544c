"""One multiplier per step: loss scale, averaging, global norm, clip, and whether to skip.

Gradients are never touched for any of it: they stay summed and scaled as they are, and one number, the
product of everything, goes into the update, which multiplies once in fp32.

Invariant: the norm is the exact sum of the square sums of all blocks (`kernels/squares.py`), which has no
order: it is the same at every stage and for every way to slice, bit for bit.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import AxisName
from zerodrift.engine.trained import TrainedSegment
from zerodrift.errors import NonFiniteError, RankError
from zerodrift.kernels import squares
from zerodrift.policy.nouns import LossScale

AXES: tuple[AxisName, ...] = ("shard", "tensor")
"""Whose ranks hold different parts of a gradient."""

CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as `torch.nn.utils.clip_grad_norm_` does."""


class Scaler:
    """The multiplier of the loss, static or dynamic, by DeepSpeed's keys.

    An overflow first spends `hysteresis`; once it is spent, every overflow halves the scale, down to
    `minimum`. After `window` steps that follow a good one the scale doubles and the hysteresis is refilled;
    `consecutive` refills it after every good step.
    """

    def __init__(self, spec: LossScale | None) -> None:
        self._spec = spec
        self.scale = spec.initial if spec else 1.0
        self._left = spec.hysteresis if spec else 0
        self._good = 0

    @property
    def active(self) -> bool:
        return self._spec is not None

    def update(self, overflow: bool) -> None:
        """After every step, skipped or not."""
        spec = self._spec
        if spec is None or not spec.dynamic:
            return
        if overflow:
            self._good = 0
            if self._left > 1:
                self._left -= 1
                return
            if self.scale <= spec.minimum:
                raise NonFiniteError(
                    "fp16.min_loss_scale",
                    "must leave room for the loss scale to fall",
                    got=f"gradients that overflow at the minimum, {spec.minimum:g}",
                    do="Lower the learning rate, lower `fp16.min_loss_scale`, or use bf16.",
                )
            self.scale = max(self.scale / 2, spec.minimum)
            return
        self._good += 1
        if spec.consecutive:
            self._left = spec.hysteresis
        stable = self._good - 1  # DeepSpeed counts from the first good step, not with it
        if stable > 0 and stable % spec.window == 0:
            self._left = spec.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "left": self._left, "good": self._good}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self._left, self._good = int(state["left"]), int(state["good"])


@dataclass(frozen=True, slots=True)
class UnreducedSegment:
    """A segment that waits to be reduced although no backward asks for it."""

    segment: int
    name: str
    """Of a parameter whose gradient was set by hand."""


@dataclass(frozen=True, slots=True)
class VisibleWeights:
    """What this rank's model shows before an update, on the device."""

    written: torch.Tensor
    """Above 0 where others than the engine wrote to it."""
    checksum: torch.Tensor
    """Of what all ranks hold alike; below 2^40."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The global gradient norm of a step."""

    value: float
    """Of the averaged, unscaled gradient; not finite where a gradient is not."""
    written: bool = False
    """Whether on some rank others than the engine wrote to what the model shows."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value)

    def multiplier(self, unscale: float, clip: float) -> float:
        """What the update multiplies the summed gradient by."""
        if not clip:
            return unscale
        factor = clip / (self.value + CLIP_EPSILON)
        return unscale * factor if factor < 1.0 else unscale


@dataclass(frozen=True, slots=True)
class BetweenRanks:
    """What all ranks must have done alike since the last step."""

    order: int = 0
    """A checksum of the units that were gathered, in their order. Where another rank has another, weights of
    different units may have been mixed."""
    unreduced: Sequence[UnreducedSegment] = ()
    """Where another has others, a reduction of them would wait for ever."""
    dropped: int = 0
    """Batches whose backward never came. Where another has another number, gradients of different batches
    were paired."""
    left_alone: tuple[str, ...] = ()
    """Parameters that are not updated. Where another has others, ranks would train different models."""

    def checksum(self) -> int:
        """Below 2^40, so that a sum over ranks stays far below 2^63."""
        numbers = [segment.segment for segment in self.unreduced]
        told = (numbers, self.dropped, self.left_alone)
        return (self.order + (zlib.crc32(str(told).encode()) if any(told) else 0)) % (1 << 40)


def global_norm(
    gradients: Sequence[torch.Tensor],
    comm: Collectives,
    unscale: float,
    apart: BetweenRanks | None = None,
    shown: VisibleWeights | None = None,
) -> Norm:
    """One small collective, and one more over the stages of a pipeline; the one place of a step where the
    host waits for the device. `gradients` are the flat slices of this rank.

    Where ranks are `apart`, or what is `shown` differs, it is a RankError, on all ranks.
    """
    apart = apart or BetweenRanks()
    summed = torch.zeros(squares.DIGITS + 4, dtype=torch.int64, device=comm.mesh.device)
    squares.add_squares(gradients, summed[:-3])
    summed[-1] = apart.checksum()
    if shown is not None:
        summed[-3], summed[-2] = shown.written, shown.checksum
    mine = summed[-2:].clone()
    ranks = 1
    for axis in AXES:
        if comm.mesh.size(axis) > 1:
            summed = comm.all_reduce_sum(summed, axis, "the norm")
            ranks *= comm.mesh.size(axis)
    summed[-2:] = (summed[-2:] != ranks * mine).long()
    if comm.mesh.size("pipeline") > 1:
        summed = comm.all_reduce_sum(summed, "pipeline", "the norm")
    *places, written, weights, differ = comm.read(summed)
    if differ:
        raise _different(apart, comm)
    if weights:
        raise RankError(
            "engine.module",
            "must show the same weights on every rank",
            got="different ones",
            do=(
                "Something was written on some ranks only, or another value on each: write inside "
                "`engine.gathered(write=True)`, where rank 0's values become everybody's."
            ),
        )
    return Norm(math.sqrt(squares.total(places)) * unscale, bool(written))


def _different(apart: BetweenRanks, comm: Collectives) -> RankError:
    """What ranks do not agree on; that they do not, all of them know."""
    reports: list[tuple[int, BetweenRanks]] = [(comm.mesh.rank(), apart)]
    for axis in AXES:
        reports = [entry for rank in comm.all_gather_object(reports, axis) for entry in rank]
    if len({told.dropped for _, told in reports}) > 1:
        listed = ", ".join(f"rank {rank} {told.dropped}" for rank, told in reports[:8])
        return RankError(
            "backward",
            "must follow a forward in training on every rank or on none",
            got=f"batches of this step without one: {listed}",
            do=(
                "Where a rank skips a batch, gradients of different batches are paired: let all skip "
                "it, or multiply its loss by 0 and call `backward`."
            ),
        )
    alone: list[set[str]] = [set(told.left_alone) for _, told in reports]
    if any(names != alone[0] for names in alone):
        return RankError(
            min(name for names in alone for name in names if any(name not in other for other in alone)),
            "must be trained on every rank or on none",
            got="`requires_grad` false, or a gradient that was taken away, on some ranks only",
            do="Freeze and thaw on all ranks alike.",
        )
    held = [{segment.segment: segment.name for segment in told.unreduced} for _, told in reports]
    some = [name for entry in held for number, name in entry.items() if any(number not in e for e in held)]
    if some:
        return set_on_some(some[0])
    return RankError(
        "units",
        "must be used in the same order on every rank",
        got="different orders in this step",
        do=(
            "A unit that only some ranks run, such as an expert without tokens, cannot be gathered by "
            "itself: name a larger one in `sharding.units`."
        ),
    )


def set_on_some(name: str) -> RankError:
    """For gradients that only some ranks have, of units whose reduction all take part in."""
    return RankError(
        "param.grad",
        "must be set on every rank or on none, where it is set outside of a backward",
        got=f"one of `{name}` on some ranks only",
        do="Set it on all of them, to zeros where a rank has nothing to add.",
    )


def bad_parameters(parts: Iterable[tuple[str, torch.Tensor]], comm: Collectives, limit: int = 5) -> list[str]:
    """Names of parameters with a NaN or an infinity in their gradient, on any rank. `parts` are what this
    rank has of each gradient, in the order of the plan, which is the same on every rank."""
    mine = [(place, name) for place, (name, part) in enumerate(parts) if not torch.isfinite(part).all()]
    for axis in AXES:
        mine = sorted({entry for rank in comm.all_gather_object(mine, axis) for entry in rank})
    bad = dict.fromkeys(name for _, name in mine)
    stages = comm.all_gather_object(list(bad)[:limit], "pipeline")
    return list(dict.fromkeys(name for names in stages for name in names))[:limit]


def parts_of(segments: Iterable[TrainedSegment]) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter, what this rank has of its reduced gradient), also where that is nothing."""
    for segment in segments:
        if segment.reduced is None:
            continue
        start = 0 if segment.ranks == 1 else segment.rank * segment.reduced.numel()
        for row in segment.rows:
            low = max(row.offset - start, 0)
            high = min(row.offset + row.numel - start, segment.reduced.numel())
            yield row.name, segment.reduced[low : max(low, high)]
