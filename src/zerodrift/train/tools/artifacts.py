"""What a path names of what `train` leaves: a run, its export, its checkpoints, or one of them.

Invariant: whichever of these is named, the same run is found, and a path that is none of them is refused
with what they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zerodrift.errors import ConfigError
from zerodrift.io.checkpoint import state as states
from zerodrift.io.checkpoint.descriptions import state_file
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder
from zerodrift.io.checkpoint.manifest import MANIFEST
from zerodrift.model import safetensors
from zerodrift.model.huggingface import CONFIG, is_installed
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.job_file import read_job
from zerodrift.train.loop.resume import BASE, JOB
from zerodrift.train.loop.run_folder import RunFolder, from_here

MUST = "must be the folder of a run, its `export`, its `checkpoints`, or one of these"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A trained model: its weights, and the job that trained it."""

    export: Path | None
    """Safetensors; None for a checkpoint."""
    checkpoint: Path | None
    job: Job | None
    """None for an export that stands by itself."""
    started_in: str
    """The working folder of the run, where that is known."""


def checkpoints_at(path: Path) -> Path:
    """Where the checkpoints of a run are; the path itself where it is no run."""
    below = RunFolder(path).checkpoints
    return below if RunFolder(path).job.is_file() and below.is_dir() else path


def model_at(path: Path) -> FoundModel:
    """The model that a path names: of a run its export, or its newest checkpoint where there is none yet."""
    path = path.expanduser()
    run = next((RunFolder(place) for place in _above(path) if RunFolder(place).job.is_file()), None)
    job = None if run is None else run.load_job()
    folder = "" if run is None else run.started_in()
    if run is not None and _same(path, run.path) and run.export.is_dir():
        return FoundModel(run.export, None, job, folder)
    if run is not None and _same(path, run.path) and not run.checkpoints.is_dir():
        must = "must have an export or a checkpoint to sample from"
        raise ConfigError(str(path), must, got="neither", do="Let it train a little longer.")
    if path.is_dir() and safetensors.holds(path) and not (path / MANIFEST).is_file():
        return FoundModel(path, None, job, folder)
    if run is not None and _same(path, run.path):
        path = run.checkpoints
    if (path / MANIFEST).is_file() or CheckpointFolder(path).tags():
        place = path if (path / MANIFEST).is_file() else CheckpointFolder(path).find(LATEST)
        return FoundModel(None, place, job or _saved_job(place, folder), folder)
    got = "no such folder" if not path.exists() else "a folder with none of them, without a `job.json`"
    raise ConfigError(str(path), MUST, got=f"{got} (looked for in {Path.cwd()})")


def config_of(path: Path) -> str | None:
    """The folder with the `transformers` config of a run's checkpoints, where its model has one; an export
    has its own."""
    path = path.expanduser()
    if not path.is_dir() or (safetensors.holds(path) and not (path / MANIFEST).is_file()):
        return None
    run = next((RunFolder(place) for place in _above(path) if RunFolder(place).job.is_file()), None)
    job = None if run is None else run.load_job()
    if job is None or job.model.lora is not None or not is_installed():
        return None
    config = Path(job.model.source).expanduser()
    there = config.is_file() or (config / CONFIG).is_file()
    return str(config) if there else None


def _above(path: Path) -> list[Path]:
    """A path, and the two above it: a checkpoint lies two below its run."""
    whole = path.absolute()
    return [path, whole.parent, whole.parent.parent]


def _same(path: Path, other: Path) -> bool:
    return path.absolute() == other.absolute()


def _saved_job(checkpoint: Path, folder: str) -> Job | None:
    """The job by which a checkpoint was saved, which it carries."""
    text = _carried(checkpoint, JOB)
    return None if text is None else from_here(read_job(json.loads(text))[0], folder)


def base_of(checkpoint: Path) -> str | None:
    """The digest of what the adapters of a checkpoint were trained on."""
    return _carried(checkpoint, BASE)


def _carried(checkpoint: Path, key: str) -> str | None:
    client = states.read_state(checkpoint, state_file(0)).get("client")
    text = client.get(key) if isinstance(client, dict) else None
    return text if isinstance(text, str) else None
