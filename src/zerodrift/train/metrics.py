"""What is measured of a run, a JSON line each: for programs and for the report; `boards` shows the
same numbers elsewhere.

A line has a `kind`: `start`, `step`, `evaluation`, `checkpoint`, `skip`, `precision`, `end`. Times are
seconds of training in this and earlier runs of the folder; what was written after the checkpoint that a run
goes on from is taken out, so a step is there once.

Invariant: one process writes, and a line that is there is whole.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerodrift.train.boards import boards
from zerodrift.train.folder import Folder
from zerodrift.train.job import Run


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step."""

    step: int
    """Counted from 1, skipped ones too."""
    loss: float
    """Mean over the step's labels, before the update."""
    grad_norm: float
    """Before clipping."""
    lr: float
    """Of the first parameter group."""
    loss_scale: float
    tokens: int
    """Seen so far."""
    epoch: float
    seconds: float
    """So far, in training steps."""
    tokens_per_second: float
    memory: int
    """Bytes: of the process on a CPU, at peak on a GPU."""
    skipped: bool = False


def kind_of(line: Mapping[str, Any], kind: str) -> bool:
    return line.get("kind") == kind


class Metrics:
    """Writes the lines of a run."""

    def __init__(self, folder: Folder, run: Run, after: int) -> None:
        """`after` is the step that the run goes on from."""
        self.lines = [line for line in read(folder.metrics) if _is_before(line, after)]
        folder.metrics.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.metrics.with_suffix(".new")
        beside.write_text("".join(_text(line) for line in self.lines), encoding="utf-8")
        beside.replace(folder.metrics)
        self._file = folder.metrics.open("a", encoding="utf-8")
        self._boards = boards(folder, run, after)

    @property
    def seconds(self) -> float:
        """Of training so far."""
        steps = [line for line in self.lines if kind_of(line, "step")]
        return float(steps[-1]["seconds"]) if steps else 0.0

    def step(self, step: Step) -> None:
        self.write("step", asdict(step))

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = {"kind": kind, **values}
        self.lines.append(line)
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
    """The lines of a file; the last may have been cut short."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return found


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
        return int(torch.cuda.max_memory_allocated(device))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")
