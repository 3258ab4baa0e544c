"""Which micro-batches of a step a rank takes: what `reduce.order: tree` asks for, else in turns.

Invariant: pure; the ranks of a step take every micro-batch once.
"""

from __future__ import annotations

from zerodrift.plan.table import Plan
from zerodrift.policy.order import When, dealing, micro_batches_of_rank


def dealt(plan: Plan, rank: int, micro_batches: int | None = None) -> tuple[int, ...]:
    """The numbers of what a data rank takes, in its order; by default as many as the plan has in a step."""
    count = micro_batches or plan.policy.batch.accumulation
    if not plan.policy.tree:
        return tuple(range(rank, count * plan.mesh.data, plan.mesh.data))
    return micro_batches_of_rank(dealing(_whens(plan), count, plan.mesh) or "last", count, plan.mesh, rank)


def makes_the_tree(plan: Plan, micro_batches: int) -> bool:
    """Whether the sums of ranks with so many micro-batches each are whole nodes of the tree."""
    return dealing(_whens(plan), micro_batches, plan.mesh) is not None


def _whens(plan: Plan) -> tuple[When, ...]:
    updates = [segment.columns.update for segment in plan.segments]
    return tuple(dict.fromkeys(update.reduce.when for update in updates if update is not None))
