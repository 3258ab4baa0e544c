"""The pieces of a pipeline: the cuts of a model, the rank of each piece, and a rank's part of a plan.

Pieces are assigned to ranks in turns, or forth and back for V-shaped schedules. One plan describes all
pieces, and `part` is the plan that one rank of the axis executes. `pipeline/schedules.py` gives the order of
actions to a `Timeline`, in which messages take no time.

Invariant: every row of a plan is in the part of exactly one rank as `lead`. An action of a timeline begins as
soon as its rank is free and the actions that it needs have ended.

[Note: tied across the pipeline] An embedding and a head that are one parameter are used by the first piece
and by the last. If these pieces are on two ranks, each rank holds the parameter in a segment of its own. The
two segments differ only in `lead`, so after each was reduced over its data ranks, one sum over the two ranks
gives both the whole gradient, in the same bits, and masters and moments stay equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.mesh import MeshShape
from zerodrift.model import ModelSpec, ParameterSpec
from zerodrift.plan.table import Plan, Row, Segment, Unit
from zerodrift.policy import V_SHAPED, Pipelining


def pieces(pipeline: Pipelining | None, mesh: MeshShape) -> int:
    """Return the number of pieces of a model: `pipeline.chunks` for each rank of the pipeline axis."""
    return mesh.pipeline * (1 if pipeline is None else pipeline.chunks)


def rank_of(pipeline: Pipelining | None, mesh: MeshShape, piece: int) -> int:
    """Return the rank of the pipeline axis that holds a piece."""
    turn, place = divmod(piece, mesh.pipeline)
    back = pipeline is not None and pipeline.schedule in V_SHAPED and turn % 2 == 1
    return mesh.pipeline - 1 - place if back else place


def pieces_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Return the pieces of a rank of the pipeline axis, in the order of the model."""
    count = pieces(plan.policy.pipeline, plan.mesh)
    return tuple(piece for piece in range(count) if rank_of(plan.policy.pipeline, plan.mesh, piece) == rank)


def can_interleave(plan: Plan, one: int, other: int) -> bool:
    """Return True if the forward of one piece and the backward of another are interleaved when paired.

    Both must exchange tokens with the ranks of their experts. Except that pieces which are gathered for each
    action are never interleaved, so that memory holds one of them at a time.
    """
    if plan.policy.sharding.keep_gathered != "step":
        return False

    def has_experts(unit: Unit) -> bool:
        segments = (plan.segments[number] for number in unit.segments)
        return any(plan.rows[number].parts > 1 for segment in segments for number in segment.rows)

    return all(any(map(has_experts, units_of_piece(plan, piece))) for piece in (one, other))


def crossings(plan: Plan) -> int:
    """Count the boundaries between pieces on different ranks, which a micro-batch crosses forth and back."""
    pipeline, count = plan.policy.pipeline, pieces(plan.policy.pipeline, plan.mesh)
    homes = [rank_of(pipeline, plan.mesh, piece) for piece in range(count)]
    return sum(one != other for one, other in itertools.pairwise(homes))


def activations(plan: Plan) -> tuple[int, DType] | None:
    """Return the values per token that travel between pieces of a `transformers` model, and their dtype.

    They are as wide as the embedding. All layers compute in the mode's dtype, except that under autocast the
    residual stream keeps the embedding's storage dtype. None for any other model, whose layers may pass
    anything on.
    """
    if not any(row.klass.startswith("transformers.models.") for row in plan.rows):
        return None
    rows = (plan.row(f"{name}.weight") for name in ("model.embed_tokens", "transformer.wte"))
    row, mode = next((row for row in rows if row is not None and len(row.shape) == 2), None), plan.policy.mode
    if row is None:
        return None
    return row.shape[-1], row.columns.storage.dtype if mode.autocast else mode.dtype


# --- cutting --------------------------------------------------------------------------------------------


def products(parameter: ParameterSpec) -> int:
    """Count the multiplications per token: the elements of a matrix, or of the experts in use."""
    chosen, experts = parameter.used
    return parameter.numel * chosen // experts if len(parameter.shape) > 1 else 0


