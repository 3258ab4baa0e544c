"""Learning-rate schedules that a `scheduler` block can name: DeepSpeed's and those of `transformers`.

Every schedule counts batches. The count is -1 before the first `step`; a checkpoint holds nothing else.

DeepSpeed's schedules are written here, with its names and arguments. WarmupLR, WarmupDecayLR and
WarmupCosineLR set the rate of the previous batch, so the first two updates run at the minimum. OneCycle
and LRRangeTest set the rate of the next batch. The engine calls `step` after updates only, so a skipped step
does not advance a schedule. The other schedules are functions of the installed `transformers`: the factor of
step n, counted from 0, times each group's own rate.

Invariant: after the same steps a group's `lr` and `betas` are those of DeepSpeed 0.19.6 or `transformers`,
and a schedule resumes from its count alone.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from zerodrift.errors import ConfigError, Problem, UnsupportedError, kind_of
from zerodrift.policy import ComponentSpec

_log = logging.getLogger("zerodrift")

LR_SCHEDULE = "lr_schedule"
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"

PerGroup = float | Sequence[float]
"""One number for all parameter groups, or one per group."""


class Schedule:
    """Rates of parameter groups by the count of batches."""

    optimizer: torch.optim.Optimizer
    last_batch_iteration: int

    def begin(self, last_batch_iteration: int) -> None:
        """Start at a count. Set the groups' rates only if the count is -1."""
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set_rates()

    def _take_optimizer(self, given: Any) -> None:
        """Keep the optimizer whose groups get rates: `given`, or the optimizer that it wraps."""
        optimizer = given if isinstance(given, torch.optim.Optimizer) else getattr(given, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            must, got = "must be a torch.optim.Optimizer", type(given).__name__
            raise TypeError(str(Problem("optimizer", must, got=got)))
        self.optimizer = optimizer
        self._own_rates = [float(group["lr"]) for group in optimizer.param_groups]

    def get_lr(self) -> list[float]:
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Count a batch, and set the groups' rates for the next."""
        count = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = count
        self._set_rates()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Load a saved count and set the groups' rates, which DeepSpeed does only at the next step."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._set_rates()

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # the caller may hold a reference
            else:
                group["lr"] = rate
        self._last_lr: list[float] = [group["lr"] for group in self.optimizer.param_groups]

    def _per_group(self, value: PerGroup, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(value, Sequence):
            return [value] * count
        if len(value) != count:
            must = f"must have a value for each of {count} parameter groups"
            raise ValueError(str(Problem(name, must, got=repr(value))))
        return list(value)


def _require_positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(str(Problem(name, "must be a whole number above 0", got=repr(value))))


# --- DeepSpeed's ----------------------------------------------------------------------------------------


def is_warmup_type(given: object) -> bool:
    return given in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE)


class _WarmupSchedule(Schedule):
    """A schedule that begins with a warm-up of at least two steps."""

    def _begin_warmup(self, optimizer: Any, steps: int, kind: str) -> None:
        """Check the warm-up's arguments. As in DeepSpeed, an unknown type is the logarithmic one."""
        _require_positive("warmup_num_steps", steps)
        if not is_warmup_type(kind):
            _log.warning("`warmup_type` %r is unknown: using %r", kind, WARMUP_LOG_RATE)
            kind = WARMUP_LOG_RATE
        self._take_optimizer(optimizer)
        self.warmup_num_steps, self.warmup_type = max(2, steps), kind
        self.inverse_log_warm_up = 1.0 / math.log(self.warmup_num_steps)

    def _ramp(self) -> float:
        """Return the share of the way from min to max: how much of the warm-up is done."""
        step, steps = self.last_batch_iteration, self.warmup_num_steps
        if step >= steps:
            return 1.0
        if self.warmup_type == WARMUP_LOG_RATE:
            return math.log(step + 1) / math.log(steps)
        return step / steps


class WarmupLR(_WarmupSchedule):
    """Rise from min to max, then stay."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self._begin_warmup(optimizer, warmup_num_steps, warmup_type)
        max_lr = self._own_rates if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(max_lr, "warmup_max_lr")
        self.delta_lrs = [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self.min_lrs)
        share = self._ramp()
        return [low + rise * share for low, rise in zip(self.min_lrs, self.delta_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """Rise from min to max, then fall linearly to min at `total_num_steps`."""

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
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )

    def _ramp(self) -> float:
        step, steps = self.last_batch_iteration, self.warmup_num_steps
        if step < steps:
            return super()._ramp()
        return max(0.0, (self.total_num_steps - step) / max(1.0, self.total_num_steps - steps))


class WarmupCosineLR(_WarmupSchedule):
    """Raise a share of each group's own rate over the warm-up, then lower it along a half cosine."""

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
        self._begin_warmup(optimizer, warmup_num_steps, warmup_type)
        self.total_num_steps = total_num_steps
        self.org_lrs = self._own_rates
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.begin(last_batch_iteration)

    def get_lr_ratio(self) -> float:
        step, steps = self.last_batch_iteration, self.warmup_num_steps
        if step < 0:
            return 0.0
        if step < steps:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._ramp()
        done = min(1.0, (step - steps + 1) / max(1, self.total_num_steps - steps))
        least = self.cos_min_ratio
        return max(0.0, least + (1 - least) * (1 + math.cos(math.pi * done)) / 2)

    def get_lr(self) -> list[float]:
        return [own * self.get_lr_ratio() for own in self.org_lrs]


class LRRangeTest(Schedule):
    """Raise the rate without limit, to see where training breaks."""

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
        self._take_optimizer(optimizer)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        interval = math.floor(interval) if self.staircase else interval
        return [low * (1 + interval * self.step_rate) for low in self.min_lr]

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


class OneCycle(Schedule):
    """Raise the rate, lower it, then let it decay. Momentum goes the other way if `cycle_momentum`."""

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
            names = "cycle_first_step_size, cycle_second_step_size"
            got = f"{cycle_first_step_size} and {second}"
            raise ValueError(str(Problem(names, "must be above 0 and at least 0", got=got)))
        self._take_optimizer(optimizer)
        self.first_step_size, self.second_step_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_step_size + self.second_step_size
        self.step_ratio = self.first_step_size / self.total_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first_stair_count, self.second_stair_count = cycle_first_stair_count, stairs
        self.decay_step_size, self.decay_lr_rate = decay_step_size, decay_lr_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        has_betas = all("betas" in group for group in self.optimizer.param_groups)
        self.cycle_momentum = cycle_momentum and has_betas
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.decay_mom_rate = decay_mom_rate
        self.begin(last_batch_iteration)
        if last_batch_iteration == -1 and self.cycle_momentum:
            self._set_betas([(first, 0.99) for first in self.min_moms])

    def _height(self) -> float:
        """Return the position of the next batch in the cycle, from 0 to 1."""
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

    def _along(self, bounds: tuple[list[float], list[float]], decay: float, *, falls: bool) -> list[float]:
        """Return the values of all groups between (least, most); rates decay by division, momentum grows."""
        after = self.last_batch_iteration - self.total_size + 1
        if after >= 1:
            grown = 1 + decay * (after / self.decay_step_size if self.decay_step_size else 0.0)
            return [high * grown for high in bounds[1]] if falls else [low / grown for low in bounds[0]]
        height, pairs = self._height(), zip(*bounds, strict=True)
        if falls:
            return [high - (high - low) * height for low, high in pairs]
        return [low + (high - low) * height for low, high in pairs]

    def get_lr(self) -> list[float]:
        return self._along((self.min_lrs, self.max_lrs), self.decay_lr_rate, falls=False)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return betas per group; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        firsts = self._along((self.min_moms, self.max_moms), self.decay_mom_rate, falls=True)
        return [(first, 0.99) for first in firsts]

    def _set_rates(self) -> None:
        super()._set_rates()
        self._set_betas(self.get_mom() or [])

    def _set_betas(self, betas: Sequence[tuple[float, float]]) -> None:
        for group, pair in zip(self.optimizer.param_groups, betas, strict=False):
            group["betas"] = pair

    def step(self, batch_iteration: int | None = None) -> None:
        super().step(batch_iteration)


# --- those of transformers ------------------------------------------------------------------------------


TRANSFORMERS = (
    *("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr"),
    *("cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay"),
)


class TransformersSchedule(Schedule):
    """A schedule of `transformers`: its factor of each group's own rate."""

    def __init__(self, optimizer: Any, kind: str, last_batch_iteration: int = -1, **params: Any) -> None:
        self._take_optimizer(optimizer)
        # A rate among the arguments is a share of the optimizer's rate, or of the first group's without one.
        base = float(self.optimizer.defaults.get("lr", self.optimizer.param_groups[0]["lr"]))
        self._factor = _transformers_factor(kind, base, params)
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        factor = self._factor(self.last_batch_iteration + 1)
        return [own * factor for own in self._own_rates]


def _transformers_factor(kind: str, base: float, params: dict[str, Any]) -> Callable[[int], float]:
    """Return the function from a step to a factor that `transformers` puts into a `LambdaLR`."""
    try:
        functions = importlib.import_module("transformers.optimization").TYPE_TO_SCHEDULER_FUNCTION
    except ImportError as error:
        must, others = "must be one of DeepSpeed's where `transformers` is not installed", VALID_LR_SCHEDULES
        do = f"`pip install transformers`, or use {', '.join(others)}."
        raise ConfigError("scheduler.type", must, got=repr(kind), do=do) from error
    if kind not in functions:
        must = "must be a schedule of the installed `transformers`"
        raise ConfigError("scheduler.type", must, got=repr(kind), do="Upgrade `transformers`.")
    warmup = {} if kind == "constant" else {"num_warmup_steps": params.get("num_warmup_steps", 0)}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=base)
    try:
        factor: Callable[[int], float] = functions[kind](optimizer, **{**params, **warmup}).lr_lambdas[0]
        factor(warmup.get("num_warmup_steps", 0))
    except ZeroDivisionError:
        must = "must be above `num_warmup_steps`, and the optimizer's rate above 0"
        got = f"{params.get('num_training_steps')} and {base:g}"
        raise ConfigError("scheduler.params.num_training_steps", must, got=got) from None
    return factor


