"""The learning-rate schedules of `transformers`, with its names, arguments and arithmetic.

Each is a factor of the group's own rate. Step number n, counted from 0, gets the factor of n: a warm-up
begins at 0, and there is no step at which nothing is counted yet, as DeepSpeed's schedules have one.

Invariant: a group's `lr` is bit for bit what `get_scheduler` of transformers 5.23 leaves after as many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zerodrift.optim.counted import Counted, optimizer_in

Factor = Callable[[int], float]


class _Schedule(Counted):
    """A factor of each group's own rate, by the number of the step."""

    def __init__(self, optimizer: Any, factor: Factor, last_batch_iteration: int) -> None:
        self.optimizer = optimizer_in(optimizer)
        self.own_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._factor = factor
        self.begin(last_batch_iteration)

    def get_lr(self) -> list[float]:
        factor = self._factor(self.last_batch_iteration + 1)
        return [own * factor for own in self.own_lrs]


def _base_lr(optimizer: Any) -> float:
    """What a rate in an argument is a share of; that of the first group where groups have their own."""
    optimizer = optimizer_in(optimizer)
    return float(optimizer.defaults.get("lr", optimizer.param_groups[0]["lr"]))


def _ramp(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _done(step: int, warmup: int, steps: int) -> float:
    """Of what comes after the warm-up, the share that is over."""
    return (step - warmup) / max(1, steps - warmup)


class Constant(_Schedule):
    """The rate as it is."""

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        super().__init__(optimizer, lambda step: 1.0, last_batch_iteration)


class ConstantWithWarmup(_Schedule):
    """Linearly up, then constant."""

    def __init__(self, optimizer: Any, num_warmup_steps: int = 0, last_batch_iteration: int = -1) -> None:
        def factor(step: int) -> float:
            return _ramp(step, num_warmup_steps) if step < num_warmup_steps else 1.0

        super().__init__(optimizer, factor, last_batch_iteration)


class Linear(_Schedule):
    """Linearly up, then linearly down to zero."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        last_batch_iteration: int = -1,
    ) -> None:
        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            left = (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps)
            return max(0.0, left)

        super().__init__(optimizer, factor, last_batch_iteration)


class Cosine(_Schedule):
    """Linearly up, then down along `num_cycles` waves, by default half of one."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        last_batch_iteration: int = -1,
    ) -> None:
        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            return max(0.0, _wave(num_cycles, _done(step, num_warmup_steps, num_training_steps)))

        super().__init__(optimizer, factor, last_batch_iteration)


def _wave(cycles: float, done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * done))


class CosineWithRestarts(_Schedule):
    """Linearly up, then half a cosine down `num_cycles` times, each from the top."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: int = 1,
        last_batch_iteration: int = -1,
    ) -> None:
        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            done = _done(step, num_warmup_steps, num_training_steps)
            if done >= 1.0:
                return 0.0
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * done) % 1.0))))

        super().__init__(optimizer, factor, last_batch_iteration)


class CosineWithMinLR(_Schedule):
    """As `Cosine`, down to `min_lr`, or to `min_lr_rate` of the rate."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        min_lr: float | None = None,
        min_lr_rate: float | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        least = _least(optimizer, min_lr, min_lr_rate)

        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            wave = _wave(num_cycles, _done(step, num_warmup_steps, num_training_steps))
            return max(0, wave * (1 - least) + least)

        super().__init__(optimizer, factor, last_batch_iteration)


