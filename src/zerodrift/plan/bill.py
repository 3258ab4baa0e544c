"""The cost of a step for one rank: bytes at rest, at peak and on the wire, from the plan alone.

Traffic is counted over `schedule.count_collectives`. A test compares that list with the engine's recorded
collectives, so the estimate follows the engine. Activations depend on the model and are not in the peak.

Invariant: every figure is bytes of one rank, on the most loaded pipeline stage.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from zerodrift.dtypes import BLOCK
from zerodrift.errors import ConfigError
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import ADAMW, of_type
from zerodrift.plan.schedule import (
    Collective,
    count_collectives,
    gathered_bytes,
    most_gathered_bytes,
    prefetch_budget,
)
from zerodrift.plan.stages import part
from zerodrift.plan.table import Plan, Segment, Unit
from zerodrift.policy import (
    ComponentSpec,
    Master,
    MuonUpdate,
    Placed,
    State,
    Update,
    accumulators,
    most_unfinished,
    rank_levels,
)


@dataclass(frozen=True, slots=True)
class RestingBytes:
    storage: int
    buffers: int
    accumulate: int
    """0 if the accumulator is freed after the step."""
    master: int
    state: int

    @property
    def total(self) -> int:
        return self.storage + self.buffers + self.accumulate + self.master + self.state


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the worst moment of a step, without activations."""

    rest: int
    gathered: int
    """Unsharded copies alive at once: the root, the unit that runs and the units gathered ahead."""
    accumulate: int
    """Sums of gradients that are not kept between steps."""
    gradient: int
    """Gradients of the root and of one unit before their reduction, with its send buffers."""
    wire: int

    @property
    def total(self) -> int:
        return self.rest + self.gathered + self.accumulate + self.gradient + self.wire


@dataclass(frozen=True, slots=True)
class Traffic:
    """One line of the wire bill: all collectives of a step that agree in op, dtype, axis and purpose."""

    op: str
    purpose: str
    dtype: str
    axis: str
    count: int
    """Collectives per optimizer step."""
    bytes: int
    """Bytes sent by one rank per step over a ring: (N - 1) / N of the buffer, twice for all_reduce."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The bytes of one rank: at rest, at peak without activations, and on the wire per step."""

    micro_batches: int
    """Micro-batches per optimizer step."""
    pipeline_stage: int
    """The most loaded pipeline stage; all figures are for this stage."""
    parameters: int
    """Elements of the stage's parameters; tied parameters count once."""
    padding: int
    """Elements allocated beyond the parameters, over all ranks of a shard group."""
    whole_padding: int
    """The part of `padding` that keeps parameters or matrices whole."""
    rest: RestingBytes
    """Bytes between steps: `storage`, `master`, `state`, and their `total`."""
    peak: Peak
    """Bytes at the worst moment of a step."""
    traffic: tuple[Traffic, ...]
    """Bytes on the wire, a line per kind of collective."""

    @property
    def wire(self) -> int:
        """Bytes that one rank sends per optimizer step."""
        return sum(line.bytes for line in self.traffic)

    @property
    def padding_ratio(self) -> float:
        return self.padding / self.parameters if self.parameters else 0.0


def cost(plan: Plan, micro_batches: int | None = None) -> Cost:
    """Count the bytes of a plan, on the pipeline stage with the highest peak.

    `micro_batches` is the number per optimizer step, by default the plan's.
    """
    count = plan.policy.batch.accumulation if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError("micro_batches", "must be a whole number of at least 1", got=repr(count))
    bills = [stage_cost(plan, stage, count) for stage in range(plan.mesh.pipeline)]
    return max(bills, key=lambda bill: bill.peak.total)


