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


def global_norm(
    gradients: Iterable[torch.Tensor],
    comm: Collectives,
    unscale: float,
    order: int = 0,
    unreduced: Sequence[UnreducedSegment] = (),
    dropped: int = 0,
    shown: VisibleWeights | None = None,
) -> Norm:
    """One small collective, and one more over the stages of a pipeline; the one place of a step where the
    host waits for the device. `gradients` are the flat slices of this rank.

    `order` is a checksum of the units that this rank has gathered since the last step, in their order. Where
    another rank has another, weights of different units may have been mixed. Where another has
    other `strays`, a reduction of them would wait for ever. Where another has `dropped` another number of
    batches, whose backward never came, gradients of different batches were paired. Where what is `shown`
    differs, ranks train different models. All are a RankError, on all ranks.
    """
    # Below 2^40, so that a sum over ranks stays far below 2^63.
    numbers = [segment.segment for segment in unreduced]
    done = order + (zlib.crc32(str((numbers, dropped)).encode()) if unreduced or dropped else 0)
    done %= 1 << 40
    summed = torch.zeros(squares.DIGITS + 4, dtype=torch.int64, device=comm.mesh.device)
    places = summed[:-3]
    for gradient in gradients:
        squares.digits(squares.block_square_sums(gradient), places)
    summed[-1] = done
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
    written, weights, differ = comm.read(summed)[-3:]
    if differ:
        raise _different(unreduced, dropped, comm)
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
    return Norm(math.sqrt(squares.total(summed[:-3])) * unscale, bool(written))


def _different(unreduced: Sequence[UnreducedSegment], dropped: int, comm: Collectives) -> RankError:
    """What ranks do not agree on; that they do not, all of them know."""
    reports = [(comm.mesh.rank(), dropped, unreduced)]
    for axis in AXES:
        reports = [entry for rank in comm.all_gather_object(reports, axis) for entry in rank]
    if len({count for _, count, _ in reports}) > 1:
        listed = ", ".join(f"rank {rank} {count}" for rank, count, _ in reports[:8])
        return RankError(
            "backward",
            "must follow a forward in training on every rank or on none",
            got=f"batches of this step without one: {listed}",
            do=(
                "Where a rank skips a batch, gradients of different batches are paired: let all skip "
                "it, or multiply its loss by 0 and call `backward`."
            ),
        )
    held = [{segment.segment: segment.name for segment in entry} for _, _, entry in reports]
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
