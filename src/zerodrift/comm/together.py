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
def together(comm: Collectives, axis: AxisName = "world") -> Iterator[None]:
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
    said: dict[str, type[ZerodriftError]] = {}
    for rank, told in enumerate(comm.all_gather_object(_told(failed), axis)):
        if told is not None:
            kind, text = told
            said.setdefault(text if kind is not RankError else f"rank {rank} of axis `{axis}`: {text}", kind)
    if failed is not None and not isinstance(failed, ZerodriftError):
        raise failed
    if said:
        raise next(iter(said.values()))("\n".join(said)) from failed


def _told(error: BaseException | None) -> tuple[type[ZerodriftError], str] | None:
    """An error as the others raise it: their own kind of ours, anything else as a rank that failed."""
    if error is None:
        return None
    if isinstance(error, ZerodriftError):
        return type(error), str(error)
    return RankError, f"{type(error).__name__}: {error}"
