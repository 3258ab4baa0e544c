"""Where a model is cut along the pipeline axis: which piece is on which rank, and what a rank's part of a
plan is.

A model is cut into as many pieces as the axis has ranks, or `pipeline.chunks` times as many. Pieces go
round the ranks, or forth and back for the schedules that are shaped like a V. One plan describes all of
them; `part` is what one rank of the axis executes.

Invariant: every row of a plan is in the part of exactly one rank as `lead`; a parameter that is tied across
the pipeline is in that of two, in a segment of its own, and everything about the two is equal but `lead`.

[Note: tied across the pipeline] An embedding and a head that are one parameter are used by the first piece
and by the last. Where these are on two ranks, each holds the parameter in a segment that has no other. The
two are laid out alike, so after each was reduced over its data ranks, slices lie opposite slices, and one
sum over the two ranks makes both the whole gradient, in the same bits. Equal gradients, masters and moments
then stay equal without another message.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.mesh import MeshShape
from zerodrift.model.spec import ModelSpec, ParameterSpec
from zerodrift.plan.table import Plan, Row, Segment, Unit
from zerodrift.policy.nouns import Pipelining
from zerodrift.policy.pipelining import V_SHAPED


def pieces(pipeline: Pipelining | None, mesh: MeshShape) -> int:
    """Into how many pieces a model is cut."""
    return mesh.pipeline * (1 if pipeline is None else pipeline.chunks)


def rank_of(pipeline: Pipelining | None, mesh: MeshShape, piece: int) -> int:
    """Which rank of the pipeline axis holds a piece."""
    turn, place = divmod(piece, mesh.pipeline)
    back = pipeline is not None and pipeline.schedule in V_SHAPED and turn % 2 == 1
    return mesh.pipeline - 1 - place if back else place


def pieces_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The pieces of a rank of the pipeline axis, in the order of the model."""
    count = pieces(plan.policy.pipeline, plan.mesh)
    return tuple(piece for piece in range(count) if rank_of(plan.policy.pipeline, plan.mesh, piece) == rank)


def beside(plan: Plan, one: int, other: int) -> bool:
    """Whether a forward of one piece and a backward of another go on in turns where a schedule pairs them:
    both exchange tokens with the ranks of their experts. Not where each is gathered for itself, to have one
    at a time in memory."""
    if plan.policy.sharding.keep_gathered != "step":
        return False
    return all(any(_divided(plan, unit) for unit in of_piece(plan, piece)) for piece in (one, other))


def _divided(plan: Plan, unit: Unit) -> bool:
    """Whether ranks divide experts of it."""
    numbers = (number for segment in unit.segments for number in plan.segments[segment].rows)
    return any(plan.rows[number].parts > 1 for number in numbers)


def crossings(plan: Plan) -> int:
    """Boundaries between pieces that lie between ranks: what a micro-batch is sent over, forth and back. At
    the turn of a V both pieces are on one rank."""
    pipeline, count = plan.policy.pipeline, pieces(plan.policy.pipeline, plan.mesh)
    homes = [rank_of(pipeline, plan.mesh, piece) for piece in range(count)]
    return sum(one != other for one, other in itertools.pairwise(homes))


def width(plan: Plan) -> int | None:
    """Values per token that go from piece to piece: the width of the embedding of a causal language model of
    `transformers`. None for any other model, whose layers pass on what they like."""
    row = _embedding(plan)
    return None if row is None else row.shape[-1]


def travelling(plan: Plan) -> DType:
    """The dtype of what goes from piece to piece in such a model. Under autocast a lookup and a sum stay what
    the embedding is at rest, and each layer adds to that; elsewhere all compute in the mode's dtype."""
    row, mode = _embedding(plan), plan.policy.mode
    return mode.dtype if row is None or not mode.autocast else row.columns.storage.dtype


def _embedding(plan: Plan) -> Row | None:
    if not any(row.klass.startswith("transformers.models.") for row in plan.rows):
        return None
    rows = (plan.row(f"{name}.weight") for name in ("model.embed_tokens", "transformer.wte"))
    return next((row for row in rows if row is not None and len(row.shape) == 2), None)


# --- cutting --------------------------------------------------------------------------------------------


def products(parameter: ParameterSpec) -> int:
    """What a parameter costs in a forward: the elements of a matrix, each used once per token. Of experts a
    token uses some."""
    chosen, experts = parameter.used
    return parameter.numel * chosen // experts if len(parameter.shape) > 1 else 0