def stage_cost(whole_plan: Plan, stage: int, micro_batches: int) -> Cost:
    """Count the bytes of one rank at a place on the pipeline axis."""
    plan = part(whole_plan, stage)
    # A segment of experts has other experts on each of its copies in a shard group.
    sized = [(segment, plan.mesh.shard // plan.slices(segment)) for segment in plan.segments]
    rest = _rest(plan, micro_batches)
    lines: dict[tuple[str, str, str, str], list[int]] = {}
    for call, times in count_collectives(whole_plan, stage, micro_batches):
        line = lines.setdefault((call.op, call.purpose, str(call.dtype), call.axis), [0, 0])
        line[0] += times
        line[1] += times * sent_bytes(call, plan.mesh)
    return Cost(
        micro_batches=micro_batches,
        pipeline_stage=stage,
        parameters=sum(segment.numel * parts for segment, parts in sized),
        padding=sum((segment.padded - segment.numel) * parts for segment, parts in sized),
        whole_padding=sum((s.padded - s.numel) * parts for s, parts in sized if s.whole),
        rest=rest,
        peak=_peak(plan, rest, micro_batches),
        traffic=tuple(Traffic(*key, count, size) for key, (count, size) in lines.items()),
    )


def _rest(plan: Plan, micro_batches: int) -> RestingBytes:
    storage = accumulate = master = state = 0
    for segment in plan.segments:
        columns, update, shard = segment.columns, segment.columns.update, plan.slices(segment)
        storage += _resting_bytes(segment, columns.storage, shard)
        if update is None:
            continue
        owned = segment.padded // (shard if update.axis else 1)
        master += owned * MASTER_BYTES[update.master]
        count = count_moments(plan.policy.optimizer, update.optimizer)
        state += owned // BLOCK * block_bytes(update.state) * count
        if not plan.policy.sharding.free_accumulator:
            size = _resting_bytes(segment, update.accumulate, shard)
            accumulate += size * accumulators_of(plan, segment, micro_batches)
    if not plan.policy.sharding.free_accumulator:
        accumulate += sum(_arriving(plan, micro_batches))
    buffers = sum(buffer.numel * buffer.storage.size for buffer in plan.buffers)
    return RestingBytes(storage, buffers, accumulate, master, state)


def _peak(plan: Plan, rest: RestingBytes, micro_batches: int) -> Peak:
    """Count the worst moment: the middle of a backward, when the last accumulators are filled."""
    units = plan.units
    blocks = [gathered_bytes(plan, unit) for unit in units if unit.name]
    roots = sum(gathered_bytes(plan, unit) for unit in units if not unit.name)
    if plan.policy.sharding.keep_gathered == "never":
        budget = prefetch_budget(plan)
        gathered = roots + max(most_gathered_bytes(order, budget) for order in (blocks, blocks[::-1]))
    else:
        gathered = roots + sum(blocks)
    sums = sum(sums_bytes(plan, segment, micro_batches) for segment in plan.segments)
    sums += max(_arriving(plan, micro_batches), default=0)
    accumulate = max(0, sums - rest.accumulate)
    gradient = sum(_gradient(plan, unit, micro_batches) for unit in units if not unit.name)
    gradient += max((_gradient(plan, unit, micro_batches) for unit in units if unit.name), default=0)
    wires = sorted((_wire_buffers(plan, segment) for segment in plan.segments), reverse=True)
    return Peak(rest.total, gathered, accumulate, gradient, sum(wires[:REDUCTIONS]))


def _resting_bytes(segment: Segment, placed: Placed, shard: int) -> int:
    return segment.padded * placed.dtype.size // (shard if placed.axis else 1)


def accumulators_of(plan: Plan, segment: Segment, micro_batches: int) -> int:
    """Count the most sums of a segment at once: one, or under `order: tree` the partial sums that wait.

    Every micro-batch of a pipeline arrives in a buffer of its own, also the right one of two.
    """
    update = segment.columns.update
    if update is None or update.reduce.order != "tree":
        return 1
    if plan.policy.pipeline is None or _sums_slices(plan, segment):
        return accumulators(micro_batches)
    return micro_batches.bit_length() - 1 + _most_unfinished(plan, micro_batches)


def _sums_slices(plan: Plan, segment: Segment) -> bool:
    """Return True if every micro-batch is reduced before it is added to others."""
    update = segment.columns.update
    return update is not None and bool(update.accumulate.axis) and plan.slices(segment) > 1


def _most_unfinished(plan: Plan, micro_batches: int) -> int:
    return most_unfinished(plan.policy.pipeline, plan.mesh.pipeline, micro_batches)


def _arriving(plan: Plan, micro_batches: int) -> tuple[int, ...]:
    """Return the bytes of the slices in which reduced micro-batches arrive under `order: tree`.

    One item per size of segments, because segments of one size share a buffer. Whole gradients arrive in a
    partial sum.
    """
    if micro_batches == 1:
        return ()
    sizes = {
        _resting_bytes(segment, update.accumulate, plan.slices(segment)) * REDUCTIONS
        for segment in plan.segments
        if (update := segment.columns.update) is not None
        and update.reduce.order == "tree"
        and _sums_slices(plan, segment)
    }
    return tuple(sizes)


def sums_bytes(plan: Plan, segment: Segment, micro_batches: int) -> int:
    """Count the bytes of a segment's accumulator when it holds every gradient of a step.

    The reduced slice always exists. The whole sum exists beside it if several micro-batches wait for one
    reduction, or if every rank updates the whole parameter. At stage 0 the slice lies inside the whole sum,
    if the wire has the accumulator's dtype.
    """
    update, shard = segment.columns.update, plan.slices(segment)
    if update is None:
        return 0
    size = segment.padded * update.accumulate.dtype.size
    others = accumulators_of(plan, segment, micro_batches) - 1
    more = others * _resting_bytes(segment, update.accumulate, shard)
    if shard == 1:
        return size + more
    landing = size
    if update.reduce.order == "tree" and _sums_slices(plan, segment):
        landing *= _most_unfinished(plan, micro_batches)
    if not update.axis:
        in_place = update.reduce.wire is update.accumulate.dtype and not update.accumulate.axis
        return more + (size if in_place else landing + size // shard)
    # Gradients of a pipeline's micro-batches land in place all through a step.
    waits = _waits(update, micro_batches) or plan.policy.pipeline is not None
    return size // shard + (landing if waits else 0) + more


def _waits(update: Update, micro_batches: int) -> bool:
    return not update.accumulate.axis and micro_batches > 1


def _gradient(plan: Plan, unit: Unit, micro_batches: int) -> int:
    """Count the bytes of a unit's gradient in the accumulate dtype, and of the send buffers."""
    total = 0
    for segment in (plan.segments[number] for number in unit.segments):
        update = segment.columns.update
        if update is None:
            continue
        total += segment.numel * update.accumulate.dtype.size
        if plan.slices(segment) > 1 and update.axis and not _waits(update, micro_batches):
            total += segment.padded * update.accumulate.dtype.size * (REDUCTIONS if unit.name else 1)
    return total


def _wire_buffers(plan: Plan, segment: Segment) -> int:
    """Count the buffers of a reduction: received parts, the copy in the wire's dtype, and the sum."""
    update, shard = segment.columns.update, plan.slices(segment)
    if update is None or shard == 1:
        return 0
    if update.reduce.order == "tree" and shard >= HALVING and not shard & (shard - 1):
        return segment.padded * update.reduce.wire.size  # the buffer of `halving_exchanges`
    received = segment.padded * (shard - 1) // shard * update.reduce.wire.size
    sent = 0 if update.reduce.wire is update.accumulate.dtype else segment.padded * update.reduce.wire.size
    summed = segment.padded // shard * update.reduce.sum.size
    levels = rank_levels(shard) if update.reduce.order == "tree" else 0
    return received + sent + summed * (1 + levels)


HALVING = 8
"""Least number of ranks, a power of two, on which a sum by the tree exchanges halves."""

REDUCTIONS = 2
"""Reductions under way at once; `IN_FLIGHT` in the engine."""


def sent_bytes(call: Collective, mesh: MeshShape) -> int:
    """Count the bytes that one rank sends for a collective over a ring."""
    ranks = {
        "shard": mesh.shard,
        "replicate": mesh.replicate,
        "expert_shard": mesh.expert_shard,
        "pipeline": mesh.pipeline,
        "ends": 2,
    }[call.axis]
    passes = 2 if call.op == "all_reduce" else 1
    return passes * call.numel * call.dtype.size * (ranks - 1) // ranks


def count_moments(optimizer: ComponentSpec | None, share: MuonUpdate) -> int:
    """Count the moments per element of an optimizer, or of AdamW if the config names none.

    `share` is the part of an optimizer that updates parameters differently.
    """
    if optimizer is None:
        return len(ADAMW.moments)
    algorithm = of_type(share or optimizer.type)
    return len(algorithm.kept([{**algorithm.defaults, **json.loads(optimizer.params)}]))


MASTER_BYTES = {Master.FP32: 4, Master.SPLIT: 2, Master.SAME: 0}


def block_bytes(state: State) -> int:
    """Count the bytes of a moment of BLOCK elements; `8bit` adds an fp32 scale per block."""
    return BLOCK * state.dtype.size + (4 if state is State.EIGHT_BIT else 0)
