"""From a plan, a model's work and a cluster to what a step would take: time, what is waited for, memory.

    simulation = simulate(plan, work, cluster)

Invariant: pure; rank 0 of 16,384 ranks costs as much as rank 0 of 2. Bytes at rest and at the peak are
`plan/cost.py`'s; only what autograd keeps is added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from zerodrift.errors import UnsupportedError
from zerodrift.plan.cost import Cost, stage_cost
from zerodrift.plan.schedule import afterwards, events, scheduled
from zerodrift.plan.stages import part, pieces_of, rank_of
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Action, Timeline, needs
from zerodrift.simulate.carry import line, message
from zerodrift.simulate.cluster import GIGA, Cluster
from zerodrift.simulate.play import Interval, Player, Streams, in_turns, micro_batches_of
from zerodrift.simulate.work import UnitWork, Work

PLAYED = 4
"""Micro-batches that are played: the first, two that are alike, the last. Others take as long as those."""
TRAINING = 3
"""A forward and a backward, in forwards: what is computed again is not the model's work."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank at the worst moment of a step."""

    plan: int
    """What the plan's bill says: at rest and at the peak."""
    activations: int
    """What autograd keeps for the backward."""
    workspace: int
    """What the largest operation makes."""
    reserve: int
    """What the cluster's file keeps for libraries."""
    room: int
    """What a device has."""

    @property
    def total(self) -> int:
        return self.plan + self.activations + self.workspace + self.reserve

    @property
    def fits(self) -> bool:
        return self.total <= self.room


