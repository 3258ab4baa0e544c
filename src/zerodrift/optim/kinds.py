"""An update as compiled code is told it: choices as numbers, and a table of coefficients.

`native.cpp`, with its headers, and `kernels/programs.py` know the same numbers.

Invariant: a number stands for one meaning in both.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from zerodrift.optim.reference import UpdateStep
from zerodrift.optim.schemes import Scheme, SliceTensors
from zerodrift.optim.updates import ARITHMETIC, Coefficients, coefficients
from zerodrift.policy.nouns import Master, State

MASTERS = {Master.FP32: 0, Master.SPLIT: 1, Master.SAME: 2}
STATES = {State.FP32: 0, State.BF16: 1, State.BF16_STOCHASTIC: 2, State.EIGHT_BIT: 3}

CPU = torch.device("cpu")


def algorithm(step: UpdateStep) -> int:
    """Its number; whoever asks has seen that it has one."""
    number = ARITHMETIC[step.algorithm].compiled
    if number is None:
        raise AssertionError(f"{step.algorithm} has no compiled update")
    return number


def state(scheme: Scheme, of: SliceTensors) -> int:
    """How moments rest. A slice without any has no scales or codes to look for, whatever its column says."""
    return STATES[scheme.state if of.moments else State.FP32]


def table(step: UpdateStep, device: torch.device = CPU) -> Tensor:
    """fp32, a row of coefficients per group; the sign of the first takes the multiplier in. Read it only."""
    return _table(step, device) if isinstance(step.multiplier, float) else _make(step, device)


@functools.lru_cache(maxsize=2)
def _table(step: UpdateStep, device: torch.device) -> Tensor:
    """Once per step and not per slice."""
    return _make(step, device)


def _make(step: UpdateStep, device: torch.device) -> Tensor:
    fields = tuple(Coefficients.__dataclass_fields__)
    groups = [coefficients(step.algorithm, hyper) for hyper in step.hypers]
    rows = [[getattr(group, field) for field in fields] for group in groups]
    # A multiplier that is on a device stays there: reading it would make the host wait.
    multiplier = torch.as_tensor(step.multiplier, dtype=torch.float32)
    table = _sent(torch.tensor(rows, dtype=torch.float32), multiplier.device)
    table[:, 0] *= multiplier
    return _sent(table, device)


def _sent(values: Tensor, device: torch.device) -> Tensor:
    """On a device, from memory that it reads by itself: else the host would wait until it has."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
