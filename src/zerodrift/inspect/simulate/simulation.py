"""Simulate a step: from a plan, a model's work and a cluster to time, waiting and memory.

    simulation = simulate(plan, work, cluster)

A sweep simulates every stage, wire, order of sums and number of replicas, with and without recomputation.

Invariant: nothing runs, and 16,384 ranks take no longer to simulate than 2. Bytes at rest and at the peak are
those of `plan/bill.py`; only the tensors that autograd keeps are added.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, UnsupportedError, ZerodriftError, first_line
from zerodrift.inspect.simulate.cluster import GIGA, Cluster, axis_layout, message_seconds
from zerodrift.inspect.simulate.streams import RankPlayer, Streams, run_in_turns, split_micro_batches
from zerodrift.inspect.simulate.work import Work
from zerodrift.plan import (
    Action,
    Plan,
    Timeline,
    dependencies,
    events,
    part,
    pieces,
    pieces_of,
    pipeline_events,
    rank_of,
    stage_cost,
    step_end,
)
from zerodrift.policy import Mode

PLAYED = 4
"""Micro-batches that are played: the first, two equal ones and the last. All others take as long as the
second."""

FORWARDS = 3
"""Products of a forward and its backward over those of the forward. Recomputation does not count."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank at the worst moment of a step."""

    plan: int  # at rest and at the peak, as the plan's bill says
    activations: int  # tensors that autograd keeps for the backward
    workspace: int  # output of the largest operation
    reserve: int
    room: int

    @property
    def total(self) -> int:
        return self.plan + self.activations + self.workspace + self.reserve

    @property
    def fits(self) -> bool:
        return self.total <= self.room


