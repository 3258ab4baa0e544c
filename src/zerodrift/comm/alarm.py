"""One rank's failure, told to ranks that wait for its messages.

For work in which ranks wait for each other in an order of their own, as in the schedule of a pipeline: no
collective can be agreed on in the middle of it (`shared_errors.py` is for the rest). The rank that fails
writes what happened to the store that its group was built with, and cuts its connections. On every other rank
a thread looks into the store now and then, and cuts the connections there, so that whatever waits, ends.

Invariant: what happened is in the store before any connection is cut, so a rank whose wait ends with an
error can say why; and a run in which nothing happens sends nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from zerodrift.comm.mesh import Mesh
from zerodrift.comm.watch import cut
from zerodrift.errors import Problem, RankError

INTERVAL = 0.5
"""Seconds between two looks into the store."""

_MADE = "zerodrift/alarms"


class Alarm:
    """Of one mesh, whose ranks all make one, each before any makes another."""

    def __init__(self, mesh: Mesh, interval: float = INTERVAL) -> None:
        self._mesh = mesh
        self._said = ""
        """What happened; empty as long as nothing has."""
        self._over = threading.Event()
        world = mesh.group("world")
        # torch's stubs do not know all that a store can do.
        self._store: Any = None
        if world is not None:
            self._store = world.get_group_store()
        self._key = ""
        if self._store is not None:
            # A launcher may keep a store longer than a mesh lasts: each has a key of its own.
            number = (self._store.add(_MADE, 1) - 1) // mesh.size("world")
            self._key = f"zerodrift/failed/{number}"
            watch = partial(self._watch, self._store.clone(), interval)
            threading.Thread(target=watch, name="zerodrift-alarm", daemon=True).start()

    def check(self) -> None:
        """Raise if another rank has failed. Costs nothing: it asks nobody."""
        if self._said:
            raise RankError.relayed(self._said)

    @contextlib.contextmanager
    def explain_failure(self) -> Iterator[None]:
        """What fails here because another rank has failed, says so."""
        try:
            yield
        except Exception as error:
            said = self._heard()
            if said:
                raise RankError.relayed(said) from error
            raise
        self.check()

    @contextlib.contextmanager
    def raised(self, where: str, what: str) -> Iterator[None]:
        """The same, and what fails here by itself ends the other ranks; `what` is done here."""
        try:
            with self.explain_failure():
                yield
        except BaseException as error:
            if not self._heard():
                got = f"{type(error).__name__}: {' '.join(str(error).split())} on rank {self._mesh.rank()}"
                do = "Mend it there, and start all ranks again."
                self._tell(str(Problem(where, f"{what} must run on every rank", got=got, do=do)))
            self._cut()
            raise

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def _tell(self, text: str) -> None:
        self._said = text
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the rank that has the store may be gone
                self._store.compare_set(self._key, "", text)

    def _heard(self) -> str:
        if not self._said and self._store is not None:
            self._said = _read(self._store, self._key)
        return self._said

    def _watch(self, store: Any, interval: float) -> None:
        while not self._over.wait(interval):
            said = self._said or _read(store, self._key)
            if said:
                self._said = said
                self._cut()
                return

    def _cut(self) -> None:
        """End all waits on the groups of the mesh, here at once. See [Note: cutting] of `watch.py`."""
        if self._over.is_set():
            return  # done, or being done by the other thread
        self._over.set()
        cut(self._mesh.groups, self._mesh.device.type)


def _read(store: Any, key: str) -> str:
    try:
        return store.get(key).decode() if store.check([key]) else ""
    except RuntimeError:  # closed with its group, or with the rank that has it
        return ""
