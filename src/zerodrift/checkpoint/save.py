"""One save on all ranks: they begin together, write their own files, and publish together.

Only beginning and publishing are collective, so a rank may write its files in a thread.

Invariant: a tag appears in the folder if and only if every rank has written all of its files to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from zerodrift.checkpoint import manifest as manifests
from zerodrift.checkpoint.files import NewFolder, refusal, unwritable
from zerodrift.checkpoint.folder import CheckpointFolder, save_of
from zerodrift.checkpoint.manifest import NO_SUMS, SHARED, Chunk, Description, Manifest, SavedParameter, Sums
from zerodrift.checkpoint.tensors import FEW, Item, write_index, write_items
from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.errors import CheckpointError, RankError, ZerodriftError, said

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Head:
    manifest: Manifest
    """The manifest, without its list of files."""
    entries: tuple[SavedParameter, ...]
    plan: dict[str, Any] | None
    shared: bytes


def everywhere(comm: Collectives, work: Callable[[], T]) -> T:
    """Do local work on every rank; if it fails on one, all ranks raise the same CheckpointError."""
    with raise_on_all_ranks(comm):
        try:
            return work()
        except Exception as error:
            raise _as_checkpoint_error(error) from error


def on_rank_0(comm: Collectives, work: Callable[[], T]) -> T:
    """Do work on rank 0 and return its result on every rank; if it fails, all ranks raise its error."""
    made: Any = None
    if comm.mesh.rank() == 0:
        try:
            made = work()
        except Exception as error:
            made = _as_checkpoint_error(error)
    sent: Any = comm.broadcast_object(made, 0)
    if isinstance(sent, CheckpointError):
        raise sent
    result: T = sent
    return result


def _as_checkpoint_error(error: Exception) -> CheckpointError:
    if isinstance(error, ZerodriftError):
        return CheckpointError.joined([error])
    return CheckpointError("checkpoint", "must be read and written", got=said(error))


def over_ranks(comm: Collectives, numbers: np.ndarray) -> np.ndarray:
    """Sum int64 numbers over all ranks, modulo 2^64."""
    own = torch.from_numpy(numbers).to(comm.mesh.device)
    return np.array(comm.read(comm.all_reduce_sum(own, "world", "checkpoint")), np.int64)


def require_own(folder: CheckpointFolder, runs: Mapping[str, str], run: str) -> None:
    """Raise unless all checkpoints of a folder belong to one run; `runs` has the run of each tag."""
    others = [tag for tag, owner in runs.items() if owner not in ("", run)]
    if others:
        got = f"{', '.join(others[:5])} of another"
        do = "Load one of them first to continue that run, or save to another folder."
        raise CheckpointError(folder.path, "must hold only checkpoints of this run", got=got, do=do)


def write_rank_files(path: Path, rank: int, items: Iterable[Item], own: bytes) -> tuple[list[Chunk], Sums]:
    """Write the tensors and the state of one rank, and return their chunks and checksums."""
    file, chunks = write_items(path / manifests.tensors_file(rank), items)
    state = manifests.write_whole(path / manifests.state_file(rank), own)
    description = Description(save_of(path), rank, file, state, tuple(chunks))
    return chunks, manifests.write_description(path, description)


def write_head(path: Path, head: Head, ranks: int, chunks: list[Chunk], sums: Sums) -> Manifest:
    """Write the files of rank 0, the manifest last. `chunks` and `sums` are those of all ranks."""
    files = [manifests.write_entries(path, head.entries), manifests.write_whole(path / SHARED, head.shared)]
    if ranks <= FEW:
        files.append(write_index(path, chunks))
    if head.plan is not None:
        files.append(manifests.write_plan(path, head.plan))
    ordered = tuple(sorted(files, key=lambda file: file.name))
    of_ranks = manifests.rank_files(save_of(path), ranks, sums)
    manifest = replace(head.manifest, files=ordered, of_ranks=of_ranks)
    manifests.write_manifest(path, manifest)
    return manifest


class Save:
    def __init__(
        self, comm: Collectives, folder: CheckpointFolder, run: str | None, head: Head | None, latest: bool
    ) -> None:
        """Create the folder on rank 0, which has the `head`, or raise on all ranks. With `run` the folder may
        hold no other run's checkpoints. Without `latest` the file of that name stays as it is."""
        self._comm, self._folder, self._head, self._latest = comm, folder, head, latest
        self._rank = comm.mesh.rank()
        self._new: NewFolder | None = None
        self._written: tuple[list[Chunk], Sums] = ([], NO_SUMS)
        self._error: ZerodriftError | None = None
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

        def check() -> None:
            if run is not None:
                require_own(folder, folder.runs(), run)

        def begin() -> Path:
            assert head is not None
            self._new = folder.begin(head.manifest.tag, check)
            return self._new.path

        self._path = self._on_rank_0(begin)

    def write(self, items: Iterable[Item], own: bytes) -> None:
        """Write this rank's tensors and state. An error is kept for `finish`."""
        try:
            self._written = write_rank_files(self._path, self._rank, self._until_stopped(items), own)
        except Exception as error:
            self._error = _refused(error, self._folder.path)

    def _until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        for item in items:
            if self._stopped.is_set():
                raise CheckpointError(self._path, "must be written to its end", got="a run that ended")
            yield item

    def start(self, copy: Callable[[], Iterable[Item]], own: bytes) -> None:
        """Copy the tensors, and write them in a thread beside training."""
        try:
            arguments = (copy(), own)
        except Exception as error:
            self._error = _refused(error, self._folder.path)
            return
        self._thread = threading.Thread(target=self.write, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Collective: return whether every rank has written its files."""
        if self._new is not None:
            self._new.lock.touch()
        running = self._thread is not None and self._thread.is_alive()
        return not over_ranks(self._comm, np.array([running], np.int64))[0]

    def finish(self, keep: int) -> Path:
        """Collective: wait for all ranks and publish, or raise on all ranks the errors of any."""
        if self._thread is not None:
            self._thread.join()
        comm, chunks, sums = self._comm, [], NO_SUMS
        try:
            errors = comm.all_gather_object(self._error)
            if not any(errors):
                if len(errors) <= FEW:
                    chunks = list(chain.from_iterable(comm.gather_object(self._written[0])))
                sums = over_ranks(comm, self._written[1])
            return self._on_rank_0(lambda: self._publish(errors, chunks, sums, keep))
        except RankError:
            self.abandon()
            raise

    def _on_rank_0(self, work: Callable[[], Path]) -> Path:
        """Collective: return the path that rank 0 makes, or raise its error on all ranks."""

        def named() -> Path:
            try:
                return work()
            except Exception as error:
                raise _refused(error, self._folder.path) from error

        return on_rank_0(self._comm, named)

    def _publish(
        self, errors: Sequence[ZerodriftError | None], chunks: list[Chunk], sums: Sums, keep: int
    ) -> Path:
        """Write the last files on rank 0, rename the folder, and remove old ones."""
        try:
            failed = {rank: error for rank, error in enumerate(errors) if error is not None}
            if failed:
                first = next(iter(failed.values()))
                raise CheckpointError.of(first.problems, f"rank {', '.join(map(str, failed))}")
            if self._new is None or not self._new.lock.held:
                must = "must stay locked by this run while it saves"
                do = "Two runs save here: give each a folder of its own."
                raise CheckpointError(self._folder.path, must, got="another lock", do=do)
            assert self._head is not None
            write_head(self._path, self._head, len(errors), chunks, sums)
            path = self._folder.publish(self._new, self._latest)
            if keep:
                self._folder.prune(keep)
            return path
        finally:
            self._drop()

    def abandon(self) -> None:
        """Stop without the other ranks: remove what was written, and release the lock."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._drop()

    def _drop(self) -> None:
        if self._new is not None:
            self._new.remove()
            self._new = None


def _refused(error: Exception, where: Path) -> ZerodriftError:
    if isinstance(error, ZerodriftError):
        return error
    refused = refusal(error)
    if refused is None:
        return CheckpointError(where, "must be written", got=said(error))
    no = unwritable(where, refused)
    return CheckpointError(no.where, no.must, got=no.got, do=f"{no.do} Earlier checkpoints are whole.")
