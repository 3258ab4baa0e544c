"""DeepSpeed's learning-rate schedules, with its names, arguments and count; and every schedule that a
`scheduler` block can name. Those of `transformers` are in `hf_schedules.py`.

The shapes are `shapes.py`'s; here is when they are asked. DeepSpeed counts the batch that has ended: before
the first `step` the count is -1, so WarmupLR's first two updates run at its minimum and everything is one
step later than the shape alone would say. OneCycle and LRRangeTest ask one ahead. A skipped step does not
advance a schedule: the engine calls `step` after updates only.

Invariant: after the same steps, a group's `lr` and `betas` are what DeepSpeed 0.19.6 leaves; and a schedule
resumes from its count alone.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from zerodrift.errors import ConfigError
from zerodrift.optim import hf_schedules, shapes
from zerodrift.optim.counted import Counted, optimizer_in, refusal
from zerodrift.policy.nouns import ComponentSpec

_log = logging.getLogger("zerodrift")

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one per group."""


# --- what DeepSpeed's have in common --------------------------------------------------------------------


def _per_group(optimizer: torch.optim.Optimizer, value: PerGroup, name: str) -> list[float]:
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        must = f"must have a value for each of {count} parameter groups"
        raise ValueError(refusal(name, must, repr(value)))
    return list(value)


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(refusal(name, "must be a whole number above 0", repr(value)))


def is_warmup_type(given: object) -> bool:
    return given in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE)


def _warmup_type(given: str) -> str:
    """As in DeepSpeed, any other word is the logarithmic one. A config's is checked before."""
    if is_warmup_type(given):
        return given
    _log.warning("`warmup_type` is %r, which is none: it is %r", given, WARMUP_LOG_RATE)
    return WARMUP_LOG_RATE


# --- the schedules --------------------------------------------------------------------------------------


class _WarmUp(Counted):
    """What those with a warm-up have in common."""

    def _warm_up(self, optimizer: Any, steps: int, kind: str) -> None:
        _require_positive("warmup_num_steps", steps)
        self.optimizer = optimizer_in(optimizer)
        self.warmup_num_steps, self.warmup_type = max(2, steps), _warmup_type(kind)
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)


class WarmupLR(_WarmUp):
    """From min to max, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._warm_up(optimizer, warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._between(warmup_min_lr, warmup_max_lr)
        self._rates = [
            shapes.warmup(low, high, self.warmup_num_steps, self.warmup_type)
            for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]
        self.begin(last_batch_iteration)

    def _between(self, low: PerGroup, high: PerGroup) -> None:
        self.min_lrs = _per_group(self.optimizer, low, "warmup_min_lr")
        self.max_lrs = _per_group(self.optimizer, high, "warmup_max_lr")
        self.delta_lrs = [most - least for least, most in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        return [rate(self.last_batch_iteration, 0.0) for rate in self._rates]


class WarmupDecayLR(WarmupLR):
    """From min to max, then linearly to min at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._warm_up(optimizer, warmup_num_steps, warmup_type)
        self._between(warmup_min_lr, warmup_max_lr)
        self.total_num_steps = total_num_steps
        # A share of the way from min to max, so that a minimum above 0 is where the decay ends.
        self._share = shapes.warmup_decay(total_num_steps, 0.0, 1.0, self.warmup_num_steps, self.warmup_type)
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._share(self.last_batch_iteration, 0.0)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupCosineLR(_WarmUp):
    """A share of the group's own rate: up over the warm-up, then down a half cosine."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._warm_up(optimizer, warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self._ratio = shapes.warmup_cosine(
            total_num_steps, warmup_min_ratio, warmup_num_steps, cos_min_ratio, self.warmup_type
        )
        self.begin(last_batch_iteration)

    def get_lr_ratio(self) -> float:
        return 0.0 if self.last_batch_iteration < 0 else self._ratio(self.last_batch_iteration, 1.0)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [own * ratio for own in self.org_lrs]


class LRRangeTest(Counted):
    """Ever larger, to see where training breaks."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        _require_positive("lr_range_test_step_size", lr_range_test_step_size)
        self.optimizer = optimizer_in(optimizer)
        self.min_lr = _per_group(self.optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._rates = [
            shapes.range_test(low, lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase)
            for low in self.min_lr
        ]
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        return [rate(self.last_batch_iteration + 1, 0.0) for rate in self._rates]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(Counted):
    """Up, down, then a slow decay; momentum goes the other way unless `cycle_momentum` is false."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            must, got = "must be above 0 and at least 0", f"{cycle_first_step_size} and {second}"
            raise ValueError(refusal("`cycle_first_step_size`, `cycle_second_step_size`", must, got))
        self.optimizer = optimizer_in(optimizer)
        groups = self.optimizer
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.decay_step_size, self.decay_lr_rate = decay_step_size, decay_lr_rate
        self.min_lrs = _per_group(groups, cycle_min_lr, "cycle_min_lr")
        self.max_lrs = _per_group(groups, cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and all("betas" in group for group in groups.param_groups)
        self.min_moms = _per_group(groups, cycle_min_mom, "cycle_min_mom")
        self.max_moms = _per_group(groups, cycle_max_mom, "cycle_max_mom")
        self.decay_mom_rate = decay_mom_rate
        self.begin(last_batch_iteration)
        if last_batch_iteration == -1 and self.cycle_momentum:
            self._apply_momentum([(first, 0.99) for first in self.min_moms])

    def _height(self) -> float:
        """How far up the cycle the coming batch is, from 0 to 1."""
        batch = self.last_batch_iteration + 1
        x = math.fmod(batch / self.total_size, 1.0)
        ratio = self.step_ratio
        rising = x <= ratio
        stairs = self.first_stair_count if rising else self.second_stair_count
        if not stairs:
            return x / ratio if rising else (x - 1) / (ratio - 1)
        inside = math.fmod(batch, self.total_size)
        if inside <= self.first_step_size:
            return math.floor(inside * stairs / self.first_step_size) / stairs
        return math.floor((self.total_size - inside) * stairs / self.second_step_size) / stairs

    @property
    def _decayed(self) -> float | None:
        """Decay intervals since the cycle ended; None while it lasts."""
        if self.last_batch_iteration < self.total_size:
            return None
        after = self.last_batch_iteration - self.total_size + 1
        return after / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[float]:
        decayed = self._decayed
        if decayed is not None:
            return [low / (1 + self.decay_lr_rate * decayed) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Betas per group; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        decayed = self._decayed
        if decayed is not None:
            return [(high * (1 + self.decay_mom_rate * decayed), 0.99) for high in self.max_moms]
        height = self._height()
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * height, 0.99) for low, high in pairs]

    def _apply_momentum(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=True):
            group["betas"] = pair

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)
        betas = self.get_mom()
        if betas is not None:
            self._apply_momentum(betas)

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        super().load_state_dict(sd)
        betas = self.get_mom()
        if betas is not None and self.last_batch_iteration >= 0:
            self._apply_momentum(betas)


SCHEDULES: dict[str, type] = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
    **hf_schedules.SCHEDULES,
}


def make_schedule(recipe: ComponentSpec, optimizer: torch.optim.Optimizer) -> Any:
    """The schedule of a config's `scheduler` block, whose type and arguments `resolve` has checked."""
    try:
        return SCHEDULES[recipe.type](optimizer, **json.loads(recipe.params))
    except (TypeError, ValueError) as error:
        raise ConfigError("scheduler.params", f"must be arguments of {recipe.type}", got=error) from error