SCHEDULES: dict[str, type] = {
    LR_RANGE_TEST: LRRangeTest,
    ONE_CYCLE: OneCycle,
    WARMUP_LR: WarmupLR,
    WARMUP_DECAY_LR: WarmupDecayLR,
    WARMUP_COSINE_LR: WarmupCosineLR,
    **dict.fromkeys(TRANSFORMERS, TransformersSchedule),
}


def make_schedule(recipe: ComponentSpec, optimizer: torch.optim.Optimizer) -> Schedule:
    """Return the schedule of a config's `scheduler` block, whose type and arguments `resolve` has checked."""
    schedule, params = SCHEDULES[recipe.type], json.loads(recipe.params)
    if schedule is TransformersSchedule:
        params["kind"] = recipe.type
    try:
        return cast(Schedule, schedule(optimizer, **params))
    except (TypeError, ValueError) as error:
        raise ConfigError("scheduler.params", f"must be arguments of {recipe.type}", got=error) from error


def schedule_of(given: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return a caller's schedule, or what a caller's function makes from the engine's optimizer."""
    if given is None or optimizer is None:
        return None
    is_function = callable(given) and (isinstance(given, type) or not hasattr(given, "step"))
    made = given(optimizer) if is_function else given
    if not callable(getattr(made, "step", None)):
        must = "must be a schedule of torch, or a function that makes one from an optimizer"
        got = f"a function that returns {kind_of(made)}" if is_function else kind_of(made)
        raise UnsupportedError("schedule", must, got=got)
    groups = getattr(getattr(made, "optimizer", None), "param_groups", [])
    if groups and not any(group is own for group in groups for own in optimizer.param_groups):
        must, do = "must be over the engine's optimizer", "Pass a function that makes one from an optimizer."
        raise UnsupportedError("schedule", must, got="one over another", do=do)
    return made
