"""What one rank cannot do, none does: an error on one rank becomes an error on every rank.

For work that each rank does alone between two collectives: opening files, reading its share of them.

Invariant: either every rank leaves the context, or every rank raises; nobody is left waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import AxisName
from zerodrift.errors import RankError, ZerodriftError


@contextlib.contextmanager
def raise_on_all_ranks(comm: Collectives, axis: AxisName = "world") -> Iterator[None]:
    """Raise on every rank of the axis what any of them raised inside. No collective may be inside.

    All raise the class of the first that failed, with what all of them said, each thing once. A rank whose
    error is not one of ours raises that, so that a traceback leads to the place.
    """
    failed: BaseException | None = None
    try:
        yield
    except RankError:
        raise  # somebody is gone: there is nobody to tell
    except BaseException as error:
        failed = error
    mine = failed if failed is None or isinstance(failed, ZerodriftError) else _other(failed)
    said: dict[str, ZerodriftError] = {}
    for rank, theirs in enumerate(comm.all_gather_object(mine, axis)):
        if isinstance(theirs, RankError):
            theirs = RankError.relayed(f"rank {rank} of axis `{axis}`: {theirs}")
        if theirs is not None:
            said.setdefault(str(theirs), theirs)
    if failed is not None and not isinstance(failed, ZerodriftError):
        raise failed
    if said:
        errors = list(said.values())
        raise type(errors[0]).joined(errors) from failed


def _other(error: BaseException) -> RankError:
    """An error that is not one of ours, as the other ranks raise it."""
    return RankError.relayed(f"{type(error).__name__}: {error}")
