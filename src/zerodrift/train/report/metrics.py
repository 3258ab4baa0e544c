"""Write and read the metrics of a run as JSON lines, and log them to TensorBoard and Weights & Biases.

A line has a `kind`: `start`, `step`, `digest`, `evaluation`, `sample`, `checkpoint`, `skip`, `precision`,
`flops`, `audit`, `trace`, `end`. Times are seconds of training in this and earlier runs of the folder. A
resumed run removes the lines after its checkpoint, so that each step has one line. Only rank 0 writes.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import resource
import sys
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.checkpoint import new_file
from zerodrift.errors import ConfigError, Problems, said
from zerodrift.files import opened
from zerodrift.train.job import Job, Run
from zerodrift.train.loop.run_folder import RunFolder

if TYPE_CHECKING:
    import torch

Write = Callable[[int, Mapping[str, float]], None]
"""Writes the numbers of a step."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    step: int
    """Counted from 1, skipped steps too."""
    loss: float
    """Mean over the step's labels, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Learning rate of the first parameter group."""
    loss_scale: float
    tokens: int
    """Seen so far, with padding."""
    epoch: float
    seconds: float
    """Spent so far in training steps."""
    tokens_per_second: float
    memory: int
    """Bytes: of the process on a CPU, at peak on a GPU."""
    skipped: bool = False


class RunLines:
    """The lines of a run in memory: steps as columns of 88 bytes a step, other lines as dicts.

    Iterates over the lines that are not steps. A value that is not finite counts as missing.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns = {field.name: array("d") for field in fields(StepMetrics)}
        self._others: list[Mapping[str, Any]] = []
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        if line["kind"] != "step":
            self._others.append(line)
            return
        for name, column in self._columns.items():
            value = line.get(name)
            column.append(math.nan if value is None else float(value))

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._others)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self._others if line["kind"] == kind]

    def last_of_kind(self, kind: str) -> Mapping[str, Any]:
        return next((line for line in reversed(self._others) if line["kind"] == kind), {})

    def steps(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of every step that has a value."""
        pairs = zip(self._columns["step"], self._columns[key], strict=True)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def last(self, key: str) -> float | None:
        return next((value for value in reversed(self._columns[key]) if math.isfinite(value)), None)


class Metrics:
    def __init__(self, folder: RunFolder, job: Job, after: int) -> None:
        """`after` is the step that the run resumes from."""
        lines = _read(folder.metrics)
        self.lost = lines.count(None)
        """Damaged lines that were left out."""
        kept = [
            line
            for line in lines
            if line is not None and int(line.get("step", 0)) <= after and line.get("kind") != "end"
        ]
        self.lines = RunLines(kept)
        self.has_news = False
        """Whether a line was written, except for the same end as before."""
        self._end = next((line for line in reversed(lines) if line and line["kind"] == "end"), None)
        folder.metrics.parent.mkdir(parents=True, exist_ok=True)
        with new_file(folder.metrics) as file:
            file.write_text("".join(_text(line) for line in kept), encoding="utf-8")
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._boards = _boards(folder, job, after)

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, **values}
        self.has_news |= line != self._end
        self.lines.add(line)
        self._file.write(_text(line))
        self._file.flush()
        if kind in ("step", "evaluation"):
            numbers = {}
            for key, value in values.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if is_number and math.isfinite(value) and key != "step":
                    numbers[key] = value
            for write, _ in self._boards:
                write(int(values["step"]), numbers)

    def close(self) -> None:
        self._file.close()
        for _, close in self._boards:
            close()


def read(path: Path) -> list[dict[str, Any]]:
    return [line for line in _read(path) if line is not None]


def _read(path: Path) -> list[dict[str, Any] | None]:
    """Return the lines of a file, None for a damaged one. A last line without its end is left out."""
    try:
        with opened(path) as file:
            data = file.read()
    except FileNotFoundError:
        return []
    except OSError as error:
        must, got = "must be a file, or not be there", error.strerror or said(error)
        raise ConfigError(str(path), must, got=got, do="Move it away.") from None
    *texts, _ = data.split(b"\n")
    return [_line(text) for text in texts]


_NUMBER = (int, float, type(None))
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "step": {field.name: _NUMBER for field in fields(StepMetrics)},
    "evaluation": {"step": int, "validation_loss": _NUMBER},
    "sample": {"step": int, "prompt": str, "text": str},
    "flops": {"step": int, "per_token": _NUMBER},
    "trace": {"step": int, "first": int, "folder": str},
    "skip": {"step": int, "parameters": list, "places": str},
    "precision": {"line": str, "cells": list, "logits": list},
    "digest": {"step": int, "state": dict, "gradients": dict, "losses": list},
}
"""Fields that the page and a resumed run need of each kind."""


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    kind, step = line.get("kind"), line.get("step", 0)
    if not isinstance(kind, str) or type(step) is not int or step < 0:
        return None
    wanted = _FIELDS.get(kind, {}).items()
    return line if all(key in line and isinstance(line[key], types) for key, types in wanted) else None


def _text(line: Mapping[str, Any]) -> str:
    # JSON has no NaN and no infinity: both become null.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain) + "\n"


def memory(device: torch.device) -> int:
    """Return the bytes allocated at peak on a GPU, or the resident memory of the process."""
    if device.type != "cpu":
        import torch

        return torch.accelerator.max_memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def check_boards(run: Run) -> None:
    problems = Problems()
    for key, is_wanted in (("tensorboard", run.tensorboard), ("wandb", bool(run.wandb))):
        if is_wanted and importlib.util.find_spec(key) is None:
            todo = f"Run `pip install {key}`."
            problems.add(f"run.{key}", f"`{key}` must be installed", got="no such package", do=todo)
    problems.raise_as(ConfigError)


def _boards(folder: RunFolder, job: Job, after: int) -> list[tuple[Write, Callable[[], None]]]:
    """Return functions for each board: one that logs the numbers of a step, and one that closes the board.

    A resumed run continues the same curves.
    """
    boards: list[tuple[Write, Callable[[], None]]] = []
    run = job.run
    if run.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        events = SummaryWriter(str(folder.events), purge_step=after + 1 if after else None)

        def write(step: int, numbers: Mapping[str, float]) -> None:
            for key, value in numbers.items():
                events.add_scalar(key, value, step)

        boards.append((write, events.close))
    if run.wandb:
        import wandb

        if not after or not folder.wandb.exists():
            folder.wandb.write_text(uuid.uuid4().hex[:8])
        # Weights & Biases takes no step twice: values logged after the checkpoint stay.
        logged = wandb.init(
            project=run.wandb,
            id=folder.wandb.read_text(),
            name=folder.path.name,
            dir=str(folder.path),
            config=job.model_dump(mode="json", by_alias=True),
            resume="allow",
        )
        boards.append((lambda step, numbers: logged.log(dict(numbers), step=step), logged.finish))
    return boards
