"""One save on all ranks: begun together, written by each alone, and made a checkpoint together.

Between the two collective ends a rank only writes its own files, so that part may run in a thread. What
happens at the ends is agreed: when one rank fails, every rank raises the same error, and what was written
is taken away.

Invariant: a tag appears in the folder if and only if every rank has written all of its files to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerodrift.comm.collectives import Collectives
from zerodrift.errors import CheckpointError, RankError, ZerodriftError, said
from zerodrift.io.atomic import NewFolder
from zerodrift.io.checkpoint.descriptions import (
    NO_SUMS,
    Chunk,
    Description,
    Sums,
    rank_files,
    state_file,
    tensors_file,
    write_description,
)
from zerodrift.io.checkpoint.folder import CheckpointFolder, save_of
from zerodrift.io.checkpoint.index import FEW, write_index
from zerodrift.io.checkpoint.items import Item, write_items
from zerodrift.io.checkpoint.manifest import (
    SHARED,
    Manifest,
    SavedParameter,
    write_entries,
    write_manifest,
    write_plan,
    write_whole,
)
from zerodrift.io.paths import refusal, unwritable


@dataclass(frozen=True, slots=True)
class Head:
    """What rank 0 adds to the ranks' files."""

    manifest: Manifest
    """Without files."""
    entries: tuple[SavedParameter, ...]
    plan: dict[str, Any] | None
    shared: bytes
    """The state that is the same on every rank."""


@dataclass(frozen=True, slots=True)
class RankContents:
    """What one rank writes."""

    items: Iterable[Item]
    own: bytes
    """The state of this rank alone."""


@dataclass(slots=True)
class _Outcome:
    chunks: list[Chunk]
    sums: Sums
    error: ZerodriftError | None = None


def require_own(folder: CheckpointFolder, runs: Mapping[str, str], run: str) -> None:
    """That all checkpoints of a folder are one run's. `runs` has whose each is, by tag."""
    others = [tag for tag, owner in runs.items() if owner not in ("", run)]
    if others:
        raise CheckpointError(
            folder.path,
            "must hold checkpoints of this run alone",
            got=f"{', '.join(others[:5])} of another",
            do="Load one of them first to go on with it, or save to another folder.",
        )