@dataclass(frozen=True, slots=True)
class ExposedWait:
    """Time in which a rank computes nothing, because it waits for a collective."""

    unit: str  # name of the unit; `""` is the root, or the whole model
    what: str  # `forward`, `backward`, `reduce`, `replicate`, `norm`, `update` or `exchange`
    seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One optimizer step, on its slowest rank."""

    ranks: int
    micro_batches: int
    recompute: bool
    seconds: float
    computed: float  # seconds in which the rank computes
    idle: float  # seconds in which the rank waits for another pipeline stage
    waited: tuple[ExposedWait, ...]  # exposed communication per unit and purpose, longest first
    tokens: int  # tokens of a step, over all ranks
    flops: int  # model products of a step on one rank, without recomputation
    mfu: float
    memory: Memory
    wire: int  # bytes that a rank sends

    @property
    def exposed(self) -> float:
        return sum(line.seconds for line in self.waited)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def simulate(
    plan: Plan, work: Work, cluster: Cluster, *, recompute: bool = False, timeline: Timeline | None = None
) -> Simulation:
    """Simulate a step of `plan`. A pipeline runs in the order of `timeline`. With `recompute`, blocks compute
    their activations again in the backward."""
    require_known_order(plan, cluster, timeline)
    cluster = cluster.shared_by(plan.mesh.world)
    count = plan.policy.batch.accumulation
    if timeline is None:
        played = _play_one_stage(plan, work, cluster, recompute)
    else:
        played = _play_pipeline(plan, work, cluster, recompute, timeline)
    flops = FORWARDS * work.flops * count // plan.mesh.pipeline
    longest = sorted(played.waited.items(), key=lambda item: -item[1])
    return Simulation(
        ranks=plan.mesh.world,
        micro_batches=count,
        recompute=recompute,
        seconds=played.now,
        computed=played.computed,
        idle=played.idle,
        waited=tuple(ExposedWait(unit, what, seconds) for (unit, what), seconds in longest),
        tokens=work.tokens * count * plan.mesh.data,
        flops=flops,
        mfu=flops / played.now / cluster.peak(work.products),
        memory=fullest_memory(plan, work, cluster, recompute, timeline),
        wire=max(stage_cost(plan, stage, count).wire for stage in range(plan.mesh.pipeline)),
    )


def require_known_order(plan: Plan, cluster: Cluster, timeline: Timeline | None) -> None:
    """Refuse a plan that cannot be simulated."""
    policy, here = plan.policy, cluster.devices_per_host
    if plan.mesh.world > here and cluster.network is None:
        must = f"must be given for more than the {here} devices of a host"
        do = "Add it to the cluster's file, or raise `devices_per_host`."
        raise ConfigError("network", must, got=f"{plan.mesh.world} ranks", do=do)
    if policy.backend != "native":
        must = "must be `native` to be simulated: the order of others is PyTorch's"
        raise UnsupportedError("backend", must, got=policy.backend)
    if policy.sharding.offload:
        must = "must be left out to be simulated: a cluster says nothing of host memory"
        raise UnsupportedError("zero_optimization.offload_optimizer", must, got="an offload")
    if plan.mesh.tensor > 1:
        must = "must have plain parameters to be simulated"
        raise UnsupportedError("model", must, got=f"DTensors on a mesh of {plan.mesh}")
    if policy.pipeline is not None and timeline is None:
        must = "must have at most 5,000 pieces times micro-batches to be simulated"
        raise UnsupportedError("pipeline", must, got=f"{policy.batch.accumulation} micro-batches")


def _play_one_stage(plan: Plan, work: Work, cluster: Cluster, recompute: bool) -> Streams:
    """Play the first micro-batches and the last, and add the time of the second for each of the others."""
    player, count = RankPlayer(plan, plan, work, cluster, recompute), plan.policy.batch.accumulation
    streams, played = player.streams, min(count, PLAYED)
    *batches, after = split_micro_batches(events(plan, 0, played))
    seen = []  # times before each micro-batch
    for number, batch in enumerate(batches):
        seen.append((streams.now, streams.computed, dict(streams.waited)))
        player.play(batch, first=number == 0, last=number == played - 1)
        player.finish_reductions()
    player.play(after, first=False, last=True)
    player.end()
    if count > PLAYED:
        (now, computed, waited), (now_after, computed_after, waited_after) = seen[PLAYED - 2 :]
        streams.now += (count - played) * (now_after - now)
        streams.computed += (count - played) * (computed_after - computed)
        for key, value in waited_after.items():
            streams.waited[key] += (count - played) * (value - waited.get(key, 0.0))
    return streams


def _play_pipeline(plan: Plan, work: Work, cluster: Cluster, recompute: bool, timeline: Timeline) -> Streams:
    """Play all stages. An action begins when its rank is free and its inputs have arrived."""
    parts = [part(plan, rank) for rank in range(plan.mesh.pipeline)]
    players = [RankPlayer(plan, own, work, cluster, recompute) for own in parts]
    orders = [list(pipeline_events(plan, rank, timeline.ranks[rank])) for rank in range(len(parts))]
    places = [0] * len(parts)
    ended: dict[Action, float] = {}
    last = max(action.piece for rank in timeline.ranks for action in rank)
    activation = max((unit.entering for unit in work.blocks.values()), default=0)
    travel = message_seconds(activation, axis_layout(plan.mesh, "pipeline"), cluster)

    def arrival(ways: tuple[Action, ...], rank: int) -> float | None:
        """Return when the result of the first of these actions that has run is on a rank, or None if none
        has run."""
        done = next((way for way in ways if way in ended), None)
        if done is None:
            return None
        here = rank_of(plan.policy.pipeline, plan.mesh, done.piece) == rank
        return ended[done] if here else ended[done] + travel

    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, (player, order) in enumerate(zip(players, orders, strict=True)):
            while (place := places[rank]) < len(order):
                pair = order[place : place + 1 + (order[place][0] in timeline.paired)]
                inputs = [arrival(need, rank) for action, _ in pair for need in dependencies(action, last)]
                if None in inputs:
                    break
                begin = max([player.streams.now, *(time for time in inputs if time is not None)])
                player.streams.idle += begin - player.streams.now
                player.streams.now = begin
                places[rank] += len(pair)
                final = places[rank] == len(order)
                run_in_turns([  # a pair begins with its backward
                    player.turns(found, first=False, last=final, kind=action.kind)
                    for action, found in reversed(pair)
                ])  # fmt: skip
                player.finish_reductions()
                ended |= {action: player.streams.now for action, _ in pair}
                moved = True
        if not moved:
            raise AssertionError("a schedule in which every rank waits for another")
    together = max(player.streams.now for player in players)
    for rank, player in enumerate(players):
        player.streams.idle += together - player.streams.now
        player.streams.now = together
        player.play(step_end(parts[rank]), first=False, last=True)
        player.end()
    return max((player.streams for player in players), key=lambda streams: streams.now)


def fullest_memory(
    plan: Plan, work: Work, cluster: Cluster, recompute: bool, timeline: Timeline | None
) -> Memory:
    """Return the memory of the pipeline stage that needs most."""
    stages = range(plan.mesh.pipeline)
    memories = (_memory(plan, work, cluster, recompute, timeline, stage) for stage in stages)
    return max(memories, key=lambda use: use.total)


def _memory(
    plan: Plan, work: Work, cluster: Cluster, recompute: bool, timeline: Timeline | None, stage: int
) -> Memory:
    bill = stage_cost(plan, stage, plan.policy.batch.accumulation)
    last = pieces(plan.policy.pipeline, plan.mesh) - 1
    mine = pieces_of(plan, stage)
    blocks = [work.blocks[unit.name] for unit in plan.units if unit.name and unit.stage in mine]
    ends = [*([work.enter] if 0 in mine else []), *([work.leave] if last in mine else [])]
    saved = sum(block.entering if recompute else block.saved for block in blocks)
    saved += sum(end.saved for end in ends)
    alive = 1 if timeline is None else timeline.most_alive[stage]
    again = max((block.saved for block in blocks), default=0) if recompute else 0
    # Each of the `alive` micro-batches is in one piece; `saved` counts all pieces of the rank.
    activations = saved * alive // len(mine) + again
    # About half of an operation's bytes are its result.
    parts = [part for unit in (*blocks, *ends) for part in (*unit.forward, *unit.backward)]
    largest = max((each.bytes for part in parts for each in part), default=0) // 2
    reserve, room = int(cluster.reserve_gb * GIGA), int(cluster.device.memory_gb * GIGA)
    return Memory(bill.peak.total, activations, largest, reserve, room)


def fewest_ranks(
    plan_on: Callable[[int], Plan],
    timelines: Callable[[Plan], Timeline | None],
    work: Work,
    cluster: Cluster,
    ranks: int,
    recompute: bool,
) -> int | None:
    """Return the fewest ranks on which a step fits, among `ranks` and its halves; None if there are none."""
    counts = [ranks]
    while counts[-1] % 2 == 0:
        counts.append(counts[-1] // 2)
    found = None
    for count in counts:
        try:
            plan = plan_on(count)
        except ZerodriftError:
            continue  # the batch or an axis does not divide over so many ranks
        if not fullest_memory(plan, work, cluster, recompute, timelines(plan)).fits:
            break
        found = count
    return found


Plans = Callable[[Sequence[str]], Plan]  # overrides of config keys -> the plan with them
MOST_REPLICA_COUNTS = 4
ORDERS = ("rank", "tree", "native")
NARROW_WIRES = (DType.FP8_128, DType.INT8_256, DType.INT4_128)
"""Formats that a sweep tries on the wire of gradients, where sums are in the order of ranks."""


@dataclass(frozen=True, slots=True)
class SweepChoice:
    """One combination of the values that a sweep varies."""

    stage: int
    wire: str
    order: str
    replicas: int
    recompute: bool

    def overrides(self, base: Plan) -> tuple[str, ...]:
        """Return overrides of config keys for this choice. They keep the other keys of
        `precision.reduce`."""
        demanded = {column: value for column, value, _ in base.policy.demands}
        keys = [key for key in ("sum", "when") if f"reduce.{key}" in demanded]
        reduce = [f"wire: {self.wire}", f"order: {self.order}"]
        reduce += [f"{key}: {demanded[f'reduce.{key}']}" for key in keys]
        stage, replicas = f"zero_optimization.stage={self.stage}", f"sharding.replicate={self.replicas}"
        return stage, f"precision.reduce={{{', '.join(reduce)}}}", replicas


def own_choice(plan: Plan, recompute: bool) -> SweepChoice:
    """Return the choice that a plan corresponds to. Its wire and order are those of most elements."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in plan.rows:
        if row.columns.update is not None:
            reduce = row.columns.update.reduce
            counts[str(reduce.wire), reduce.order] += row.numel
    wire, order = max(counts, key=counts.__getitem__, default=("", ""))
    return SweepChoice(plan.policy.sharding.stage, wire, order, plan.mesh.replicate, recompute)