def even_by_cost(costs: Sequence[int], count: int, after: int) -> list[int]:
    """How many neighbouring blocks each piece gets, so that the most expensive costs the least; `after` is
    what comes behind the last block. No piece is empty; of equal ways, the one with more blocks in front."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    total = len(costs)
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    """Per number of pieces: blocks used -> (cost of the dearest piece, where the last piece begins)."""
    for piece in range(1, count + 1):
        row: dict[int, tuple[int, int]] = {}
        for end in range(piece, total - (count - piece) + 1):
            extra = after if piece == count else 0
            ways = [
                (max(dearest, sums[end] - sums[start] + extra), -start)
                for start, (dearest, _) in best[-1].items()
                if start < end
            ]
            dearest, start = min(ways)
            row[end] = (dearest, -start)
        best.append(row)
    sizes: list[int] = []
    end = total
    for row in reversed(best[1:]):
        start = row[end][1]
        sizes.append(end - start)
        end = start
    return sizes[::-1]


def split_off_copies(
    groups: Sequence[Sequence[int]], copies: Mapping[int, tuple[int, ...]]
) -> list[list[int]]:
    """The groups of parameters that become segments, with what is tied across the pipeline by itself."""
    parts: list[list[int]] = []
    for indices in groups:
        rest = [index for index in indices if index not in copies]
        parts += [*([rest] if rest else []), *([index] for index in indices if index in copies)]
    return parts


def require_ends(
    pipeline: Pipelining | None,
    mesh: MeshShape,
    model: ModelSpec,
    piece: int,
    copies: Mapping[int, tuple[int, ...]],
) -> None:
    """Only the ranks of the first and of the last piece may share a parameter. `copies` are of the parameters
    of one piece: the other pieces that use them."""
    ends = {rank_of(pipeline, mesh, 0), rank_of(pipeline, mesh, pieces(pipeline, mesh) - 1)}
    for index, others in copies.items():
        homes = {rank_of(pipeline, mesh, number) for number in (piece, *others)}
        if len(homes) > 1 and not homes <= ends:
            names = model.parameters[index].names
            raise ModelError(
                names[0],
                "must be tied between the first and the last stage of a pipeline, or inside of one",
                got=f"{' and '.join(names)} on ranks {sorted(homes)} of the pipeline",
                do="Untie it, or use fewer stages.",
            )


# --- one rank's part --------------------------------------------------------------------------------------


def names_of(plan: Plan, piece: int) -> frozenset[str]:
    """The names, of all that a parameter may have, by which one piece knows its parameters."""
    return frozenset(name for row in plan.rows for name in row.names if _piece_of(plan, row, name) == piece)


def _piece_of(plan: Plan, row: Row, name: str) -> int:
    """The piece that uses a parameter by one of its names."""
    home, others = plan.units[row.unit].stage, plan.segments[row.segment].copies
    if name == row.name or not others:
        return home
    holders = [unit for unit in plan.units if unit.name and name.startswith(f"{unit.name}.")]
    return max(holders, key=lambda unit: len(unit.name)).stage if holders else others[-1]


def part(plan: Plan, rank: int) -> Plan:
    """What one rank of the pipeline axis executes: its rows, segments and units, numbered anew, with one
    root. A row there has the names that this rank knows it by. Without a pipeline it is the plan itself."""
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


def named(plan: Plan, row: Row) -> Row:
    """A row of a part as the whole plan has it, with all of its names."""
    row_of_name = plan.row(row.name)
    if row_of_name is None:
        raise AssertionError(f"{row.name} is in a part of a plan and not in the plan")
    return row_of_name


def of_piece(plan: Plan, piece: int) -> list[Unit]:
    """The units of a rank's part that a forward of one of its pieces goes through; only the first piece and
    the last have something in the root."""
    ends = (0, pieces(plan.policy.pipeline, plan.mesh) - 1)
    return [unit for unit in plan.units if (unit.stage == piece if unit.name else piece in ends)]


def shared_with_another(plan: Plan, segment: Segment) -> bool:
    """Whether the other end of the pipeline holds a copy; see [Note: tied across the pipeline]."""
    last = pieces(plan.policy.pipeline, plan.mesh) - 1
    return bool(segment.copies) and rank_of(plan.policy.pipeline, plan.mesh, last) != 0
