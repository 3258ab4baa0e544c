"""Muon: momentum made orthogonal, for whole matrices.

The arithmetic is that of `torch.optim.Muon` (torch 2.9 to 2.15), operation by operation, so an fp32 step
gives the same bits. A stack of matrices is updated one matrix at a time: a batched product may add in
another order than a single one, and then a result would depend on how many matrices a rank holds.

Invariant: a matrix's update depends on that matrix, its moment and its gradient alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.optim.schemes import SliceTensors
from zerodrift.optim.updates import Moments, UpdateStep, update_blocks


@dataclass(frozen=True, slots=True)
class MuonHyper:
    """Muon's arguments at one step, with torch's names and defaults."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients of the quintic whose repetition drives singular values towards one."""
    ns_steps: int = 5
    ns_eps: float = 1e-7
    """Smallest norm to divide by; torch's `eps`."""
    ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """The dtype of the quintic; torch's is bf16."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """The rule by which the learning rate grows with the shape of the matrix."""


def orthogonal(matrix: Tensor, numbers: MuonHyper) -> Tensor:
    """Return about the nearest matrix with orthogonal rows or columns, by Newton-Schulz in `ns_dtype`.

    The coefficients rise so steeply at zero that the result does not converge: singular values end between
    about 0.7 and 1.2, which trains as well and takes five steps.
    """
    a, b, c = numbers.ns_coefficients
    wide = torch.float32 if numbers.ns_dtype == "fp32" else torch.bfloat16
    x = matrix.to(wide, copy=True)
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=numbers.ns_eps))
    for _ in range(numbers.ns_steps):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return x.T if is_tall else x


def rate(numbers: MuonHyper, rows: int, columns: int) -> float:
    """Return the learning rate of an orthogonal update of this shape."""
    if numbers.adjust_lr_fn == "match_rms_adamw":
        return numbers.lr * (0.2 * math.sqrt(max(rows, columns)))
    return numbers.lr * math.sqrt(max(1, rows / columns))


def direction(numbers: MuonHyper, moment: Tensor, gradient: Tensor) -> Tensor:
    """Add the gradient to the moment, and return the matrix to make orthogonal. Elementwise."""
    moment.lerp_(gradient, 1 - numbers.momentum)
    return gradient.lerp(moment, numbers.momentum) if numbers.nesterov else moment


def advance(numbers: MuonHyper, weights: Tensor, directions: Tensor, change: Tensor | None = None) -> None:
    """Update fp32 weights in place. Shape [matrices, rows, columns].

    `change`, of the same shape, is filled with what is added to each weight, before that sum is rounded.
    """
    by = -rate(numbers, weights.shape[1], weights.shape[2])
    decay = 1 - numbers.lr * numbers.weight_decay
    for place, (weight, wanted) in enumerate(zip(weights, directions, strict=True)):
        update = orthogonal(wanted, numbers)
        if change is not None:
            change[place] = weight * (decay - 1) + update.float() * by
        weight.mul_(decay)
        weight.add_(update, alpha=by)


def update_matrices(
    of: SliceTensors,
    span: slice,
    shape: tuple[int, ...],
    gradient: Tensor,
    numbers: MuonHyper,
    step: UpdateStep,
    statistics: Tensor | None = None,
) -> None:
    """Update the matrices of one parameter, in `span` of a slice; `shape` is the parameter's."""
    count = span.stop - span.start
    if count == 0:
        return
    shape = (-1, *shape[-2:])

    def advance_all(weight: Tensor, moments: Moments, gradient: Tensor, is_counted: bool) -> Tensor | None:
        wanted = direction(numbers, moments[0], gradient)
        change = torch.zeros_like(weight) if is_counted else None
        matrices = None if change is None else change[:count].view(shape)
        advance(numbers, weight[:count].view(shape), wanted[:count].view(shape), matrices)
        return change

    # To the end of the last block: padding after the row is zero and stays zero.
    blocks = span.start // BLOCK, -(-span.stop // BLOCK)
    update_blocks(of, gradient, step, blocks, advance_all, statistics=statistics)