@dataclass(frozen=True, slots=True)
class SweepResult:
    choice: SweepChoice
    simulation: Simulation | None  # None if the choice is refused
    refused: str = ""


def sweep(
    base: Plan, plans: Plans, timelines: Callable[[Plan], Timeline | None], work: Work, cluster: Cluster
) -> tuple[list[SweepResult], list[SweepResult]]:
    """Return the results that fit, the fastest first, and those that do not fit or are refused."""
    fit: list[SweepResult] = []
    others: list[SweepResult] = []
    alike = itertools.groupby(_choices(base, cluster), lambda one: replace(one, recompute=False))
    for first, choices in alike:
        try:
            plan = plans(first.overrides(base))
        except ZerodriftError as error:
            others.append(SweepResult(first, None, first_line(error)))
            continue
        for choice in choices:
            found = simulate(plan, work, cluster, recompute=choice.recompute, timeline=timelines(plan))
            (fit if found.memory.fits else others).append(SweepResult(choice, found))
    fit.sort(key=lambda one: one.simulation.seconds if one.simulation else 0.0)
    others.sort(key=lambda one: one.simulation.memory.total if one.simulation else float("inf"))
    return fit, others


def _choices(base: Plan, cluster: Cluster) -> Iterator[SweepChoice]:
    mode = base.policy.mode
    wires = ("fp32", "bf16" if mode is Mode.FP32 else str(mode.dtype))
    sums = [*itertools.product(wires, ORDERS), *((str(wire), "rank") for wire in NARROW_WIRES)]
    for stage, (wire, order) in itertools.product(range(4), sums):
        for replicas in _replica_counts(base.mesh.data, cluster) if stage else (1,):
            for recompute in (False, True):
                yield SweepChoice(stage, wire, order, replicas, recompute)


def _replica_counts(data: int, cluster: Cluster) -> list[int]:
    """Return numbers of replicas for shards over all ranks, over one host, and over sizes in between."""
    counts, shard = [1], cluster.devices_per_host
    while shard < data and len(counts) < MOST_REPLICA_COUNTS:
        if data % shard == 0:
            counts.append(data // shard)
        shard *= 4
    return counts
