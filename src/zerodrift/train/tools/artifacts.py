"""Find a trained model by a path: a run, its export, its checkpoints, or one of them.

Whichever of these is named, the same run is found. Any other path is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zerodrift.checkpoint import LATEST, MANIFEST, CheckpointFolder, state_file
from zerodrift.checkpoint import state as states
from zerodrift.errors import ConfigError
from zerodrift.model import CONFIG, is_installed, safetensors
from zerodrift.train.job import Job
from zerodrift.train.job_file import read_job
from zerodrift.train.loop.resume import BASE, JOB
from zerodrift.train.loop.run_folder import RunFolder, with_found_paths


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Weights, and the job that trained them. Either `export` or `checkpoint` is given."""

    export: Path | None
    """A folder of safetensors."""
    checkpoint: Path | None
    job: Job | None
    """None for an export alone."""
    started_in: str
    """The working folder of the run; empty if unknown."""


def checkpoints_at(path: Path) -> Path:
    """Return the checkpoints of a run, or any other path as it is."""
    run = RunFolder(path)
    return run.checkpoints if run.job.is_file() and run.checkpoints.is_dir() else path


def model_at(path: Path) -> TrainedModel:
    """Return the model at a path; for a run its export, or its newest checkpoint before there is one."""
    path = path.expanduser()
    run = _run_of(path)
    job = None if run is None else run.load_job()
    folder = "" if run is None else run.started_in()
    if run is not None and path.absolute() == run.path.absolute():
        if run.export.is_dir():
            return TrainedModel(run.export, None, job, folder)
        if not run.checkpoints.is_dir():
            must = "must have an export or a checkpoint to sample from"
            raise ConfigError(str(path), must, got="neither", do="Let it train a little longer.")
        if not _is_export(path):
            path = run.checkpoints
    if _is_export(path):
        return TrainedModel(path, None, job, folder)
    is_checkpoint = (path / MANIFEST).is_file()
    if is_checkpoint or CheckpointFolder(path).tags():
        place = path if is_checkpoint else CheckpointFolder(path).find(LATEST)
        if job is None and (text := _carried(place, JOB)) is not None:
            job = with_found_paths(read_job(json.loads(text))[0], folder)
        return TrainedModel(None, place, job, folder)
    must = "must be the folder of a run, its `export`, its `checkpoints`, or one of these"
    got = "no such folder" if not path.exists() else "a folder with none of them, without a `job.json`"
    raise ConfigError(str(path), must, got=f"{got} (looked for in {Path.cwd()})")


def config_of(path: Path) -> str | None:
    """Return the `transformers` config of a run's checkpoints, if its model has one; an export has its
    own."""
    path = path.expanduser()
    run = _run_of(path) if path.is_dir() and not _is_export(path) else None
    job = None if run is None else run.load_job()
    if job is None or job.model.lora is not None or not is_installed():
        return None
    config = Path(job.model.source).expanduser()
    return str(config) if config.is_file() or (config / CONFIG).is_file() else None


def _is_export(path: Path) -> bool:
    return path.is_dir() and safetensors.holds(path) and not (path / MANIFEST).is_file()


def _run_of(path: Path) -> RunFolder | None:
    whole = path.absolute()
    above = (RunFolder(place) for place in (path, whole.parent, whole.parent.parent))
    return next((run for run in above if run.job.is_file()), None)


def base_of(checkpoint: Path) -> str | None:
    """Return the digest of the base that a checkpoint's adapters were trained on."""
    return _carried(checkpoint, BASE)


def _carried(checkpoint: Path, key: str) -> str | None:
    client = states.read_state(checkpoint, state_file(0)).get("client")
    text = client.get(key) if isinstance(client, dict) else None
    return text if isinstance(text, str) else None
