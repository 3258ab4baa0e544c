"""Steps recorded by torch's profiler: a trace of each rank, for Perfetto or chrome://tracing.

Invariant: a run that is recorded computes the same bits as one that is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from zerodrift.errors import ConfigError
from zerodrift.io.paths import writing
from zerodrift.train.loop.job import Profile


def require_inside(wanted: Profile | None, steps: int) -> None:
    """That the steps to record are steps of the run."""
    if wanted is not None and wanted.last > steps:
        must = f"must lie within the {steps:,} steps of the run"
        got = f"steps {wanted.from_} to {wanted.last}"
        raise ConfigError("run.profile", must, got=got, do="Lower `from` or `steps`, or raise `run.steps`.")


class StepRecorder:
    """Records what `run.profile` names, of one rank."""

    def __init__(self, wanted: Profile | None, folder: Path, rank: int, device: str) -> None:
        self._wanted, self._folder, self._rank, self._device = wanted, folder, rank, device
        self._profiler: Any = None
        self._first = self._last = 0

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Around step number `step`, counted from 1."""
        wanted = self._wanted
        if wanted is None or not wanted.from_ <= step <= wanted.last:
            yield
            return
        if self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self._device == "cuda" else []
            # Also of the thread of a backward that goes on in turns with a forward. Private in torch.
            threads = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = torch.profiler.profile(activities=kinds, experimental_config=threads)
            self._first = step
            self._profiler.start()
        self._last = step
        with torch.profiler.record_function(f"step {step}"):
            yield

    def is_due(self, step: int) -> bool:
        """Whether a trace is whole after this step."""
        return self._profiler is not None and self._wanted is not None and step >= self._wanted.last

    def write(self) -> RecordedSteps | None:
        """Write what was recorded; None where nothing was."""
        if self._profiler is None:
            return None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        steps = f"steps-{self._first:08}-{self._last:08}"
        path = self._folder / f"{steps}-rank-{self._rank}.json.gz"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        return RecordedSteps(self._first, self._last, self._folder)

    def missed(self, step: int) -> str:
        """What there is to say to a run that begins after `step`, where it is too late to record."""
        wanted = self._wanted
        if wanted is None or step < wanted.last or self._folder.is_dir():
            return ""
        return f"steps {wanted.from_} to {wanted.last} are over and are not recorded (`run.profile`)"


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Of which there is a trace of each rank."""

    first: int
    last: int
    folder: Path

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"
        return f"trace of {steps}, a file for each rank: {self.folder}"
