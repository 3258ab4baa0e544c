"""The shapes of DeepSpeed's learning-rate schedules: from a count of steps to a rate.

`schedules.py` says when they are asked, and applies them to parameter groups.

Invariant: pure: a rate depends on the count and the arguments, never on history.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Rate = Callable[[int, float], float]
"""(steps taken, the group's own learning rate) -> learning rate."""


def _ramp(kind: str, step: int, steps: int) -> float:
    """From 0 to 1 over `steps` steps."""
    if step >= steps:
        return 1.0
    if kind == "log":
        return math.log(step + 1) / math.log(max(2, steps))
    return step / steps


def warmup(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:
    """From min to max, then constant."""
    steps = max(2, warmup_num_steps)

    def rate(step: int, own: float) -> float:
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * _ramp(warmup_type, step, steps)

    return rate


def warmup_decay(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> Rate:
    """From min to max, then linearly to zero at `total_num_steps`."""
    rise = warmup(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)
    steps = max(2, warmup_num_steps)

    def rate(step: int, own: float) -> float:
        if step < steps:
            return rise(step, own)
        left = (total_num_steps - step) / max(1.0, total_num_steps - steps)
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * max(0.0, left)

    return rate


def warmup_cosine(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Rate:
    """A share of the group's own rate: up over the warm-up, then down a half cosine."""
    steps = max(2, warmup_num_steps)

    def rate(step: int, own: float) -> float:
        if step < steps:
            return own * (warmup_min_ratio + (1.0 - warmup_min_ratio) * _ramp(warmup_type, step, steps))
        done = min(1.0, (step - steps + 1) / max(1, total_num_steps - steps))
        return own * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)

    return rate


def range_test(
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> Rate:
    """Ever larger, to see where training breaks."""

    def rate(step: int, own: float) -> float:
        interval = step / lr_range_test_step_size
        interval = math.floor(interval) if lr_range_test_staircase else interval
        return lr_range_test_min_lr * (1 + interval * lr_range_test_step_rate)

    return rate
