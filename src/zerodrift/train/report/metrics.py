"""What is measured of a run, a JSON line each: for programs and for the report; `boards` shows the
same numbers elsewhere.

A line has a `kind`: `start`, `step`, `digest`, `evaluation`, `sample`, `checkpoint`, `skip`, `precision`,
`flops`, `audit`, `trace`, `end`. Times are seconds of training in this and earlier runs of the folder; what
was written after the checkpoint that a run goes on from is taken out, so a step is there once.

Invariant: one process writes, and a line that is there is whole.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.errors import ConfigError, said
from zerodrift.files import opened
from zerodrift.io.atomic import new_file
from zerodrift.train.loop.job import Run
from zerodrift.train.loop.run_folder import RunFolder
from zerodrift.train.report.boards import boards
from zerodrift.train.report.lines import RunLines, StepMetrics

if TYPE_CHECKING:
    import torch


def kind_of(line: Mapping[str, Any], kind: str) -> bool:
    return line.get("kind") == kind


class Metrics:
    """Writes the lines of a run."""

    def __init__(self, folder: RunFolder, run: Run, after: int) -> None:
        """`after` is the step that the run goes on from."""
        lines = _read(folder.metrics)
        self.lost = lines.count(None)
        """Lines of the file that cannot be read, and were left out."""
        kept = [line for line in lines if line is not None and _is_before(line, after)]
        self.lines = RunLines(kept)
        folder.metrics.parent.mkdir(parents=True, exist_ok=True)
        with new_file(folder.metrics) as file:
            file.write_text("".join(_text(line) for line in kept), encoding="utf-8")
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._boards = boards(folder, run, after)

    @property
    def seconds(self) -> float:
        """Of training so far."""
        return self.lines.last("seconds") or 0.0

    def tokens(self, step: int, of_a_step: int) -> int:
        """Of the steps so far; those that are not written down had `of_a_step` each."""
        last, tokens = self.lines.last("step"), self.lines.last("tokens")
        if last is None or tokens is None:
            return step * of_a_step
        return round(tokens) + (step - round(last)) * of_a_step

    def step(self, step: StepMetrics) -> None:
        self.write("step", asdict(step))

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, **values}
        self.lines.add(line)
        self._file.write(_text(line))
        self._file.flush()
        numbers = {key: value for key, value in values.items() if _is_number(value) and key != "step"}
        if kind in ("step", "evaluation"):
            for board in self._boards:
                board.write(int(values["step"]), numbers)

    def close(self) -> None:
        self._file.close()
        for board in self._boards:
            board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are whole."""
    return [line for line in _read(path) if line is not None]


def _read(path: Path) -> list[dict[str, Any] | None]:
    """The lines of a file, None for one that is damaged; a last one that was cut short is none."""
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


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and _is_whole(line) else None


def _is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a line has what its kind has, as the report and a run that goes on need it."""
    kind, step = line.get("kind"), line.get("step", 0)
    if not isinstance(kind, str) or type(step) is not int or step < 0:
        return False
    return all(key in line and isinstance(line[key], types) for key, types in _FIELDS.get(kind, {}).items())


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


def _is_before(line: Mapping[str, Any], after: int) -> bool:
    return int(line.get("step", 0)) <= after and line.get("kind") != "end"


def _text(line: Mapping[str, Any]) -> str:
    # JSON has no word for what is not finite; null is read as "no number" everywhere.
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(plain) + "\n"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def memory(device: torch.device) -> int:
    """Bytes: allocated at peak on a GPU, else what the process has in memory now."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
