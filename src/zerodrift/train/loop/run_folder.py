"""The folder of a run: where everything lies.

    runs/a/job.json         the job as it ran, defaults written out
    runs/a/plan.json        every decision
    runs/a/environment.json where it was started, with which command and versions
    runs/a/metrics.jsonl    a line per step, evaluation and event
    runs/a/report.html      what a person looks at
    runs/a/checkpoints/     to go on from
    runs/a/export/          the trained model
    runs/a/exports/         it as it was on the way
    runs/a/best/            it as it was at its best evaluation
    runs/a/bad/             batches whose loss or gradient was not finite
    runs/a/logs/            what ranks printed
    runs/a/traces/          steps as torch's profiler recorded them
    runs/a/replay/          what a replay of its steps left
    runs/a/evaluation/      what an evaluation of a checkpoint left

Invariant: a path of a run is spelled here and nowhere else.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerodrift.errors import ConfigError, said
from zerodrift.io.paths import FULL, unwritable
from zerodrift.plan.table import Plan
from zerodrift.train.loop.job import Job
from zerodrift.train.loop.job_file import read_back
from zerodrift.train.report.provenance import FOLDER, found_from


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def export_of(self, step: int) -> Path:
        return self.path / "exports" / f"step-{step:08}"

    @property
    def bad(self) -> Path:
        return self.path / "bad"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def replay(self) -> Path:
        return self.path / "replay"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation"

    @property
    def events(self) -> Path:
        """TensorBoard's."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """What Weights & Biases calls this run."""
        return self.path / "wandb-id"

    def cache(self, written: str) -> Path:
        """Where packed blocks lie; `written` is `data.cache`."""
        return Path(written).expanduser() if written else self.path.parent / "cache"

    def save_job(self, job: Job) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.job.write_text(
            json.dumps(job.model_dump(mode="json", by_alias=True), indent=1) + "\n", encoding="utf-8"
        )

    def save_environment(self, values: Mapping[str, str]) -> None:
        self.environment.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def started_in(self) -> str:
        """The working folder of the run; empty where that is not known."""
        try:
            values = json.loads(self.environment.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return ""
        return str(values.get(FOLDER, "")) if isinstance(values, dict) else ""

    def save_plan(self, plan: Plan) -> None:
        self.plan.write_text(json.dumps(plan.to_json()) + "\n", encoding="utf-8")

    def load_plan(self) -> Plan:
        """The plan of a run that was started."""
        try:
            return Plan.from_json(json.loads(self.plan.read_text(encoding="utf-8")))
        except (OSError, KeyError, TypeError, ValueError) as error:
            must = "must be the plan of the run, as this version of zerodrift writes it"
            raise ConfigError(str(self.plan), must, got=said(error)) from error

    def load_job(self) -> Job:
        """The job of a run that was started; its model and tokenizer are found from any working folder."""
        if not self.job.is_file():
            must = "must be the folder of a run, with a `job.json`"
            raise ConfigError(str(self.path), must, got="none there")
        return from_here(read_back(self.job), self.started_in())


def require_writable(key: str, path: Path) -> None:
    """Make a folder, or refuse it by the key that names it where it cannot be made or written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in FULL:
            raise unwritable(path, error) from None
        got = f"{str(path)!r}: {error.strerror or said(error)}"
        if not path.is_absolute():
            got += f" (in {Path.cwd()})"
        must = "must be a folder that can be written"
        raise ConfigError(key, must, got=got, do="Choose another folder.") from None


def from_here(job: Job, folder: str) -> Job:
    """A job that was started in `folder`, with its model and tokenizer as they are found from this one."""
    model = job.model.model_copy(update={"source": found_from(job.model.source, folder)})
    data = job.data.model_copy(update={"tokenizer": found_from(job.data.tokenizer, folder)})
    return job.model_copy(update={"model": model, "data": data})
