"""The step of a slice in plain PyTorch: the definition that the compiled path equals, and its stand-in.

Works group by group on runs of neighbouring blocks, reading the master into fp32, applying `updates`, and
writing master, storage and moments back.

Invariant: no value of a slice depends on the run it was in: no operation reaches beyond a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.optim.schemes import Scheme, SliceTensors, check, draw, read, read_moment, write, write_moment
from zerodrift.optim.statistics import Statistics, account
from zerodrift.optim.updates import Hyper, Root, advance, coefficients, moment_count, wanted_change
from zerodrift.optimizers import Algorithm

CACHED_BLOCKS = 1024
"""The longest run on a CPU: its temporaries stay in a cache. A device has a launch per operation and run."""


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """One optimizer step, the same for every slice."""

    algorithm: Algorithm
    hypers: tuple[Hyper, ...]
    """Per group, as `SliceTensors.groups` numbers them."""
    number: int
    """The run's own count of optimizer steps: part of the key of stochastic rounding."""
    multiplier: float | Tensor = 1.0
    """Unscale x clip factor, a number or a tensor of one element: one fp32 product with the gradient."""
    root: Root = Root.EXACT


def reference_update(
    scheme: Scheme, of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Statistics | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    check_step(scheme, of, gradient, step)
    for first, last, group in runs(of):
        _update_run(scheme, of, gradient, step, statistics, first, last, step.hypers[group])


def check_step(scheme: Scheme, of: SliceTensors, gradient: Tensor, step: UpdateStep) -> None:
    """That everything fits together: compiled code that was told otherwise would write outside a tensor."""
    check(scheme, of)
    if gradient.shape != of.storage.shape or gradient.device != of.storage.device:
        got = f"{tuple(gradient.shape)} on {gradient.device}"
        raise AssertionError(f"gradient {got} of a slice {tuple(of.storage.shape)} on {of.storage.device}")
    needed = moment_count(step.algorithm, step.hypers)
    if len(of.moments) < needed:
        raise AssertionError(f"{step.algorithm} needs {needed} moments: {len(of.moments)}")


def runs(of: SliceTensors) -> Iterator[tuple[int, int, int]]:
    """(first block, one past the last, group): stretches of one group that make up the slice, in order."""
    longest = CACHED_BLOCKS if of.storage.device.type == "cpu" else max(of.blocks, 1)
    for first, last, group in _stretches(of):
        for start in range(first, last, longest):
            yield start, min(start + longest, last), group


def _stretches(of: SliceTensors) -> Iterator[tuple[int, int, int]]:
    if of.groups is None:
        yield 0, of.blocks, 0
        return
    groups, counts = torch.unique_consecutive(of.groups, return_counts=True)
    first = 0
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        yield first, first + count, group
        first += count


def _update_run(
    scheme: Scheme,
    of: SliceTensors,
    gradient: Tensor,
    step: UpdateStep,
    statistics: Statistics | None,
    first: int,
    last: int,
    hyper: Hyper,
) -> None:
    start, stop = first * BLOCK, min(last * BLOCK, of.numel)
    numbers = coefficients(step.algorithm, hyper)
    scale = torch.as_tensor(step.multiplier, dtype=torch.float32, device=of.storage.device) * numbers.sign
    scaled = gradient[start:stop].float() * scale
    weight = read(scheme, of, start, stop)
    moments = tuple(read_moment(scheme, of, number, first, last) for number in range(len(of.moments)))
    before = None
    if statistics is not None:
        before = (weight.clone(), of.storage[start:stop].clone(), scaled.clone())
    advance(step.algorithm, numbers, weight, moments, scaled, step.root)
    write(scheme, of, weight, start)
    words = draw(scheme, of, step.number, first, last)
    for number, moment in enumerate(moments):
        write_moment(scheme, of, number, moment, first, words)
    if statistics is not None and before is not None:
        change = wanted_change(step.algorithm, numbers, before[0], moments, scaled, step.root)
        stored = read_moment(scheme, of, len(moments) - 1, first, last) if moments else None
        after = (read(scheme, of, start, stop), of.storage[start:stop], stored)
        account(statistics.blocks[first:last], change, before, after)
