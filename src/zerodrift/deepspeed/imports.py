"""Checkpoints that DeepSpeed itself saved, for `load_checkpoint`.

Rank 0 writes one anew as a checkpoint of ours, in a folder beside it that is gone afterwards, and what loads
ours loads it: at any stage, on any number of ranks, by name. Masters, moments, counters, loss scale and
DeepSpeed's own schedules come over by that; a schedule of the caller's is handed its own state.

Invariant: what DeepSpeed saved is not changed, and nothing stays beside it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerodrift.checkpoint.differences import Allowed
from zerodrift.checkpoint.folder import is_deepspeed
from zerodrift.checkpoint.paths import kind_at
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.deepspeed.utils import logger
from zerodrift.errors import CheckpointError
from zerodrift.weights.convert import to_checkpoint
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed
from zerodrift.weights.deepspeed.files import find_tag
from zerodrift.weights.sources import TrainingState


@dataclass(frozen=True, slots=True)
class ImportedCheckpoint:
    """One of DeepSpeed's checkpoints, as ours."""

    folder: str
    """Where it is for now."""
    home: str
    """Where DeepSpeed saved it."""
    samples: int
    client: Mapping[str, Any]
    without: tuple[Allowed, ...]
    """What it does not have."""


def saved_by_deepspeed(folder: Path, tag: str | None) -> bool:
    """Whether what is to be loaded was saved by DeepSpeed."""
    if kind_at(folder) != "folder":
        return False
    place = folder / str(tag) if tag is not None else folder
    return is_deepspeed(place)


@contextlib.contextmanager
def imported(
    comm: Collectives, folder: str | os.PathLike[str], tag: str | None, schedule: Any
) -> Iterator[ImportedCheckpoint]:
    """A call of all ranks. `schedule` is the run's: what was saved of a caller's own is taken for its."""
    path = Path(folder)
    lead = comm.mesh.rank() == 0
    rooms: list[Path] = []
    written: list[ImportedCheckpoint] = []
    try:
        with raise_on_all_ranks(comm):
            if lead:
                rooms.append(_room(path))
                written.append(_write(path, str(tag or ""), rooms[0], schedule))
        yield comm.broadcast_object(written[0] if lead else None, 0)
        comm.barrier()
    finally:
        for place in rooms:
            shutil.rmtree(place, ignore_errors=True)


def _room(path: Path) -> Path:
    """Beside the checkpoint, where every rank can read."""
    try:
        return Path(tempfile.mkdtemp(prefix=".zerodrift-", dir=path))
    except OSError as error:
        raise CheckpointError(
            path,
            "must have room for the checkpoint in another form while it is loaded",
            got=error.strerror or error,
            do="Convert it to a place of your own once, with `zerodrift convert`.",
        ) from error


def _write(path: Path, tag: str, room: Path, schedule: Any) -> ImportedCheckpoint:
    source = open_deepspeed(find_tag(path, tag))
    trained = source.trained or TrainingState()
    if not trained.schedule and trained.schedule_state is not None and schedule is not None:
        trained = replace(trained, schedule=type(schedule).__name__)
        source = replace(source, trained=trained)
    to_checkpoint(source, room)
    for note in source.notes:
        logger.warning("%s: %s", source.path, note)
    lacking: dict[Allowed, bool] = {
        "optimizer": not trained.optimizer,
        "schedule": not trained.schedule,
    }
    return ImportedCheckpoint(
        str(room),
        str(source.path),
        trained.samples,
        dict(trained.client),
        tuple(word for word, lacks in lacking.items() if lacks),
    )
