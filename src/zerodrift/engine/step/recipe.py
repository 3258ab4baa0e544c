"""Run one optimizer step on any executor: reduce, norm, update.

The micro-batches before it have gathered and computed (`segment.py`, `compute.py`). Here their gradients are
reduced and measured (`trained_segment.py`, `norm.py`), and the update follows (`update.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from zerodrift.engine.executor import Executor
from zerodrift.engine.progress import StepResult, TrainingProgress


def run_step(
    executor: Executor,
    progress: TrainingProgress,
    zero_grad: Callable[[], None],
    before_update: Callable[[], None] | None,
    error_if_nonfinite: bool,
    schedule_arguments: Mapping[str, Any] | None,
) -> StepResult:
    """End a micro-batch, and update after the last one of a step."""
    before = progress.now()
    with executor.step():
        if not progress.begin_step():
            return before
        with torch.no_grad():
            norm = executor.norm()
            if before_update is not None:
                before_update()
            bad = [] if norm.finite else executor.bad()
            if norm.finite:
                executor.update(progress.multiplier(norm))
        zero_grad()
        return progress.end_step(before, norm, bad, schedule_arguments, error_if_nonfinite)
