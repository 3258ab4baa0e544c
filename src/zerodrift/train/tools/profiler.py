"""Record steps with torch's profiler: a trace of each rank, for Perfetto or chrome://tracing.

A recorded run computes the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig

from zerodrift.checkpoint.paths import writing
from zerodrift.train.job import Profile


class StepRecorder:
    """Records the steps of `run.profile` on one rank."""

    def __init__(self, wanted: Profile | None, folder: Path, rank: int, device: str) -> None:
        self._wanted, self.folder, self._rank, self._device = wanted, folder, rank, device
        self._profiler: Any = None
        self.first = self.last = 0

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
            self.first = step
            self._profiler.start()
        self.last = step
        with torch.profiler.record_function(f"step {step}"):
            yield

    def write(self) -> bool:
        """Write the recorded steps; return False if there are none."""
        if self._profiler is None:
            return False
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        steps = f"steps-{self.first:08}-{self.last:08}"
        path = self.folder / f"{steps}-rank-{self._rank}.json.gz"
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        return True
