"""An error on one rank becomes an error on every rank.

`raise_on_all_ranks` is for work that each rank does alone between two collectives, such as reading its share
of files. `Alarm` is for work in which ranks wait for each other in an order of their own, as in the schedule
of a pipeline, where no collective can be made in the middle. The rank that fails writes its error to the
store of its group and cuts its connections. On every other rank a thread reads the store now and then, and
cuts the connections there, so that every wait ends.

Invariant: either every rank leaves the context, or every rank raises. An error is in the store before any
connection is cut, so a rank whose wait ends can say why; and a run without errors sends nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import AxisName, Mesh
from zerodrift.comm.watch import cut, read_key
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
    mine = failed if failed is None or isinstance(failed, ZerodriftError) else _relayed(failed)
    by_text: dict[str, ZerodriftError] = {}
    for rank, theirs in enumerate(comm.all_gather_object(mine, axis)):
        if isinstance(theirs, RankError):
            theirs = RankError.relayed(f"rank {rank} of axis `{axis}`: {theirs}")
        if theirs is not None:
            by_text.setdefault(str(theirs), theirs)
    if failed is not None and not isinstance(failed, ZerodriftError):
        raise failed
    if by_text:
        errors = list(by_text.values())
        raise type(errors[0]).joined(errors) from failed


def _relayed(error: BaseException) -> RankError:
    """Return an error that is not one of ours as the other ranks raise it."""
    return RankError.relayed(f"{type(error).__name__}: {error}")


INTERVAL = 0.5
"""Seconds between two reads of the store."""

_COUNT = "zerodrift/alarms"


class Alarm:
    """The alarm of one mesh. Every rank makes one, and all make one before any makes another."""

    def __init__(self, mesh: Mesh, interval: float = INTERVAL) -> None:
        self._mesh = mesh
        self._text = ""
        """The error of another rank, or of this one; empty as long as there is none."""
        self._is_over = threading.Event()
        self._store: Any = None  # torch's stubs do not know all that a store can do
        self._key = ""
        world = mesh.group("world")
        if world is not None:
            self._store = world.get_group_store()
            # A launcher may keep a store longer than a mesh lasts: each has a key of its own.
            number = (self._store.add(_COUNT, 1) - 1) // mesh.size("world")
            self._key = f"zerodrift/failed/{number}"
            arguments = (self._store.clone(), interval)
            threading.Thread(target=self._watch, args=arguments, name="zerodrift-alarm", daemon=True).start()

    def check(self) -> None:
        """Raise if another rank is known to have failed. Asks nothing of the store."""
        if self._text:
            raise RankError.relayed(self._text)

    @contextlib.contextmanager
    def explain_failure(self) -> Iterator[None]:
        """Raise the error of the rank that failed first instead of the one that follows from it here."""
        try:
            yield
        except Exception as error:
            if self._read():
                raise RankError.relayed(self._text) from error
            raise
        self.check()

    @contextlib.contextmanager
    def raised(self, where: str, what: str) -> Iterator[None]:
        """Do the same, and let an error of this rank end the other ranks. `what` is done inside."""
        try:
            with self.explain_failure():
                yield
        except BaseException as error:
            if not self._read():
                got = f"{type(error).__name__}: {' '.join(str(error).split())} on rank {self._mesh.rank()}"
                do = "Mend it there, and start all ranks again."
                self._write(str(Problem(where, f"{what} must run on every rank", got=got, do=do)))
            self._cut()
            raise

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()

    def _write(self, text: str) -> None:
        self._text = text
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that has the store may be gone
                self._store.compare_set(self._key, "", text)

    def _read(self) -> str:
        if not self._text and self._store is not None:
            self._text = read_key(self._store, self._key).decode()
        return self._text

    def _watch(self, store: Any, interval: float) -> None:
        while not self._is_over.wait(interval):
            text = self._text or read_key(store, self._key).decode()
            if text:
                self._text = text
                self._cut()
                return

    def _cut(self) -> None:
        """End all waits on the groups of the mesh at once. See [Note: cutting] of `watch.py`."""
        if self._is_over.is_set():
            return  # done, or being done by the other thread
        self._is_over.set()
        cut(self._mesh.groups, self._mesh.device.type)
