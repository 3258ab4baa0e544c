"""Record steps with torch's profiler: a trace of each rank, for Perfetto or chrome://tracing.

A recorded run computes the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from zerodrift.checkpoint.paths import writing
from zerodrift.errors import ConfigError
from zerodrift.train.job import Profile


def require_steps(wanted: Profile | None, steps: int) -> None:
    """Refuse to record steps after the end of the run."""
    if wanted is not None and wanted.last > steps:
        must = f"must lie within the {steps:,} steps of the run"
        got = f"steps {wanted.from_} to {wanted.last}"
        raise ConfigError("run.profile", must, got=got, do="Lower `from` or `steps`, or raise `run.steps`.")


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps with a trace of each rank."""

    first: int
    last: int
    folder: Path

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"
        return f"trace of {steps}, a file for each rank: {self.folder}"


class StepRecorder:
    """Records the steps of `run.profile` on one rank."""

    def __init__(self, wanted: Profile | None, folder: Path, rank: int, device: str) -> None:
        self._wanted, self._folder, self._rank, self._device = wanted, folder, rank, device
        self._profiler: Any = None
        self._first = self._last = 0

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record step `step`, counted from 1, if it is wanted."""
        wanted = self._wanted
        if wanted is None or not wanted.from_ <= step <= wanted.last:
            yield
            return
        if self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self._device == "cuda" else []
            # A backward in turns with a forward has a thread of its own. Private in torch.
            threads = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = torch.profiler.profile(activities=kinds, experimental_config=threads)
            self._first = step
            self._profiler.start()
        self._last = step
        with torch.profiler.record_function(f"step {step}"):
            yield

    def is_due(self, step: int) -> bool:
        """Return True if a trace is complete after this step."""
        return self._profiler is not None and self._wanted is not None and step >= self._wanted.last

    def write(self) -> RecordedSteps | None:
        """Write the recorded steps; return None if there are none."""
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
        """Return a note for a run that begins after the wanted steps, without a trace of them."""
        wanted = self._wanted
        if wanted is None or step < wanted.last or self._folder.is_dir():
            return ""
        return f"steps {wanted.from_} to {wanted.last} are over and are not recorded (`run.profile`)"
