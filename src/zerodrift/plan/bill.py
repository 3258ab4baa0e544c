"""The cost of a step for one rank: bytes at rest, at peak and on the wire, from the plan alone.

Traffic is counted over `schedule.count_collectives`. A test compares that list with the engine's recorded
collectives, so the estimate follows the engine. Activations depend on the model and are not in the peak.

Invariant: every figure is bytes of one rank, on the most loaded pipeline stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from zerodrift.dtypes import BLOCK, DType
from zerodrift.errors import ConfigError
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import ADAMW, of_type
from zerodrift.plan.schedule import (
    Collective,
    count_collectives,
    gathered_bytes,
    most_gathered_bytes,
    prefetch_budget,
    reduce_order,
)
from zerodrift.plan.stages import part
from zerodrift.plan.table import Plan, Segment
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

_KEY = 8
"""Bytes of a random key, which a block of elements has."""


@dataclass(frozen=True, slots=True)
class RestingBytes:
    storage: int
    buffers: int
    accumulate: int
    """0 if the accumulator is freed after the step."""
    master: int
    state: int
    checksums: int = 0
    """Checksums of storage that rests whole beside a master, by which the engine notices writes to it."""
    feedback: int = 0
    """Fp32 values, on every rank, that the wire has rounded away and the next gradient gets."""
    secondary: int = 0
    """This rank's part of the second copy from which a backward gathers."""
    keys: int = 0
    """Random keys of blocks, where moments or gradients are rounded stochastically."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the worst moment of a step, without activations."""

    rest: int
    gathered: int
    """Unsharded copies alive at once: the root, the unit that runs and the units gathered ahead."""
    accumulate: int
    """Sums of gradients that are not kept between steps."""
    gradient: int
    """Gradients before their reduction, and the buffers that they are sent from."""
    wire: int
    """Buffers of reductions under way."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


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
        peak=max(_moments(plan, rest, micro_batches), key=lambda peak: peak.total),
        traffic=tuple(Traffic(*key, count, size) for key, (count, size) in lines.items()),
    )


def _rest(plan: Plan, micro_batches: int) -> RestingBytes:
    storage = accumulate = master = state = checksums = feedback = secondary = keys = 0
    for segment in plan.segments:
        columns, update, shard = segment.columns, segment.columns.update, plan.slices(segment)
        storage += _resting_bytes(segment, columns.storage, shard)
        axis = plan.secondary_axis(segment)
        if axis is not None:
            secondary += columns.regather.nbytes(segment.padded) // plan.mesh.size(axis)
        if update is None:
            continue
        owned = segment.padded // (shard if update.axis else 1)
        master += owned * MASTER_BYTES[update.master]
        is_sliced = bool(columns.storage.axis and shard > 1)
        is_gathered = is_sliced or columns.encodes or columns.storage.dtype is not columns.compute
        if plan.policy.backend == "native" and MASTER_BYTES[update.master] and not is_gathered:
            checksums += -(-segment.padded * columns.storage.dtype.size // CHECKSUM_BLOCK) * 8
        if update.reduce.feedback and shard > 1:
            feedback += segment.padded * DType.FP32.size
        if update.reduce.rounding == "stochastic":
            keys += segment.padded // BLOCK * _KEY
        if update.state.drawn:
            keys += owned // BLOCK * _KEY
        count = count_moments(plan.policy.optimizer, update.optimizer)
        state += owned // BLOCK * block_bytes(update.state) * count
        if not plan.policy.sharding.free_accumulator:
            size = _resting_bytes(segment, update.accumulate, shard)
            accumulate += size * accumulators_of(plan, segment, micro_batches)
    if not plan.policy.sharding.free_accumulator:
        accumulate += sum(_arriving(plan, micro_batches))
    buffers = sum(buffer.numel * buffer.storage.size for buffer in plan.buffers)
    return RestingBytes(storage, buffers, accumulate, master, state, checksums, feedback, secondary, keys)


def _moments(plan: Plan, rest: RestingBytes, micro_batches: int) -> Iterator[Peak]:
    """Yield the moments around each reduction of the last backward, in the plan's order of reductions.

    A segment's gradients arrive while earlier reductions are under way. When all but one of these have ended,
    the gradients are copied into the buffer that they are sent from, and reduced. The root's gradients count
    from the beginning, because a head has its gradients first. In a pipeline the order is not known, and
    everything counts at once.
    """
    around, at_root = _gathered(plan)
    segments = [
        (unit, plan.segments[number]) for unit in reduce_order(list(plan.units)) for number in unit.segments
    ]
    trained = [(unit, segment) for unit, segment in segments if segment.columns.update is not None]
    made = {id(segment): sums_bytes(plan, segment, micro_batches) for _, segment in trained}
    is_first = micro_batches == 1  # so the only backward allocates the sums, one after the other
    sums = max(_arriving(plan, micro_batches), default=0) + (0 if is_first else sum(made.values()))
    left = {u.name: sum(_gradient_of(plan.segments[n]) for n in u.segments) for u in plan.units}
    root = left.get("", 0)

    def moment(gathered: int, gradient: int, under_way: Sequence[Segment], wires: Sequence[int]) -> Peak:
        landings = sum(_landing(plan, segment, micro_batches) for segment in under_way)
        accumulate = max(0, sums - rest.accumulate)
        return Peak(rest.total, gathered, accumulate, gradient + landings, sum(wires))

    if plan.policy.pipeline is not None:
        sums += sum(made.values()) if is_first else 0
        most = max((size for name, size in left.items() if name), default=0)
        wires = sorted((_wire_buffers(plan, segment)[0] for segment in plan.segments), reverse=True)
        yield moment(around, root + most, (), wires[:REDUCTIONS])
        return
    yield moment(around, root, (), ())
    under_way: list[Segment] = []
    kept: list[int] = []
    """The largest wire buffers so far: on gloo their memory is kept for the next reductions."""
    largest = 0
    """The most bytes that a reduction has received so far."""
    for unit, segment in trained:
        gathered = around if unit.name else at_root
        gradient = left[unit.name] + (root if unit.name else 0)
        yield moment(gathered, gradient, under_way, kept)
        under_way = [*under_way[1 - REDUCTIONS :], segment]
        wire, arriving = _wire_buffers(plan, segment)
        sums += made[id(segment)] if is_first else 0
        # Buffers that are too small for this segment have been freed.
        others = kept if arriving <= largest else [_wire_buffers(plan, each)[0] for each in under_way[:-1]]
        yield moment(gathered, gradient, under_way, others)
        kept, largest = sorted([*kept, wire], reverse=True)[:REDUCTIONS], max(largest, arriving)
        own = _gradient_of(segment)
        left[unit.name] -= own
        yield moment(gathered, gradient - own, under_way, kept)


def _gathered(plan: Plan) -> tuple[int, int]:
    """Count the unsharded bytes that are alive at once while blocks run, and when only the root is left."""
    blocks = [gathered_bytes(plan, unit) for unit in plan.units if unit.name]
    roots = sum(gathered_bytes(plan, unit) for unit in plan.units if not unit.name)
    if plan.policy.sharding.keep_gathered != "never":
        return roots + sum(blocks), roots + sum(blocks)
    budget = prefetch_budget(plan)
    return roots + max(most_gathered_bytes(order, budget) for order in (blocks, blocks[::-1])), roots


def _resting_bytes(segment: Segment, placed: Placed, shard: int) -> int:
    return placed.dtype.nbytes(segment.padded) // (shard if placed.axis else 1)


def accumulators_of(plan: Plan, segment: Segment, micro_batches: int) -> int:
    """Count the most sums of a segment at once: one, or under `order: tree` the partial sums that wait.

    Every micro-batch of a pipeline arrives in a buffer of its own, also the right one of two.
    """
    update = segment.columns.update
    if update is None or update.reduce.order != "tree":
        return 1
    if plan.policy.pipeline is None or _sums_slices(plan, segment):
        return accumulators(micro_batches)
    unfinished = most_unfinished(plan.policy.pipeline, plan.mesh.pipeline, micro_batches)
    return micro_batches.bit_length() - 1 + unfinished


def _sums_slices(plan: Plan, segment: Segment) -> bool:
    """Return True if every micro-batch is reduced before it is added to others."""
    update = segment.columns.update
    return update is not None and bool(update.accumulate.axis) and plan.slices(segment) > 1


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
        landing *= most_unfinished(plan.policy.pipeline, plan.mesh.pipeline, micro_batches)
    if not update.axis:
        in_place = update.reduce.wire is update.accumulate.dtype and not update.accumulate.axis
        return more + (size if in_place else landing + size // shard)
    # Gradients of a pipeline's micro-batches land in place all through a step.
    waits = _waits(update, micro_batches) or plan.policy.pipeline is not None
    return size // shard + (landing if waits else 0) + more


def _waits(update: Update, micro_batches: int) -> bool:
    return not update.accumulate.axis and micro_batches > 1


def _gradient_of(segment: Segment) -> int:
    """Count the bytes of a segment's gradients as autograd leaves them, in the accumulate dtype."""
    update = segment.columns.update
    return 0 if update is None else segment.numel * update.accumulate.dtype.size