class Save:
    """A save under way."""

    def __init__(
        self, comm: Collectives, folder: CheckpointFolder, tag: str, run: str | None, latest: bool = True
    ) -> None:
        """Collective: rank 0 takes the lock and makes a folder to write into, or all raise. Without `run` the
        folder may hold any run's checkpoints; without `latest` the file of that name still names another."""
        self._comm, self._folder, self._tag = comm, folder, tag
        self._latest = latest
        self._rank = comm.mesh.rank()
        self._new: NewFolder | None = None
        """On rank 0 alone."""
        self._outcome = _Outcome([], NO_SUMS)
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        path: Path | ZerodriftError | None = None
        if self._rank == 0:
            try:
                path = self._begin(run)
            except Exception as error:
                path = _refused(error, self._folder.path)
                self._drop()
        self._path = _of_rank_0(comm, path)

    def _begin(self, run: str | None) -> Path:
        def check() -> None:
            if run is not None:
                require_own(self._folder, self._folder.runs(), run)

        self._new = self._folder.begin(self._tag, check)
        return self._new.path

    # --- alone --------------------------------------------------------------------------------------------

    def write(self, job: RankContents) -> None:
        """Write this rank's files. Never raises: what went wrong is in the outcome."""
        try:
            tensors = self._path / tensors_file(self._rank)
            file, chunks = write_items(tensors, self._until_stopped(job.items))
            state = write_whole(self._path / state_file(self._rank), job.own)
            self._outcome.chunks = chunks
            written = Description(save_of(self._path), self._rank, file, state, tuple(chunks))
            self._outcome.sums = write_description(self._path, written)
        except Exception as error:
            self._outcome.error = _refused(error, self._folder.path)

    def _until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if self._stopped.is_set():
                raise CheckpointError(self._path, "must be written to its end", got="a run that ended")
            yield item

    def start(self, make: Callable[[], RankContents]) -> None:
        """The same beside training, but for `make`, which copies what is to be written."""
        try:
            job = make()
        except Exception as error:
            self._outcome.error = _refused(error, self._folder.path)
            return
        self._thread = threading.Thread(target=self.write, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def _running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # --- together -----------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Collective: whether every rank has written its files."""
        if self._new is not None:
            self._new.lock.touch()
        return not over_ranks(self._comm, np.array([self._running], np.int64))[0]

    def finish(self, head: Head | None, keep: int) -> Path:
        """Collective: wait for all ranks and make it a checkpoint, or raise on all what went wrong on any."""
        if self._thread is not None:
            self._thread.join()
        comm, outcome = self._comm, self._outcome
        try:
            errors = comm.all_gather_object(outcome.error)
            total = _Outcome([], NO_SUMS)
            if not any(errors):
                if len(errors) <= FEW:
                    total.chunks = list(chain.from_iterable(comm.gather_object(outcome.chunks)))
                total.sums = over_ranks(comm, outcome.sums)
            path = self._publish(errors, total, head, keep) if self._rank == 0 else None
            return _of_rank_0(comm, path)
        except RankError:
            self.abandon()
            raise

    def _publish(
        self, errors: Sequence[ZerodriftError | None], total: _Outcome, head: Head | None, keep: int
    ) -> Path | ZerodriftError:
        """On rank 0: the last files, the rename, and the folder in order again."""
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        try:
            if failed:
                first = next(iter(failed.values()))
                raise CheckpointError.of(first.problems, f"rank {', '.join(map(str, failed))}")
            if self._new is None or not self._new.lock.held:
                raise CheckpointError(
                    self._folder.path,
                    "must stay locked by this run while it saves",
                    got="another lock",
                    do="Two runs save here: give each a folder of its own.",
                )
            if head is None:
                raise AssertionError("rank 0 has the head")
            files = [write_entries(self._path, head.entries), write_whole(self._path / SHARED, head.shared)]
            if len(errors) <= FEW:
                files.append(write_index(self._path, total.chunks))
            if head.plan is not None:
                files.append(write_plan(self._path, head.plan))
            ordered = tuple(sorted(files, key=lambda file: file.name))
            of_ranks = rank_files(save_of(self._path), len(errors), total.sums)
            write_manifest(self._path, replace(head.manifest, files=ordered, of_ranks=of_ranks))
            home = self._folder.publish(self._new, self._latest)
            if keep:
                self._folder.prune(keep)
            return home
        except Exception as error:
            return _refused(error, self._folder.path)
        finally:
            self._drop()

    def abandon(self) -> None:
        """Let go without the other ranks: what was written goes, and the lock is free."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._drop()

    def _drop(self) -> None:
        if self._new is not None:
            self._new.remove()
            self._new = None


def over_ranks(comm: Collectives, numbers: np.ndarray) -> np.ndarray:
    """Collective: the sum of every rank's int64 numbers, modulo 2^64."""
    own = torch.from_numpy(numbers).to(comm.mesh.device)
    return np.array(comm.read(comm.all_reduce_sum(own, "world", "checkpoint")), np.int64)


def _of_rank_0(comm: Collectives, path: Path | ZerodriftError | None) -> Path:
    """What rank 0 has found, for all."""
    sent: Any = comm.broadcast_object(path, 0)
    if isinstance(sent, ZerodriftError):
        raise CheckpointError.joined([sent])
    return Path(sent)


def _refused(error: Exception, where: Path) -> ZerodriftError:
    if isinstance(error, ZerodriftError):
        return error
    refused = refusal(error)
    if refused is not None:
        said_no = unwritable(where, refused)
        do = f"{said_no.do} The checkpoints that were there are whole."
        return CheckpointError(said_no.where, said_no.must, got=said_no.got, do=do)
    return CheckpointError(where, "must be written", got=said(error))
