"""The folder of a run: where everything lies.

    runs/a/job.json         the job as it ran, defaults written out
    runs/a/plan.json        every decision
    runs/a/metrics.jsonl    a line per step, evaluation and event
    runs/a/report.html      what a person looks at
    runs/a/checkpoints/     to go on from
    runs/a/export/          the trained model
    runs/a/bad/             batches whose loss or gradient was not finite
    runs/a/logs/            what ranks printed
    runs/a/replay/          what a replay of its steps left

Invariant: a path of a run is spelled here and nowhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zerodrift.errors import ConfigError, said
from zerodrift.plan.table import Plan
from zerodrift.train.job import Job
from zerodrift.train.read import read_back


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
    def bad(self) -> Path:
        return self.path / "bad"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def replay(self) -> Path:
        return self.path / "replay"

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
        self.job.write_text(json.dumps(job.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")

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
        """The job of a run that was started."""
        if not self.job.is_file():
            must = "must be the folder of a run, with a `job.json`"
            raise ConfigError(str(self.path), must, got="none there")
        return read_back(self.job)