class CosineWarmupWithMinLR(_Schedule):
    """The same with a warm-up that begins at `warmup_lr_rate` of the rate, or at its first step."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        num_cycles: float = 0.5,
        min_lr: float | None = None,
        min_lr_rate: float | None = None,
        warmup_lr_rate: float | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        least = _least(optimizer, min_lr, min_lr_rate)

        def factor(step: int) -> float:
            if step < num_warmup_steps and warmup_lr_rate is None:
                return (step + 1.0) / max(1.0, num_warmup_steps)
            if step < num_warmup_steps and warmup_lr_rate is not None:
                low = float(warmup_lr_rate)
                return low + (1.0 - low) * step / max(1, num_warmup_steps - 1)
            done = (step - num_warmup_steps + 1.0) / max(1.0, num_training_steps - num_warmup_steps)
            wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * done))
            return max(0, wave * (1 - least) + least)

        super().__init__(optimizer, factor, last_batch_iteration)


def _least(optimizer: Any, rate: float | None, share: float | None) -> float:
    """As a share of the rate; `checked` has seen that one of the two is given."""
    if rate is not None:
        base = _base_lr(optimizer)
        return rate / base if base else 0.0
    return 0.0 if share is None else share


class Polynomial(_Schedule):
    """Linearly up, then down to `lr_end` as a power of what is left."""

    def __init__(
        self,
        optimizer: Any,
        num_training_steps: int,
        num_warmup_steps: int = 0,
        lr_end: float = 1e-7,
        power: float = 1.0,
        last_batch_iteration: int = -1,
    ) -> None:
        base = _base_lr(optimizer)

        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            if not base or step > num_training_steps:
                return lr_end / base if base else 0.0
            left = 1 - _done(step, num_warmup_steps, num_training_steps)
            return ((base - lr_end) * left**power + lr_end) / base

        super().__init__(optimizer, factor, last_batch_iteration)


class InverseSqrt(_Schedule):
    """Linearly up, then down with the root of the steps, over `timescale` of them."""

    def __init__(
        self,
        optimizer: Any,
        num_warmup_steps: int = 0,
        timescale: int | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        scale = (num_warmup_steps or 10_000) if timescale is None else timescale

        def factor(step: int) -> float:
            if step < num_warmup_steps:
                return _ramp(step, num_warmup_steps)
            return 1.0 / math.sqrt((step + (scale - num_warmup_steps)) / scale)

        super().__init__(optimizer, factor, last_batch_iteration)


class WarmupStableDecay(_Schedule):
    """Up, constant, and down to `min_lr_ratio` of the rate over the last `num_decay_steps`."""

    def __init__(
        self,
        optimizer: Any,
        num_decay_steps: int,
        num_warmup_steps: int = 0,
        num_training_steps: int | None = None,
        num_stable_steps: int | None = None,
        warmup_type: str = "linear",
        decay_type: str = "cosine",
        min_lr_ratio: float = 0.0,
        num_cycles: float = 0.5,
        last_batch_iteration: int = -1,
    ) -> None:
        if num_stable_steps is None:
            num_stable_steps = (num_training_steps or 0) - num_warmup_steps - num_decay_steps
        full = num_warmup_steps + num_stable_steps

        def factor(step: int) -> float:
            if step < num_warmup_steps:
                share = _risen(warmup_type, _ramp(step, num_warmup_steps))
            elif step < full:
                return 1.0
            elif step < full + num_decay_steps:
                share = _fallen(decay_type, (step - full) / max(1, num_decay_steps), num_cycles)
            else:
                return min_lr_ratio
            return max(0.0, share * (1.0 - min_lr_ratio) + min_lr_ratio)

        super().__init__(optimizer, factor, last_batch_iteration)


def _risen(kind: str, done: float) -> float:
    if kind == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * done))
    return 1.0 - math.sqrt(1.0 - done) if kind == "1-sqrt" else done


def _fallen(kind: str, done: float, cycles: float) -> float:
    if kind == "cosine":
        return _wave(cycles, done)
    return 1.0 - math.sqrt(done) if kind == "1-sqrt" else 1.0 - done


SCHEDULES: dict[str, type] = {
    "constant": Constant,
    "constant_with_warmup": ConstantWithWarmup,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "cosine_with_min_lr": CosineWithMinLR,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLR,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "warmup_stable_decay": WarmupStableDecay,
}
