"""The plan of a run: `build` makes it, `check` proves it, `cost` counts its bytes."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.plan.bill import (
        Cost, REDUCTIONS, accumulators_of, block_bytes, cost, count_moments, stage_cost, sums_bytes,
    )  # fmt: skip
    from zerodrift.plan.boundaries import boundaries_of_piece, enclosing_modules
    from zerodrift.plan.builder import build
    from zerodrift.plan.groups import Group, find_groups
    from zerodrift.plan.layout import round_up
    from zerodrift.plan.schedule import (
        Collective, Computation, Event, backward_order, collectives, contains, events, gathered_bytes,
        pipeline_events, prefetch_budget, prefetch_ends, rank_micro_batches, reduce_order, step_end,
        sums_by_tree,
    )  # fmt: skip
    from zerodrift.plan.stages import (
        Action, TIME, Timeline, activations, can_interleave, crossings, dependencies,
        is_tied_across_ranks, names_of, part, pieces, pieces_of, rank_of, units_of_piece, whole_row,
    )  # fmt: skip
    from zerodrift.plan.table import Boundary, BufferRow, Plan, Row, Segment, Unit
    from zerodrift.plan.trace import CastBy, Hidden, Refusal, Trace, TracedOperation, TracedTensor

__getattr__, __dir__, __all__ = face(__name__)
