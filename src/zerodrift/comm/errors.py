"""The errors of ranks that do not meet: who is missing, who waits where, and which plans differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zerodrift.comm.mesh import Axis
from zerodrift.comm.watch import EVERYWHERE
from zerodrift.errors import RankError, first_line


def missing(op: str, line: Axis, error: RuntimeError, peer: int | None = None) -> RankError:
    """Return the error for ranks of an axis, or one of them, that did not take part."""
    others = [rank for rank in line.ranks if rank != line.ranks[line.rank]]
    if peer is not None:
        others = [line.ranks[peer]]
    who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))}"
    more = ", ..." if len(others) > 8 else ""
    return RankError(
        f"`{op}` on axis `{line.name}`",
        f"{who}{more} must take part within the timeout",
        got=repr(first_line(error)),
        do=(
            "That rank died, hangs, or is in another collective: look at the output of the rank that "
            "failed first. If it was only slow, start the mesh with a longer `timeout`."
        ),
    )


def out_of_order(line: Axis, counts: Sequence[int]) -> RankError:
    """Return the error for ranks of an axis that have made different numbers of collectives."""
    ranks = ", ".join(f"rank {rank} {count}" for rank, count in zip(line.ranks, counts, strict=True))
    return RankError(
        "ranks",
        "must come to the same collectives in the same order",
        got=f"ranks of axis `{line.name}` that have made different numbers of them: {ranks}",
        do=EVERYWHERE,
    )


def different_plans(other: int, here: Sequence[str], there: Sequence[str]) -> RankError:
    """Return the error for two ranks whose plans differ, from the rows of rank 0 and of the other."""
    got = f"different ones on ranks 0 and {other}, though their {len(here)} rows agree"
    for number, (mine, theirs) in enumerate(itertools.zip_longest(here, there, fillvalue="nothing")):
        if mine != theirs:
            got = f"different ones from row {number} on: {mine} on rank 0, {theirs} on rank {other}"
            break
    do = "Give every rank the same config, model and world size."
    return RankError("plan", "must be the same on every rank", got=got, do=do)
