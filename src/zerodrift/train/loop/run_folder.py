"""The folder of a run. Every path in it is spelled here.

runs/a/job.json         the job as it ran, defaults written out
runs/a/plan.json        every decision
runs/a/environment.json where it was started, with which command and versions
runs/a/metrics.jsonl    a line per step, evaluation and event
runs/a/report.html      the page of the run
runs/a/checkpoints/     to go on from
runs/a/export/          the trained model
runs/a/exports/         the model at earlier steps
runs/a/best/            the model at its best evaluation
runs/a/bad/             batches whose loss or gradient was not finite
runs/a/logs/            what ranks printed
runs/a/traces/          steps as torch's profiler recorded them
runs/a/replay/          what a replay of its steps left
runs/a/evaluation/      what an evaluation of a checkpoint left
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from zerodrift.checkpoint import FULL, unwritable
from zerodrift.errors import ConfigError, said
from zerodrift.plan import Plan
from zerodrift.train.job import Job
from zerodrift.train.job_file import read_back


class RunFolder:
    """The paths of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job, self.plan = path / "job.json", path / "plan.json"
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
        """Return the working folder of the run; empty if unknown."""
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
        """Return the job of the run, with model and tokenizer as they are found from any working folder."""
        if not self.job.is_file():
            must = "must be the folder of a run, with a `job.json`"
            raise ConfigError(str(self.path), must, got="none there")
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
    """Return a job that was started in `folder` with the paths of its model and tokenizer from this
    folder."""

    def found(path: str) -> str:
        if not path or not folder or Path(path).expanduser().exists():
            return path
        there = Path(folder) / Path(path).expanduser()
        return str(there) if there.exists() else path

    model = job.model.model_copy(update={"source": found(job.model.source)})
    data = job.data.model_copy(update={"tokenizer": found(job.data.tokenizer)})
    return job.model_copy(update={"model": model, "data": data})