@dataclass(frozen=True, slots=True)
class Waited:
    """Time in which a rank computes nothing, because something has not arrived."""

    unit: str
    """`""` is the root, or all of the model."""
    what: str
    """`forward`, `backward`, `reduce`, `replicate`, `norm`, `update` or `exchange`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Simulation:
    """One optimizer step."""

    ranks: int
    micro_batches: int
    recompute: bool
    seconds: float
    """From the first forward to the end of the update, on the slowest rank."""
    computed: float
    """Seconds of it in which that rank computes."""
    idle: float
    """Seconds in which it waits for another stage of a pipeline."""
    waited: tuple[Waited, ...]
    """Per unit and purpose, longest first: communication that nothing hides."""
    tokens: int
    """Of a step, on all ranks."""
    flops: int
    """Of the model for a step on one rank, without what is computed again."""
    mfu: float
    """The share of the device's stated products that the model's are."""
    memory: Memory
    wire: int
    """Bytes that a rank sends."""
    intervals: tuple[Interval, ...] = field(repr=False)
    """What of it was played, of the slowest rank: without the micro-batches that others stand for."""

    @property
    def exposed(self) -> float:
        return sum(line.seconds for line in self.waited)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def simulate(
    plan: Plan, work: Work, cluster: Cluster, *, recompute: bool = False, timeline: Timeline | None = None
) -> Simulation:
    """A step of `plan`; of a pipeline, in the order of `timeline`. `recompute` is whether blocks compute
    their activations again."""
    require(plan, cluster, timeline)
    count = plan.policy.batch.accumulation
    if plan.policy.pipeline is None:
        played = _one_stage(plan, work, cluster, recompute, count)
    else:
        assert timeline is not None
        played = _pipeline(plan, work, cluster, recompute, timeline)
    bills = [stage_cost(plan, stage, count) for stage in range(plan.mesh.pipeline)]
    memory = max(
        (_memory(plan, work, cluster, recompute, bill, timeline) for bill in bills), key=lambda use: use.total
    )
    flops = TRAINING * work.flops * count // plan.mesh.pipeline
    return Simulation(
        ranks=plan.mesh.world,
        micro_batches=count,
        recompute=recompute,
        seconds=played.seconds,
        computed=played.computed,
        idle=played.idle,
        waited=tuple(
            Waited(unit, what, seconds)
            for (unit, what), seconds in sorted(played.waited.items(), key=lambda item: -item[1])
        ),
        tokens=work.tokens * count * plan.mesh.data,
        flops=flops,
        mfu=flops / played.seconds / cluster.peak(work.products),
        memory=memory,
        wire=max(bill.wire for bill in bills),
        intervals=tuple(played.intervals),
    )


def require(plan: Plan, cluster: Cluster, timeline: Timeline | None) -> None:
    """That the engine executes such a plan in an order that is known here."""
    cluster.require_ranks(plan.mesh.world)
    policy = plan.policy
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


@dataclass(slots=True)
class _Played:
    seconds: float
    computed: float
    idle: float
    waited: dict[tuple[str, str], float]
    intervals: Sequence[Interval]


def _one_stage(plan: Plan, work: Work, cluster: Cluster, recompute: bool, count: int) -> _Played:
    """Some micro-batches are played and the others counted."""
    player = Player(plan, plan, work, cluster, recompute)
    streams, played = player.streams, min(count, PLAYED)
    alike: Streams | None = None
    """How much of everything the second of two like micro-batches took."""
    *batches, after = micro_batches_of(events(plan, 0, played))
    for number, batch in enumerate(batches):
        before = (streams.now, streams.computed, dict(streams.waited))
        player.play(batch, first=number == 0, last=number == played - 1)
        player.end_backward()
        if number == PLAYED - 2:
            now, computed, waited = before
            alike = Streams(cluster, streams.now - now, computed=streams.computed - computed)
            alike.waited = {key: value - waited.get(key, 0.0) for key, value in streams.waited.items()}
    player.play(after, first=False, last=True)
    player.end()
    seconds, computed, waited = streams.now, streams.computed, streams.waited
    if alike is not None:
        times = count - played
        seconds, computed = seconds + times * alike.now, computed + times * alike.computed
        waited = {key: value + times * alike.waited.get(key, 0.0) for key, value in waited.items()}
    return _Played(seconds, computed, 0.0, waited, streams.intervals)


def _pipeline(plan: Plan, work: Work, cluster: Cluster, recompute: bool, timeline: Timeline) -> _Played:
    """All stages, each action as soon as its rank is free and what it needs has come."""
    parts = [part(plan, rank) for rank in range(plan.mesh.pipeline)]
    players = [Player(plan, of_rank, work, cluster, recompute) for of_rank in parts]
    waiting = [list(scheduled(plan, rank, timeline.ranks[rank])) for rank in range(len(parts))]
    idle = [0.0] * len(parts)
    ended: dict[Action, float] = {}
    last = max(action.piece for rank in timeline.ranks for action in rank)
    places = [0] * len(parts)
    while any(place < len(done) for place, done in zip(places, waiting, strict=True)):
        moved = False
        for rank, player in enumerate(players):
            while places[rank] < len(waiting[rank]):
                place = places[rank]
                next_ones = waiting[rank][place : place + 1 + (waiting[rank][place][0] in timeline.paired)]
                come = [
                    _arrived(plan, work, cluster, ended, need, rank)
                    for action, _ in next_ones
                    for need in needs(action, last)
                ]
                if any(time is None for time in come):
                    break
                begin = max([player.streams.now, *(time for time in come if time is not None)])
                idle[rank] += begin - player.streams.now
                player.streams.now = begin
                final = place + len(next_ones) == len(waiting[rank])
                played = [
                    player.turns(found, first=False, last=final, kind=action.kind)
                    for action, found in reversed(next_ones)  # of a pair the backward begins
                ]
                in_turns(played)
                player.end_backward()
                ended |= {action: player.streams.now for action, _ in next_ones}
                places[rank] += len(next_ones)
                moved = True
        if not moved:
            raise AssertionError("a schedule in which every rank waits for another")
    together = max(player.streams.now for player in players)
    for rank, player in enumerate(players):
        idle[rank] += together - player.streams.now
        player.streams.now = together
        player.play(afterwards(parts[rank]), first=False, last=True)
        player.end()
    slowest = max(range(len(parts)), key=lambda rank: players[rank].streams.now)
    streams = players[slowest].streams
    return _Played(streams.now, streams.computed, idle[slowest], streams.waited, streams.intervals)


def _arrived(
    plan: Plan, work: Work, cluster: Cluster, ended: dict[Action, float], ways: tuple[Action, ...], rank: int
) -> float | None:
    """When what one of these actions makes is on a rank."""
    done = next((way for way in ways if way in ended), None)
    if done is None:
        return None
    if rank_of(plan.policy.pipeline, plan.mesh, done.piece) == rank:
        return ended[done]
    size = max((unit.entering for unit in work.blocks.values()), default=0)
    return ended[done] + message(size, line(plan.mesh, "pipeline"), cluster)


# --- memory ---------------------------------------------------------------------------------------------


def _memory(
    plan: Plan, work: Work, cluster: Cluster, recompute: bool, bill: Cost, timeline: Timeline | None
) -> Memory:
    """Of a rank at a place on the pipeline axis."""
    stage = bill.pipeline_stage
    last = plan.mesh.pipeline * (1 if plan.policy.pipeline is None else plan.policy.pipeline.chunks) - 1
    mine = pieces_of(plan, stage)
    blocks = [work.blocks[unit.name] for unit in plan.units if unit.name and unit.stage in mine]
    ends = [*([work.enter] if 0 in mine else []), *([work.leave] if last in mine else [])]
    kept = sum(block.entering if recompute else block.saved for block in blocks)
    alive = 1 if timeline is None else timeline.most_alive[stage]
    held = kept + sum(end.saved for end in ends)
    again = max((block.saved for block in blocks), default=0) if recompute else 0
    made = max((_largest(unit) for unit in (*blocks, *ends)), default=0)
    # A forward under way is of one piece, `held` of all that the rank has.
    activations = held * alive // len(mine) + again
    reserve = int(cluster.reserve_gb * GIGA)
    return Memory(bill.peak.total, activations, made, reserve, int(cluster.device.memory_gb * GIGA))


def _largest(unit: UnitWork) -> int:
    """What the largest operation makes: half of what it reads and writes."""
    return max((each.bytes for part in (*unit.forward, *unit.backward) for each in part), default=0) // 2
