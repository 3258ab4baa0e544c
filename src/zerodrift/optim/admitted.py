"""Whether a caller's optimizer may run on what ranks hold: pieces of parameters, or some of a model's.

What an update depends on is tried out (`reach`), and known by name of classes that may begin to look
further after a trial has ended. Where the plan leaves everything on every rank there is nothing to ask.

Invariant: an optimizer that is let in makes of every element what a plain loop would, as far as a trial
shows; where none was possible, a warning says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

import torch

from zerodrift.errors import UnsupportedError
from zerodrift.optim.reach import Reach, moves, reach
from zerodrift.optim.stand_in import hooked
from zerodrift.plan.table import Plan, Row

_log = logging.getLogger("zerodrift")

MATRIX_OPTIMIZERS = ("muon", "adafactor", "shampoo", "soap", "galore", "apollo", "lamb", "lars", "dion")
"""Words in the name of a class whose update of an element depends on others of its parameter, if not in its
first steps. Any of its bases counts."""

WHOLE = "`precision: {rules: [{match: '*', placement: whole}]}`"


def require_for_dtensors(optimizer: torch.optim.Optimizer, group_of: Mapping[str, int], plan: Plan) -> None:
    """Refuse what tensors that know how they are cut do not help: names, and new memory for them."""
    rows = _rows(group_of, plan)
    if works_on_matrices(type(optimizer)):
        _require_whole(optimizer, "", rows, plan)
    if moves(optimizer, _shapes(optimizer, rows, group_of)):
        raise UnsupportedError(
            "optimizer",
            "must write into its parameters, which are DTensors: what is assigned to `p.data` is lost",
            got=type(optimizer).__name__,
            do="Write `p.copy_(...)` there, or use the native backend.",
        )


def require(
    optimizer: torch.optim.Optimizer, group_of: Mapping[str, int], plan: Plan, device: torch.device
) -> None:
    """Refuse an optimizer that would make other numbers of what this plan leaves on a rank."""
    rows = _rows(group_of, plan)
    if not any(_is_apart(row, plan) for row in rows):
        return
    kind = type(optimizer).__name__
    found = reach(optimizer, _shapes(optimizer, rows, group_of), device)
    if found.reach is Reach.SENT:
        raise UnsupportedError(
            "optimizer",
            "must leave communication to the engine where ranks hold different parameters",
            got=f"{kind}, and {found.why}",
            do="Use its form for one process, or train at stage 0.",
        )
    if found.reach is Reach.GROUP:
        raise UnsupportedError(
            "optimizer",
            "must update a tensor without looking at others where ranks hold different parameters",
            got=f"{kind}: {found.why}",
            do="Train at stage 0 (no expert axis, no pipeline), or use an elementwise optimizer.",
        )
    if found.reach is Reach.TENSOR or works_on_matrices(type(optimizer)):
        _require_whole(optimizer, found.why if found.reach is Reach.TENSOR else "", rows, plan)
    if found.reach is Reach.UNKNOWN:
        _warn_once(kind, f"could not be tried out: {found.why}")
    elif hooked(optimizer):
        _warn_once(kind, "has step hooks, which see what this rank holds and not whole parameters")


def works_on_matrices(kind: type) -> bool:
    """Whether an optimizer class needs whole parameters, as far as names tell."""
    names = [base.__name__.lower() for base in kind.__mro__]
    return any(word in name for name in names for word in MATRIX_OPTIMIZERS)


def _rows(group_of: Mapping[str, int], plan: Plan) -> list[Row]:
    return [
        row for name in group_of if (row := plan.row(name)) is not None and row.columns.update is not None
    ]


def _shapes(
    optimizer: torch.optim.Optimizer, rows: Sequence[Row], group_of: Mapping[str, int]
) -> dict[int, list[tuple[int, ...]]]:
    """By group."""
    shapes: dict[int, list[tuple[int, ...]]] = {number: [] for number in range(len(optimizer.param_groups))}
    for row in rows:
        shapes[group_of[row.name]].append(row.shape)
    return shapes


def _is_apart(row: Row, plan: Plan) -> bool:
    """Whether some rank holds less than all of a row: a piece of it, its own experts, another stage's."""
    shares = plan.slices(plan.segments[row.segment]) > 1 and not _everywhere(row)
    return shares or row.parts > 1 or plan.policy.pipeline is not None


def _everywhere(row: Row) -> bool:
    """Whether its state is whole on all ranks."""
    return row.columns.update is None or row.columns.update.axis == ""


def _require_whole(optimizer: torch.optim.Optimizer, why: str, rows: Sequence[Row], plan: Plan) -> None:
    cut = [row.name for row in rows if not _is_whole(row, plan)]
    if cut:
        more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
        seen = f": {why}" if why else ""
        divided = any(row.parts > 1 for row in rows)
        raise UnsupportedError(
            "optimizer",
            "must be elementwise where ranks hold flat pieces of parameters",
            got=f"{type(optimizer).__name__}, and pieces of {', '.join(cut[:3])}{more}{seen}",
            do=(
                f"Place what it updates whole, with a rule such as {WHOLE}, train at stage 0, or use an "
                "elementwise optimizer."
                + (" Experts that are divided over ranks need another optimizer." if divided else "")
            ),
        )


def _is_whole(row: Row, plan: Plan) -> bool:
    """Whether one rank owns all of a row: by its placement, or because nothing is cut."""
    update = row.columns.update
    cut = plan.slices(plan.segments[row.segment]) > 1
    return row.parts == 1 and (update is None or update.placement == "whole" or _everywhere(row) or not cut)


@functools.cache
def _warn_once(kind: str, why: str) -> None:
    _log.warning(
        "zerodrift: %s %s; if it is not elementwise, it makes other numbers of pieces than of whole "
        "parameters. Stage 0, or a rule %s, gives it whole ones",
        kind,
        why,
        WHOLE,
    )
