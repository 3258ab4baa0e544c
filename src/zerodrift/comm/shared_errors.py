"""An error on one rank becomes an error on every rank.

`raise_on_all_ranks` is for work that each rank does alone between two collectives, such as reading its share
of files. `Alarm` is for work in which ranks wait for each other in an order of their own, as in the schedule
of a pipeline, where no collective can be made in the middle. The rank that fails writes its error to the
store of its group and cuts its connections. On every other rank the thread of the deadlock watch reads the
store now and then, and cuts the connections there, so that every wait ends.

Invariant: either every rank leaves the context, or every rank raises. An error is in the store before any
connection is cut, so a rank whose wait ends can say why; and a run without errors sends nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import AxisName, Mesh
from zerodrift.errors import Problem, RankError, ZerodriftError


@contextlib.contextmanager
def raise_on_all_ranks(comm: Collectives, axis: AxisName = "world") -> Iterator[None]:
    """Raise on every rank of the axis what any of them raises inside. No collective may be inside.

    All raise the class of the first that failed, with the texts of all of them, each once. A rank whose error
    is not one of ours raises that, so that a traceback leads to the place.
    """
    failed: BaseException | None = None
    try:
        yield
    except RankError:
        raise  # a rank is gone, and would not take part
    except BaseException as error:
        failed = error
    mine = failed if isinstance(failed, ZerodriftError) else None
    is_foreign = failed is not None and mine is None
    if is_foreign:
        mine = RankError.relayed(f"{type(failed).__name__}: {failed}")
    by_text: dict[str, ZerodriftError] = {}
    for rank, theirs in enumerate(comm.all_gather_object(mine, axis)):
        if isinstance(theirs, RankError):
            theirs = RankError.relayed(f"rank {rank} of axis `{axis}`: {theirs}")
        if theirs is not None:
            by_text.setdefault(str(theirs), theirs)
    if failed is not None and is_foreign:
        raise failed
    if by_text:
        errors = list(by_text.values())
        raise type(errors[0]).joined(errors) from failed


class Alarm:
    """The alarm of a mesh, one on every rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._watch, self._rank = mesh.watch, mesh.rank()
        self._watch.is_polling = True

    def check(self) -> None:
        """Raise if another rank is known to have failed. Asks nothing of the store."""
        if self._watch.error:
            raise RankError.relayed(self._watch.error)

    @contextlib.contextmanager
    def explain_failure(self) -> Iterator[None]:
        """Raise the error of the rank that failed first instead of the one that follows from it here."""
        try:
            yield
        except Exception as error:
            if self._watch.read_error():
                raise RankError.relayed(self._watch.error) from error
            raise
        self.check()

    @contextlib.contextmanager
    def raised(self, where: str, what: str) -> Iterator[None]:
        """Do the same, and let an error of this rank end the other ranks. `what` is done inside."""
        try:
            with self.explain_failure():
                yield
        except BaseException as error:
            text = self._watch.read_error()
            if not text:
                got = f"{type(error).__name__}: {' '.join(str(error).split())} on rank {self._rank}"
                do = "Fix it there, and start all ranks again."
                text = str(Problem(where, f"{what} must run on every rank", got=got, do=do))
            self._watch.fail(text)
            raise

    def stop(self) -> None:
        """Read the store no more while no rank waits."""
        self._watch.is_polling = False
