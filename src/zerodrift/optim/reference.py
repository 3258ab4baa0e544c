"""The step of a slice in plain PyTorch: the definition that the compiled path equals, and its stand-in.

Works group by group on runs of neighbouring blocks, reading the master into fp32, applying `updates`, and
writing master, storage and moments back.

Invariant: no value of a slice depends on the run it was in: every operation is element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.kernels.native import BLOCK
from zerodrift.kernels.squares import reference_square_sums
from zerodrift.optim.rounding import random_words, round_stochastic
from zerodrift.optim.schemes import Scheme, Slice, check, read, write
from zerodrift.optim.statistics import Statistics
from zerodrift.optim.updates import (
    Algorithm,
    Hyper,
    Root,
    advance,
    coefficients,
    moment_count,
    wanted_change,
)
from zerodrift.policy.nouns import State

CACHED_BLOCKS = 1024
"""The longest run on a CPU: its temporaries stay in a cache. A device has a launch per operation and run."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, the same for every slice."""

    algorithm: Algorithm
    hypers: tuple[Hyper, ...]
    """Per group, as `Slice.groups` numbers them."""
    number: int
    """The run's own count of optimizer steps: part of the key of stochastic rounding."""
    multiplier: float | Tensor = 1.0
    """Unscale x clip factor, a number or a tensor of one element: one fp32 product with the gradient."""
    root: Root = Root.EXACT


def reference_update(
    scheme: Scheme, of: Slice, gradient: Tensor, step: Step, statistics: Statistics | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    check_step(scheme, of, gradient, step)
    for first, last, group in runs(of):
        _update_run(scheme, of, gradient, step, statistics, first, last, step.hypers[group])


def check_step(scheme: Scheme, of: Slice, gradient: Tensor, step: Step) -> None:
    """That everything fits together: compiled code that was told otherwise would write outside a tensor."""
    check(scheme, of)
    if gradient.shape != of.storage.shape or gradient.device != of.storage.device:
        got = f"{tuple(gradient.shape)} on {gradient.device}"
        raise AssertionError(f"gradient {got} of a slice {tuple(of.storage.shape)} on {of.storage.device}")
    needed = moment_count(step.algorithm, step.hypers)
    if len(of.moments) < needed:
        raise AssertionError(f"{step.algorithm} needs {needed} moments: {len(of.moments)}")


def runs(of: Slice) -> Iterator[tuple[int, int, int]]:
    """(first block, one past the last, group): stretches of one group that make up the slice, in order."""
    longest = CACHED_BLOCKS if of.storage.device.type == "cpu" else max(of.blocks, 1)
    for first, last, group in _stretches(of):
        for start in range(first, last, longest):
            yield start, min(start + longest, last), group


def _stretches(of: Slice) -> Iterator[tuple[int, int, int]]:
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
    of: Slice,
    gradient: Tensor,
    step: Step,
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
    moments = tuple(moment[start:stop].to(torch.float32, copy=True) for moment in of.moments)
    before = None
    if statistics is not None:
        before = (weight.clone(), of.storage[start:stop].clone(), scaled.clone())
    advance(step.algorithm, numbers, weight, moments, scaled, step.root)
    write(scheme, of, weight, start)
    _store_moments(scheme, of, moments, step.number, first, last)
    if statistics is not None and before is not None:
        change = wanted_change(step.algorithm, numbers, before[0], moments, scaled, step.root)
        stored = of.moments[-1][start:stop] if of.moments else None
        _account(statistics.blocks[first:last], change, before, of.storage[start:stop], stored)


def _store_moments(
    scheme: Scheme, of: Slice, moments: tuple[Tensor, ...], number: int, first: int, last: int
) -> None:
    start, stop = first * BLOCK, min(last * BLOCK, of.numel)
    words = None
    if scheme.state is State.BF16_STOCHASTIC and moments:
        if of.keys is None:
            raise AssertionError("stochastic states need a key per block")
        words = random_words(of.keys[first:last], number).flatten()[: stop - start]
    for half, (target, moment) in enumerate(zip(of.moments, moments, strict=True)):
        # The low half of a random word rounds the first moment, the high half the second.
        rounded = moment if words is None else round_stochastic(moment, words >> (16 * half))
        target[start:stop] = rounded


def _account(
    out: Tensor, change: Tensor, before: tuple[Tensor, Tensor, Tensor], visible: Tensor, stored: Tensor | None
) -> None:
    """Fill the five numbers of each block. See `statistics`."""
    weight, seen, gradient = before
    bits = torch.int32 if visible.dtype is torch.float32 else torch.int16
    moved = change != 0
    lost = moved & (seen.view(bits) == visible.view(bits))
    underflow = torch.zeros_like(moved) if stored is None else (gradient != 0) & (stored == 0)
    for column, marked in enumerate((moved, lost, underflow)):
        # Sums of squares of zeros and ones are counts.
        out[:, column] = reference_square_sums(marked.float())
    out[:, 3] = reference_square_sums(change)
    out[:, 4] = reference_square_sums(weight)
