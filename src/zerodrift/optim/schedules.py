"""The learning-rate schedules that DeepSpeed's `scheduler` block names.

Each is a function from the number of steps taken to a learning rate (and, for one cycle, a momentum),
written down once; `Schedule` applies it to parameter groups. A skipped step does not advance it: the
engine calls `step` after updates only.

Invariant: the learning rate depends on the step count and the arguments, never on history, so a schedule
resumes from its step alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch

from zerodrift.errors import ConfigError, did_you_mean
from zerodrift.policy.nouns import Recipe

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


def one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    decay_step_size: int = 0,
) -> Rate:
    """Up, down, then a slow decay."""
    second = cycle_second_step_size or cycle_first_step_size

    def rate(step: int, own: float) -> float:
        if step <= cycle_first_step_size:
            return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * step / cycle_first_step_size
        if step <= cycle_first_step_size + second:
            return cycle_max_lr - (cycle_max_lr - cycle_min_lr) * (step - cycle_first_step_size) / second
        after = step - cycle_first_step_size - second
        interval = after / decay_step_size if decay_step_size else 0.0
        return cycle_min_lr / (1 + interval * decay_lr_rate)

    return rate


RATES: dict[str, Callable[..., Rate]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
    "LRRangeTest": range_test,
    "OneCycle": one_cycle,
}

MOMENTUM_KEYS = (
    "cycle_momentum",
    "cycle_min_mom",
    "cycle_max_mom",
    "decay_mom_rate",
    "cycle_first_stair_count",
    "cycle_second_stair_count",
    "last_batch_iteration",
)
"""Arguments of DeepSpeed's schedules that have one meaning here: the learning rate alone is scheduled, and
momentum is the optimizer's."""


class Schedule:
    """Sets the learning rate of every group from the number of steps taken."""

    def __init__(self, rate: Rate, optimizer: torch.optim.Optimizer) -> None:
        self._rate = rate
        self._optimizer = optimizer
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
        self.steps = 0
        self._apply()

    def step(self) -> None:
        self.steps += 1
        self._apply()

    def _apply(self) -> None:
        for group, own in zip(self._optimizer.param_groups, self._own, strict=True):
            group["lr"] = self._rate(self.steps, own)

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "own": list(self._own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self._own = int(state["steps"]), list(state["own"])
        self._apply()


def make_schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Schedule:
    """The schedule of a `scheduler` block."""
    params = json.loads(recipe.params)
    if recipe.type == "OneCycle":
        if params.get("cycle_momentum"):
            raise ConfigError(
                "`scheduler.params.cycle_momentum`: must be false or left out: only the learning rate is "
                "scheduled; got true. Remove it."
            )
        params = {key: value for key, value in params.items() if key not in MOMENTUM_KEYS}
    try:
        rate = RATES[recipe.type](**params)
    except TypeError as error:
        known = RATES[recipe.type].__code__.co_varnames
        odd = [key for key in params if key not in known]
        hint = did_you_mean(odd[0], known) if odd else ""
        raise ConfigError(
            f"`scheduler.params`: must be arguments of {recipe.type}; got "
            f"{str(error).split('() ')[-1]}. {hint}"
        ) from error
    return Schedule(rate, optimizer)
