"""The folder of a run, and the trained model at a path in it.

Every path in the folder is defined here; docs/train.md describes them. A model is found by the path of a run,
of its export or checkpoints, or of one checkpoint.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zerodrift.checkpoint import FULL, LATEST, MANIFEST, CheckpointFolder, state_file, unwritable
from zerodrift.errors import ConfigError, nearest_path, said
from zerodrift.model import CONFIG, is_installed, safetensors
from zerodrift.plan import Plan
from zerodrift.train.job import Job
from zerodrift.train.job_file import JOB_FILE, PLAN_FILE, read_back, read_job

JOB, STEP, PLACE, BASE = "job", "step", "data", "base"
"""Keys of the `client` state that checkpoints of a run carry."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.job, self.plan = path / JOB_FILE, path / PLAN_FILE
        self.environment, self.metrics = path / "environment.json", path / "metrics.jsonl"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.export, self.best = path / "export", path / "best"
        self.bad, self.logs, self.traces = path / "bad", path / "logs", path / "traces"
        self.replay, self.evaluation = path / "replay", path / "evaluation"
        self.events = path / "tensorboard"
        self.wandb = path / "wandb-id"

    @staticmethod
    def of(job: Job) -> RunFolder:
        return RunFolder(Path(job.run.folder).expanduser())

    def export_of(self, step: int) -> Path:
        return self.path / "exports" / f"step-{step:08}"

    def cache(self, written: str) -> Path:
        """Return the folder of prepared blocks; `written` is `data.cache`."""
        return Path(written).expanduser() if written else self.path.parent / "cache"

    def save_job(self, job: Job) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps(job.model_dump(mode="json", by_alias=True), indent=1) + "\n"
        self.job.write_text(text, encoding="utf-8")

    def save_plan(self, plan: Plan) -> None:
        self.plan.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")

    def separate_run(self, job: Job, folder: Path, start: str) -> list[str]:
        """Return overrides for a run in `folder` from a checkpoint, which leaves this folder alone."""
        values = {
            "run.folder": str(folder),
            "run.resume": start or "never",
            "run.tensorboard": False,
            "run.wandb": "",
            "data.cache": str(self.cache(job.data.cache)),
        }
        return [f"{key}={json.dumps(value)}" for key, value in values.items()]

    def started_in(self) -> str:
        try:
            values = json.loads(self.environment.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        return str(values.get("folder", "")) if isinstance(values, dict) else ""

    def load_plan(self) -> Plan:
        try:
            return Plan.from_json(json.loads(self.plan.read_text(encoding="utf-8")))
        except (OSError, KeyError, TypeError, ValueError) as error:
            must = "must be the plan of the run, as this version of zerodrift writes it"
            raise ConfigError(str(self.plan), must, got=said(error)) from error

    def load_job(self) -> Job:
        """Return the job of the run. Relative paths of its model and tokenizer are found from any folder."""
        if not self.job.is_file():
            must = "must be the folder of a run, with a `job.json`"
            raise ConfigError(str(self.path), must, got="none there", do=nearest_path(self.path))
        return with_found_paths(read_back(self.job), self.started_in())


def require_writable(key: str, path: Path) -> None:
    """Make a folder, or refuse it by its key if it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise unwritable(path, error) from None
        here = "" if path.is_absolute() else f" (in {Path.cwd()})"
        must, got = "must be a folder that can be written", f"{error.strerror or said(error)}{here}"
        raise ConfigError(key, must, got=f"{str(path)!r}: {got}", do="Choose another folder.") from None


def with_found_paths(job: Job, folder: str) -> Job:
    """Return a job that was started in `folder`, with paths of model and tokenizer that exist from here."""

    def found(path: str) -> str:
        if not path or not folder or Path(path).expanduser().exists():
            return path
        there = Path(folder) / Path(path).expanduser()
        return str(there) if there.exists() else path

    model = job.model.model_copy(update={"source": found(job.model.source)})
    data = job.data.model_copy(update={"tokenizer": found(job.data.tokenizer)})
    return job.model_copy(update={"model": model, "data": data})


# --- a trained model by its path ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Weights, and the job that trained them. Either `export` or `checkpoint` is given."""

    export: Path | None
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
    raise ConfigError(str(path), must, got=f"{got} (looked for in {Path.cwd()})", do=nearest_path(path))


def config_of(path: Path) -> str | None:
    """Return the path of the `transformers` config of a run's model; None for exports and other models."""
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
    from zerodrift.checkpoint import read_state  # imports torch

    client = read_state(checkpoint, state_file(0)).get("client")
    text = client.get(key) if isinstance(client, dict) else None
    return text if isinstance(text, str) else None