def _landing(plan: Plan, segment: Segment, micro_batches: int) -> int:
    """Count the bytes of the buffer that a segment's gradients are sent from, where it is not their sum."""
    update = segment.columns.update
    if update is None or plan.slices(segment) == 1 or not update.axis or _waits(update, micro_batches):
        return 0
    return segment.padded * update.accumulate.dtype.size


def _wire_buffers(plan: Plan, segment: Segment) -> tuple[int, int]:
    """Count the bytes of a reduction's buffers, and the part of them that receives from other ranks.

    The rest is the copy in the wire's dtype, and the sum.
    """
    update, shard = segment.columns.update, plan.slices(segment)
    if update is None or shard == 1:
        return 0, 0
    wire, is_tree = update.reduce.wire, update.reduce.order == "tree"
    if is_tree and shard >= HALVING and not shard & (shard - 1):  # the buffer of `halving_exchanges`
        return wire.nbytes(segment.padded), wire.nbytes(segment.padded)
    elsewhere = segment.padded if wire.format else segment.padded * (shard - 1) // shard
    received = wire.nbytes(elsewhere)
    sent = 0 if wire is update.accumulate.dtype else wire.nbytes(segment.padded)
    summed = segment.padded // shard * update.reduce.sum.size
    levels = rank_levels(shard) if is_tree else 0
    return received + sent + summed * (1 + levels), received


HALVING = 8
"""Least number of ranks, a power of two, on which a sum by the tree needs one buffer of a segment's size:
ranks exchange halves, or one call delivers all parts and the sums are formed in place."""

CHECKSUM_BLOCK = 512
"""Bytes of storage that have one checksum, of 8 bytes; `BYTES` in the kernels."""

REDUCTIONS = 2
"""Reductions under way at once, in the engine too."""


def sent_bytes(call: Collective, mesh: MeshShape) -> int:
    """Count the bytes that one rank sends for a collective over a ring."""
    ranks = 2 if call.axis == "ends" else mesh.size(call.axis)
    passes = 2 if call.op == "all_reduce" else 1
    return passes * call.dtype.nbytes(call.numel) * (ranks - 1) // ranks


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
