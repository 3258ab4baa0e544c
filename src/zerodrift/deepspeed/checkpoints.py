"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's calls on zerodrift's checkpoints.

A folder has a folder per tag and a file `latest`, as with DeepSpeed; what is in a tag's folder loads on any
number of ranks, at any stage. As in DeepSpeed the client state is rank 0's, and everybody gets it back; it
is made of plain values, because loading a checkpoint runs no code that is in it. What DeepSpeed itself saved
is loaded too, by way of `imports.py`.

Invariant: what `load` was told to leave alone is as it was before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zerodrift.checkpoint.atomic import new_file
from zerodrift.checkpoint.checkpoints import Checkpoints, Loaded, Part
from zerodrift.checkpoint.differences import Allowed
from zerodrift.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.deepspeed.imports import ImportedCheckpoint, imported, saved_by_deepspeed
from zerodrift.deepspeed.unsupported import MissingCheckpointError
from zerodrift.deepspeed.utils import logger
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError, UnsupportedError

SCRIPT = """#!/usr/bin/env python
# Makes one fp32 model of a checkpoint in this folder: python zero_to_fp32.py . output_folder
from zerodrift.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What of a checkpoint to take."""

    optimizer: bool
    """Masters' moments, the loss scale, random numbers."""
    schedule: bool
    counts: bool
    """Steps, samples."""
    strict: bool = True
    """Whether names must be the same on both sides."""

    @property
    def allow(self) -> tuple[Allowed, ...]:
        # A schedule of another kind is DeepSpeed's error only where the optimizer comes along.
        free: tuple[Allowed, ...] = () if self.optimizer else ("schedule",)
        return free if self.strict else (*free, "model", "buffers")

    def parts(self, scheduled: bool) -> frozenset[Part]:
        """What is taken beside the weights, by a run with a schedule or without."""
        chosen: dict[Part, bool] = {
            "optimizer": self.optimizer,
            "schedule": self.schedule and (scheduled or self.optimizer),
            "counts": self.counts,
        }
        return frozenset(part for part, wanted in chosen.items() if wanted)


class CheckpointedEngine(Protocol):
    """What of DeepSpeed's engine is saved, loaded and counted anew."""

    micro_steps: int
    global_samples: int

    @property
    def running(self) -> Engine: ...
    @property
    def global_steps(self) -> int: ...
    def checkpoints_in(self, folder: str | os.PathLike[str]) -> Checkpoints: ...
    def gradient_accumulation_steps(self) -> int: ...
    def train_batch_size(self) -> int: ...
    def tell(self) -> None: ...


def save(
    engine: CheckpointedEngine,
    folder: str | os.PathLike[str],
    tag: str | None,
    client: Mapping[str, Any],
    latest: bool,
    frozen: bool = True,
) -> bool:
    """Everything, under a tag; `latest` names it afterwards where that is wanted."""
    if not folder:
        raise ValueError(f"save_dir must be a non-empty string, got {folder!r}")
    below = engine.running
    client = below.comm.broadcast_object(dict(client), 0)
    counts = {"micro_steps": engine.micro_steps, "global_samples": engine.global_samples}
    state = {"client": client, "counts": counts}
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    engine.checkpoints_in(folder).save(tag, state, latest=latest, frozen=frozen, within=True)
    with raise_on_all_ranks(below.comm):
        if below.mesh.rank() == 0:
            _write_script(Path(folder) / "zero_to_fp32.py")
    return True


def _write_script(path: Path) -> None:
    """Beside the checkpoints, unless it is there."""
    if os.path.lexists(path):
        return
    with new_file(path) as partial:
        partial.write_text(SCRIPT, encoding="utf-8")
        partial.chmod(0o755)


def load(
    engine: CheckpointedEngine, folder: str | os.PathLike[str], tag: str | None, wanted: LoadRequest
) -> tuple[str | None, dict[str, Any] | None]:
    """The path and the client state; two Nones where there is no `latest` and no tag was asked for."""
    below = engine.running
    lead = below.mesh.rank() == 0
    path = Path(folder)
    looked: list[tuple[bool, str]] = []
    with raise_on_all_ranks(below.comm):
        if lead:
            there = CheckpointFolder(path)
            looked.append((saved_by_deepspeed(path, tag), "" if tag is not None else there.latest()))
            if tag is not None and not looked[0][0]:
                require(there, str(tag))
            if tag is None and looked[0] == (False, "") and there.halves():
                there.newest()  # which says what is missing
    theirs, named = below.comm.broadcast_object(looked[0] if lead else None, 0)
    if theirs:
        with imported(below.comm, folder, tag, below.schedule) as checkpoint:
            return _load_theirs(engine, checkpoint, wanted)
    if tag is None and not named:
        logger.warning("no checkpoint in %s that `latest` names: nothing is loaded", os.fspath(folder))
        return None, None
    loaded = _load(engine, engine.checkpoints_in(folder), str(tag or named), wanted, wanted.allow)
    client = loaded.client or {}
    _count(engine, wanted, client.get("counts", {}))
    return str(loaded.path), dict(client.get("client", {}))


def require(folder: CheckpointFolder, tag: str) -> Path:
    """The checkpoint of that tag, or DeepSpeed's kinds of error."""
    try:
        return folder.find(tag)
    except CheckpointError as error:
        raise MissingCheckpointError.joined([error]) from error


def _load(
    engine: CheckpointedEngine, parts: Checkpoints, tag: str, wanted: LoadRequest, allow: tuple[Allowed, ...]
) -> Loaded:
    loaded = parts.load_parts(tag, wanted.parts(engine.running.schedule is not None), allow)
    for difference in loaded.differences:
        if difference.what == "model":
            logger.warning("%s: %s", loaded.path, difference)
    return loaded


def _load_theirs(
    engine: CheckpointedEngine, checkpoint: ImportedCheckpoint, wanted: LoadRequest
) -> tuple[str | None, dict[str, Any] | None]:
    """What DeepSpeed itself saved."""
    parts = Checkpoints(engine.running, checkpoint.folder, quiet=True)
    _load(engine, parts, LATEST, wanted, (*wanted.allow, *checkpoint.without))
    _count(engine, wanted, {"global_samples": checkpoint.samples})
    return checkpoint.home, dict(checkpoint.client)


def _count(engine: CheckpointedEngine, wanted: LoadRequest, counts: Mapping[str, int]) -> None:
    if wanted.counts:
        steps = engine.global_steps
        per_step = engine.gradient_accumulation_steps()
        saved = counts.get("micro_steps", steps * per_step)
        engine.micro_steps = saved - saved % per_step  # gradients of a part of a step are in no checkpoint
        engine.global_samples = counts.get("global_samples", steps * engine.train_batch_size())
    engine.tell()


def refuse_custom(custom: Callable[..., Any] | None) -> None:
    if custom is not None:
        raise UnsupportedError(
            "custom_load_fn",
            "must be left out: masters and moments are loaded by name",
            do=(
                "To load weights in a way of your own, do it inside "
                "`zero.GatheredParameters(parameters, modifier_rank=0)`."
            ),
        )