def even_by_cost(costs: Sequence[int], count: int, after: int) -> list[int]:
    """Return the number of consecutive blocks of each piece, so that the most expensive piece costs the
    least.

    `after` is the cost behind the last block. No piece is empty. Of equal divisions, the one with more blocks
    in front wins.
    """
    sums = [0, *itertools.accumulate(costs)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    """Number of blocks -> cost of the most expensive piece, and the sizes of all pieces."""
    for piece in range(1, count + 1):
        extra = after if piece == count else 0
        longer = {}
        for end in range(piece, len(costs) - (count - piece) + 1):
            ways = [
                (max(dearest, sums[end] - sums[start] + extra), -start)
                for start, (dearest, _) in best.items()
                if start < end
            ]
            dearest, start = min(ways)
            longer[end] = dearest, [*best[-start][1], end + start]
        best = longer
    return best[len(costs)][1]


def require_ends(
    pipeline: Pipelining | None,
    mesh: MeshShape,
    model: ModelSpec,
    piece: int,
    copies: Mapping[int, tuple[int, ...]],
) -> None:
    """Refuse a parameter that is tied across other ranks than those of the first and the last piece.

    `copies` maps the parameters of one piece to the other pieces that use them.
    """
    ends = {rank_of(pipeline, mesh, 0), rank_of(pipeline, mesh, pieces(pipeline, mesh) - 1)}
    for index, others in copies.items():
        homes = {rank_of(pipeline, mesh, number) for number in (piece, *others)}
        if len(homes) > 1 and not homes <= ends:
            names = model.parameters[index].names
            must = "must be tied between the first and the last stage of a pipeline, or inside of one"
            got = f"{' and '.join(names)} on ranks {sorted(homes)} of the pipeline"
            raise ModelError(names[0], must, got=got, do="Untie it, or use fewer stages.")


# --- one rank's part --------------------------------------------------------------------------------------


def names_of(plan: Plan, piece: int) -> frozenset[str]:
    """Return the names by which one piece knows its parameters; a tied parameter has others elsewhere."""
    return frozenset(name for row in plan.rows for name in row.names if _piece_of(plan, row, name) == piece)


def _piece_of(plan: Plan, row: Row, name: str) -> int:
    home, others = plan.units[row.unit].stage, plan.segments[row.segment].copies
    if name == row.name or not others:
        return home
    holders = [unit for unit in plan.units if unit.name and name.startswith(f"{unit.name}.")]
    return max(holders, key=lambda unit: len(unit.name)).stage if holders else others[-1]


def part(plan: Plan, rank: int) -> Plan:
    """Return a rank's part of a plan: its rows, segments and units, numbered anew, with one root.

    A row of a part has only the names that the rank uses. Without a pipeline the part is the plan itself.
    """
    if plan.mesh.pipeline == 1:
        return plan
    mine = pieces_of(plan, rank)
    names = frozenset().union(*(names_of(plan, piece) for piece in mine))
    rows: list[Row] = []
    segments: list[Segment] = []
    units: list[Unit] = []

    def add(name: str, numbers: Sequence[int], piece: int) -> None:
        first_row, first_segment = len(rows), len(segments)
        for number in numbers:
            old = plan.segments[number]
            start, unit = len(rows), len(units)
            for row in (plan.rows[index] for index in old.rows):
                here = tuple(name for name in row.names if name in names)
                rows.append(replace(row, names=here, unit=unit, segment=len(segments)))
            lead = rank_of(plan.policy.pipeline, plan.mesh, plan.units[old.unit].stage) == rank
            place = tuple(range(start, len(rows)))
            segments.append(replace(old, unit=unit, rows=place, lead=lead))
        held = tuple(range(first_row, len(rows))), tuple(range(first_segment, len(segments)))
        units.append(Unit(name, *held, piece))

    roots = [
        number for unit in plan.units if not unit.name and unit.stage in mine for number in unit.segments
    ]
    tied = [
        number
        for number, segment in enumerate(plan.segments)
        if set(segment.copies) & set(mine) and number not in roots
    ]
    add("", [*roots, *tied], mine[0])
    for unit in plan.units:
        if unit.name and unit.stage in mine:
            add(unit.name, unit.segments, unit.stage)
    return replace(plan, rows=tuple(rows), segments=tuple(segments), units=tuple(units))


def whole_row(plan: Plan, row: Row) -> Row:
    """Return the row of the whole plan, with all its names, for a row of a part."""
    whole = plan.row(row.name)
    assert whole is not None, f"{row.name} is in a part of a plan and not in the plan"
    return whole


def units_of_piece(plan: Plan, piece: int) -> list[Unit]:
    """Return the units of a rank's part that one piece runs; the first and the last use the root."""
    ends = (0, pieces(plan.policy.pipeline, plan.mesh) - 1)
    return [unit for unit in plan.units if (unit.stage == piece if unit.name else piece in ends)]


def is_tied_across_ranks(plan: Plan, segment: Segment) -> bool:
    """Return True if the other end of the pipeline holds a copy; see [Note: tied across the pipeline]."""
    last = pieces(plan.policy.pipeline, plan.mesh) - 1
    return bool(segment.copies) and rank_of(plan.policy.pipeline, plan.mesh, last) != 0


# --- the timeline of a step ------------------------------------------------------------------------------


TIME = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Units of time of an action by its kind."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank on a piece and a micro-batch."""

    kind: str
    """`F` forward, `B` whole backward, `I` gradient of the input, `W` gradients of the weights."""
    piece: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.piece}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Timeline:
    ranks: tuple[tuple[Action, ...], ...]
    paired: frozenset[Action] = frozenset()
    """Forwards that are interleaved with the backward behind them."""

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Start of each action, in units of time."""
        ended: dict[Action, int] = {}
        free = [0] * len(self.ranks)
        starts: list[list[int]] = [[] for _ in self.ranks]
        last = max((action.piece for rank in self.ranks for action in rank), default=0)
        while any(len(done) < len(rank) for done, rank in zip(starts, self.ranks, strict=True)):
            moved = False
            for number, rank in enumerate(self.ranks):
                while len(starts[number]) < len(rank):
                    action = rank[len(starts[number])]
                    needs = dependencies(action, last)
                    ends = [ended[way] for ways in needs for way in ways if way in ended]
                    if len(ends) < len(needs):
                        break
                    begin = max([free[number], *ends])
                    starts[number].append(begin)
                    free[number] = ended[action] = begin + TIME[action.kind]
                    moved = True
            if not moved:
                raise AssertionError("a schedule in which every rank waits for another")
        return tuple(map(tuple, starts))

    @property
    def length(self) -> int:
        """Units of time from the first action to the end of the last."""
        ends = [
            start + TIME[action.kind]
            for begun, rank in zip(self.starts, self.ranks, strict=True)
            for start, action in zip(begun, rank, strict=True)
        ]
        return max(ends, default=0)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time."""
        busy = sum(TIME[action.kind] for rank in self.ranks for action in rank)
        total = self.length * len(self.ranks)
        return 1 - busy / total if total else 0.0

    @property
    def most_alive(self) -> tuple[int, ...]:
        """The most micro-batches per rank that hold activations for a later backward."""
        change = {"F": 1, "B": -1, "I": -1}
        return tuple(
            max(itertools.accumulate((change.get(action.kind, 0) for action in rank), initial=0))
            for rank in self.ranks
        )


def dependencies(action: Action, last: int) -> list[tuple[Action, ...]]:
    """List the dependencies of an action, each as the alternative actions that satisfy it."""
    piece, micro = action.piece, action.micro_batch
    if action.kind == "F":
        return [(Action("F", piece - 1, micro),)] if piece else []
    if action.kind == "W":
        return [(Action("I", piece, micro),)]
    own: list[tuple[Action, ...]] = [(Action("F", piece, micro),)]
    return own if piece == last else [*own, (Action("B", piece + 1, micro), Action("I", piece + 1, micro))]
