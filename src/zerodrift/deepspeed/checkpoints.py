"""`save_checkpoint` and `load_checkpoint`: DeepSpeed's calls on zerodrift's checkpoints.

A folder has a folder per tag and a file `latest`, as with DeepSpeed; what is in a tag's folder loads on any
number of ranks, at any stage. As in DeepSpeed the client state is rank 0's, and everybody gets it back; it
is made of plain values, because loading a checkpoint runs no code that is in it.

Invariant: what `load` was told to leave alone is as it was before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.deepspeed.utils import logger
from zerodrift.errors import CheckpointError, UnsupportedError
from zerodrift.io import checkpoint_state as states
from zerodrift.io.checkpoint_folder import Folder
from zerodrift.io.checkpoint_manifest import SHARED
from zerodrift.io.deepspeed_files import is_deepspeed

if TYPE_CHECKING:
    from zerodrift.deepspeed.engine import DeepSpeedEngine

SCRIPT = """#!/usr/bin/env python
# Makes one fp32 model of a checkpoint in this folder: python zero_to_fp32.py . output_folder
from zerodrift.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of a checkpoint to take."""

    optimizer: bool
    """Masters' moments, the loss scale, random numbers."""
    schedule: bool
    counts: bool
    """Steps, samples."""


def save(
    engine: DeepSpeedEngine,
    folder: str | os.PathLike[str],
    tag: str | None,
    client: Mapping[str, Any],
    latest: bool,
) -> bool:
    """Everything, under a tag; `latest` names it afterwards where that is wanted."""
    if not folder:
        raise ValueError(f"save_dir must be a non-empty string, got {folder!r}")
    below = engine.running
    client = below.comm.broadcast_object(dict(client), 0)
    counts = {"micro_steps": engine.micro_steps, "global_samples": engine.global_samples}
    state = {"client": client, "counts": counts}
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    engine.checkpoints_in(folder).save(tag, state, latest=latest)
    if below.mesh.rank() == 0:
        script = Path(folder) / "zero_to_fp32.py"
        script.write_text(SCRIPT, encoding="utf-8")
        script.chmod(0o755)
    return True


def load(
    engine: DeepSpeedEngine, folder: str | os.PathLike[str], tag: str | None, wanted: Wanted
) -> tuple[str | None, dict[str, Any] | None]:
    """The path and the client state; two Nones where there is no `latest` and no tag was asked for."""
    below = engine.running
    found = _look(folder) if below.mesh.rank() == 0 else None
    named, foreign = below.comm.broadcast_object(found, 0)
    if foreign:
        raise CheckpointError(
            f"`{os.fspath(folder)}`: must hold checkpoints of zerodrift; got DeepSpeed's. Convert it once "
            f"with `zerodrift convert`, which keeps masters, moments and counts."
        )
    if tag is None and not named:
        logger.warning("no checkpoint in %s that `latest` names: nothing is loaded", os.fspath(folder))
        return None, None
    parts = engine.checkpoints_in(folder)
    schedule = below.schedule.state_dict() if below.schedule is not None and not wanted.schedule else None
    loaded = parts.load(str(tag or named), parts="all" if wanted.optimizer else "weights")
    if not wanted.optimizer:
        _without_optimizer(engine, states.read_state(loaded.path / SHARED), wanted)
    elif schedule is not None:
        below.schedule.load_state_dict(schedule)
    client = loaded.client or {}
    if wanted.counts:
        counts = client.get("counts", {})
        engine.micro_steps = counts.get(
            "micro_steps", engine.global_steps * engine.gradient_accumulation_steps()
        )
        engine.global_samples = counts.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.tell()
    return str(loaded.path), dict(client.get("client", {}))


def _look(folder: str | os.PathLike[str]) -> tuple[str, bool]:
    """What `latest` names, and whether DeepSpeed itself saved here."""
    path = Path(folder)
    return Folder(path).latest(), path.is_dir() and is_deepspeed(path)


def _without_optimizer(engine: DeepSpeedEngine, shared: Mapping[str, Any], wanted: Wanted) -> None:
    below = engine.running
    if wanted.counts:
        below.global_steps, below.skipped_steps = shared["global_steps"], shared["skipped_steps"]
    if wanted.schedule and below.schedule is not None and shared["schedule"] is not None:
        below.schedule.load_state_dict(shared["schedule"])


def refuse_custom(custom: Callable[..., Any] | None) -> None:
    if custom is not None:
        raise UnsupportedError(
            "`custom_load_fn`: must be left out: masters and moments are loaded by name. To load weights in "
            "a way of your own, do it inside `zero.GatheredParameters(parameters, modifier_rank=0)`."
        )
