"""Schemes of master weights and moments: the tensors of a slice in memory, and their values in fp32.

A slice is one rank's part of a segment: flat tensors of one length, worked on in blocks of 256 elements.
`updates` and `fused` update slices; nothing here computes an update.

Invariant: `read` after `write` gives the values back exactly for the masters `fp32` and `split` (any NaN
as a NaN), and rounded to storage for `same`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK, DType
from zerodrift.kernels import random_words, resting_zeros
from zerodrift.optim import rounding
from zerodrift.optim.rounding import join, round_stochastic, split
from zerodrift.policy import Master, State


@dataclass(frozen=True, slots=True)
class Scheme:
    """The columns of the plan that an update needs."""

    storage: DType
    master: Master
    state: State


@dataclass(frozen=True, slots=True)
class SliceTensors:
    """The tensors of one slice: all flat, contiguous and of one length, on one device."""

    scheme: Scheme
    storage: Tensor
    """The weights that the model computes with, in the storage dtype."""
    master: Tensor | None
    """fp32 values for `fp32`, the int16 low halves for `split`, None for `same`."""
    moments: tuple[Tensor, ...]
    """None, one or two moments in the state dtype."""
    scales: tuple[Tensor, ...] = ()
    """fp32 per block, one tensor for each moment, where the state is `8bit`."""
    groups: Tensor | None = None
    """int32 per block: which group of hyper-parameters it belongs to. None: all to group 0."""
    keys: Tensor | None = None
    """int64 per block, from `kernels.block_keys`; needed where rounding draws random bits."""

    @property
    def numel(self) -> int:
        return self.storage.numel()

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)


def allocate(
    scheme: Scheme,
    storage: Tensor,
    moments: int,
    initial: Tensor | None = None,
    groups: Tensor | None = None,
    keys: Tensor | None = None,
) -> SliceTensors:
    """Return a slice around `storage` with moments of zero.

    The master starts as `initial`, fp32 values that an fp32 master keeps, and storage becomes their rounding.
    Without them the master starts as what storage holds. For a split master `initial` may be its low halves,
    if storage holds the high ones.
    """
    scaled = moments if scheme.state is State.EIGHT_BIT else 0
    blocks = -(-storage.numel() // BLOCK)
    like, device = scheme.state.dtype.torch, storage.device
    halves = initial is not None and initial.dtype is torch.int16
    master = None
    if scheme.master is Master.FP32:
        master = storage.float() if initial is None else initial
    elif scheme.master is Master.SPLIT:
        # Zeros mean that storage is exact.
        master = initial if halves else resting_zeros(storage.shape, torch.int16, device)
    tensors = SliceTensors(
        scheme,
        storage=storage,
        master=master,
        moments=tuple(resting_zeros(storage.shape, like, device) for _ in range(moments)),
        scales=tuple(storage.new_zeros(blocks, dtype=torch.float32) for _ in range(scaled)),
        groups=groups,
        keys=keys,
    )
    if initial is not None and not halves:
        write(tensors, initial)
    return tensors


def read(of: SliceTensors, start: int = 0, stop: int | None = None) -> Tensor:
    """Return the master's values in fp32, as a copy."""
    part = slice(start, stop)
    if of.scheme.master is Master.SPLIT and of.master is not None:
        return join(of.storage[part], of.master[part])
    return (of.storage if of.master is None else of.master)[part].to(torch.float32, copy=True)


def write(of: SliceTensors, values: Tensor, start: int = 0) -> None:
    """Set master and storage, from `start` on, to fp32 values."""
    part = slice(start, start + values.numel())
    if of.scheme.master is Master.SPLIT and of.master is not None:
        split(values, of.storage[part], of.master[part])
        return
    if of.master is not None and of.master.data_ptr() != values.data_ptr():
        of.master[part] = values
    of.storage[part] = values


# --- moments ------------------------------------------------------------------------------------------


def read_moment(of: SliceTensors, number: int, first: int = 0, last: int | None = None) -> Tensor:
    """Return a moment's values in fp32, of blocks [first, last), as a copy."""
    stop = None if last is None else last * BLOCK
    held = of.moments[number][first * BLOCK : stop]
    if of.scheme.state is State.EIGHT_BIT:
        return rounding.decode(rounding.code_of(number), held, of.scales[number][first:last])
    return held.to(torch.float32, copy=True)


def write_moment(
    of: SliceTensors, number: int, values: Tensor, first: int = 0, words: Tensor | None = None
) -> None:
    """Set a moment, from block `first` on, to fp32 values.

    `words` has 32 random bits per element for states that draw them: the low half rounds the first moment,
    the high half the second. Without `words` every value is rounded to nearest, so a moment that was read is
    written back unchanged.
    """
    part = slice(first * BLOCK, first * BLOCK + values.numel())
    draws = None if words is None else (words >> (16 * number)) & 0xFFFF
    if of.scheme.state is State.EIGHT_BIT:
        codes, scales = rounding.encode(rounding.code_of(number), values, draws)
        of.moments[number][part] = codes
        of.scales[number][first : first + scales.numel()] = scales
    elif of.scheme.state is State.BF16_STOCHASTIC and draws is not None:
        of.moments[number][part] = round_stochastic(values, draws)
    else:
        of.moments[number][part] = values


def draw(of: SliceTensors, step: int, first: int, last: int) -> Tensor | None:
    """Return the random words of a step for blocks [first, last); None if rounding draws none."""
    if of.keys is None or not (of.scheme.state.drawn and of.moments):
        return None
    return random_words(of.keys[first:last], step).flatten()[: of.numel - first * BLOCK]
