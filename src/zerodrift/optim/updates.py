"""Updates in plain PyTorch: the arithmetic of elementwise optimizers, the step of a slice, and statistics.

`ARITHMETIC` has one entry per record of `optimizers.py`. `reference_update` applies it to a slice in any
scheme; the compiled path equals it bit for bit. The operations are torch's own in torch's own order, so with
`Root.TORCH` an fp32 slice has the bits of `torch.optim.AdamW`, `Adam` and `SGD` in their default
form (one tensor at a time) and with `foreach=True`, on any slicing.

[Note: roots] torch's `fused=True` kernels do the same operations in the same order with one difference: they
use the processor's square root, which is correctly rounded, while `torch.sqrt` uses a vector library that
is off by one ulp for about a fifth of all values and may differ between machines. `Root.EXACT`, the default,
is correctly rounded: its bits are the same on every machine. One limit remains: for the last
`numel % 16` elements of a tensor (of each thread's part, with several threads) torch's fused kernels run a
scalar loop that computes in fp64, so there, and only there, they differ by an ulp from themselves elsewhere.

A step's derived numbers are computed in double precision in Python, as in torch, and rounded once.

Statistics say which part of an update was kept, lost or not visible, per block of 256 elements. They cost
nothing when off; when on, a step fills six numbers per block, in its pass over memory.
`engine/step/update.py` adds the blocks of a parameter.

Invariants: an element's result depends on its own values and its group's numbers alone, and not on the run of
blocks that it was computed in. A block's statistics depend on that block alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zerodrift.dtypes import BLOCK
from zerodrift.kernels import exact_sqrt, reference_square_sums
from zerodrift.optim.schemes import SliceTensors, draw, read, read_moment, write, write_moment
from zerodrift.optimizers import ADAM, ADAMW, LION, SGD, Algorithm

CACHED_BLOCKS = 1024
"""Longest run on a CPU, whose temporaries stay in a cache. A device has one launch per operation and run."""


class Root(enum.Enum):
    """The square root that Adam uses. See [Note: roots]."""

    EXACT = "exact"
    """Correctly rounded: the same bits on every machine, and those of torch's fused kernels."""
    TORCH = "torch"
    """`torch.sqrt` of this machine: the bits of torch's default and foreach kernels."""


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of one parameter group at one step, with torch's names. Each algorithm reads its own."""

    lr: float
    step: int = 1
    """The number of this group's update, from 1, for bias corrections and SGD's first buffer."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class UpdateStep:
    """One optimizer step, one object for all slices. Derived values are cached by its identity."""

    algorithm: Algorithm
    hypers: tuple[Hyper, ...]
    """Per group, as `SliceTensors.groups` numbers them."""
    number: int
    """The run's own count of optimizer steps: part of the key of stochastic rounding."""
    multiplier: float = 1.0
    """Unscale x clip factor: one fp32 product with the gradient."""
    root: Root = Root.EXACT


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A group's derived numbers, in double precision; every use rounds one of them to fp32.

    The order of fields is the row of the compiled path's table.
    """

    sign: float = 1.0
    """Multiplies the gradient together with the step's multiplier: -1 to maximize."""
    decay: float = 1.0
    """Multiplies the parameter."""
    l2: float = 0.0
    """Factor of the parameter that is added to the gradient."""
    blend1: float = 0.0
    """Weight of the gradient in the first moment (Lion: in the direction)."""
    keep1: float = 0.0
    """Weight of the old first moment (SGD: the momentum)."""
    blend2: float = 0.0
    """Weight of the new value in the second moment (Lion: of the gradient in the stored moment)."""
    keep2: float = 0.0
    """Weight of the old second moment."""
    correction: float = 1.0
    """Divides the root of the second moment."""
    eps: float = 0.0
    step: float = 0.0
    """The negative learning rate, bias correction included."""
    first: float = 0.0
    """1 on a group's first update: SGD's buffer starts as the gradient."""
    nesterov: float = 0.0


Moments = tuple[Tensor, ...]

Direction = tuple[Tensor, Tensor | None]
"""Numerator and denominator (None: 1) of an update, before it is multiplied by `Coefficients.step`."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of one optimizer."""

    coefficients: Callable[[Hyper], Coefficients]
    """Derived numbers, computed in torch's order."""
    advance: Callable[[Coefficients, Tensor, Moments, Tensor, Root], Direction]
    """One update in place of flat fp32 values. The gradient is scaled, includes `l2`, and is overwritten."""
    compiled: int | None = None
    """The number in `kernels/updates.h` and `kernels/programs.py`; None runs in PyTorch everywhere."""
    decays: bool = True
    """True if `decay` is part of the change: an infinite weight then changes by NaN."""
    roots: bool = False
    """True if the update takes the square root that `Root` is about."""


# --- Adam -----------------------------------------------------------------------------------------------


def _sign(hyper: Hyper) -> float:
    return -1.0 if hyper.maximize else 1.0


def _decoupled(hyper: Hyper) -> float:
    return 1 - hyper.lr * hyper.weight_decay


def _of_betas(hyper: Hyper) -> dict[str, float]:
    """Return the numbers that Adam and Lion have in common."""
    beta1, beta2 = hyper.betas
    blends = {"blend1": 1 - beta1, "keep1": beta1, "blend2": 1 - beta2, "keep2": beta2}
    return {"sign": _sign(hyper), **blends}


def _adam_numbers(hyper: Hyper, decoupled: bool) -> Coefficients:
    beta1, beta2 = hyper.betas
    return Coefficients(
        **_of_betas(hyper),
        decay=_decoupled(hyper) if decoupled else 1.0,
        l2=0.0 if decoupled else hyper.weight_decay,
        correction=(1 - beta2 ** float(hyper.step)) ** 0.5,
        eps=hyper.eps,
        step=-(hyper.lr / (1 - beta1 ** float(hyper.step))),
    )


def _adam(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> Direction:
    mean, square = moments
    if numbers.decay != 1:
        weight.mul_(numbers.decay)
    mean.lerp_(gradient, numbers.blend1)
    square.mul_(numbers.keep2).addcmul_(gradient, gradient, value=numbers.blend2)
    denominator = exact_sqrt(square) if root is Root.EXACT else square.sqrt()
    denominator.div_(numbers.correction).add_(numbers.eps)
    weight.addcdiv_(mean, denominator, value=numbers.step)
    return mean, denominator


# --- SGD and Lion ---------------------------------------------------------------------------------------


def _sgd_numbers(hyper: Hyper) -> Coefficients:
    return Coefficients(
        sign=_sign(hyper),
        l2=hyper.weight_decay,
        blend1=1 - hyper.dampening,
        keep1=hyper.momentum,
        step=-hyper.lr,
        first=float(hyper.step == 1),
        nesterov=float(hyper.nesterov),
    )


def _sgd(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> Direction:
    if moments and numbers.keep1 != 0:
        buffer = moments[0]
        if numbers.first:
            buffer.copy_(gradient)
        else:
            buffer.mul_(numbers.keep1).add_(gradient, alpha=numbers.blend1)
        if numbers.nesterov:
            gradient.add_(buffer, alpha=numbers.keep1)
        else:
            gradient.copy_(buffer)
    weight.add_(gradient, alpha=numbers.step)
    return gradient, None


def _lion_numbers(hyper: Hyper) -> Coefficients:
    return Coefficients(**_of_betas(hyper), decay=_decoupled(hyper), step=-hyper.lr)


def _lion(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> Direction:
    mean = moments[0]
    direction = mean.mul(numbers.keep1).add_(gradient, alpha=numbers.blend1).sign_()
    if numbers.decay != 1:
        weight.mul_(numbers.decay)
    weight.add_(direction, alpha=numbers.step)
    mean.mul_(numbers.keep2).add_(gradient, alpha=numbers.blend2)
    return direction, None


ARITHMETIC: Mapping[Algorithm, Arithmetic] = {
    ADAMW: Arithmetic(partial(_adam_numbers, decoupled=True), _adam, compiled=0, roots=True),
    ADAM: Arithmetic(partial(_adam_numbers, decoupled=False), _adam, compiled=0, roots=True),
    SGD: Arithmetic(_sgd_numbers, _sgd, compiled=1, decays=False),
    LION: Arithmetic(_lion_numbers, _lion, compiled=2),
}
"""The optimizers that update flat slices."""


# --- statistics -------------------------------------------------------------------------------------------

COLUMNS = ("moved", "unseen", "lost", "underflow", "change_squares", "weight_squares")
"""Counts of elements that the update wanted to change, of those whose visible weight has the same bits as
before, and of those whose master has too; elements with a gradient whose last moment is stored as zero; and
the sums of squares of the wanted change and of the master before it."""

Before = tuple[Tensor, Tensor, Tensor]
"""Master in fp32, visible weight and scaled gradient before an update, all flat."""

After = tuple[Tensor, Tensor, Tensor | None]
"""Master in fp32, visible weight and the last moment, as they are kept after it; None for no moment."""


def room_for_statistics(blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """Return an empty tensor for one step's statistics of one slice. Shape [blocks, columns], fp64."""
    return torch.zeros(blocks, len(COLUMNS), dtype=torch.float64, device=device)


def account(out: Tensor, change: Tensor, before: Before, after: After) -> None:
    """Define the statistics: fill those of each block from `change`, which the update wanted to add."""
    (weight, seen, gradient), (kept, visible, moment) = before, after
    moved = change != 0
    unseen = moved & _same(seen, visible)
    lost = unseen & _same(weight, kept)
    underflow = torch.zeros_like(moved) if moment is None else (gradient != 0) & (moment == 0)
    for column, marked in enumerate((moved, unseen, lost, underflow)):
        # Sums of squares of zeros and ones are counts.
        out[:, column] = reference_square_sums(marked.float())
    out[:, 4] = reference_square_sums(change)
    out[:, 5] = reference_square_sums(weight)


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the elements whose bits are the same."""
    bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    return one.view(bits) == other.view(bits)


# --- the step of a slice ----------------------------------------------------------------------------------


def reference_update(
    of: SliceTensors, gradient: Tensor, step: UpdateStep, statistics: Tensor | None = None
) -> None:
    """Update a slice from its gradient (fp32, bf16 or fp16), which is left as it is."""
    check_gradient(of, gradient)
    arithmetic = ARITHMETIC[step.algorithm]
    for first, last, group in runs(of):
        numbers = arithmetic.coefficients(step.hypers[group])
        advance = partial(_advance, arithmetic, numbers, step.root)
        update_blocks(of, gradient, step, (first, last), advance, numbers.sign, statistics)


def _advance(
    arithmetic: Arithmetic,
    numbers: Coefficients,
    root: Root,
    weight: Tensor,
    moments: Moments,
    gradient: Tensor,
    is_counted: bool,
) -> Tensor | None:
    before = weight.clone() if is_counted else None
    if numbers.l2 != 0:
        gradient.add_(weight, alpha=numbers.l2)
    direction, divisor = arithmetic.advance(numbers, weight, moments, gradient, root)
    if before is None:
        return None
    change = direction * numbers.step
    if divisor is not None:
        change = change / divisor
    if not arithmetic.decays:
        return change
    decay = torch.full((), numbers.decay, dtype=torch.float32, device=before.device)
    return change + before * (decay - 1)


def check_gradient(of: SliceTensors, gradient: Tensor) -> None:
    """Check that a gradient fits: compiled code would read beyond a shorter one."""
    if gradient.shape != of.storage.shape or gradient.device != of.storage.device:
        got = f"{tuple(gradient.shape)} on {gradient.device}"
        raise AssertionError(f"gradient {got} of a slice {tuple(of.storage.shape)} on {of.storage.device}")


def runs(of: SliceTensors) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, one past the last, group): runs of one group that make up the slice, in order."""
    longest = CACHED_BLOCKS if of.storage.device.type == "cpu" else max(of.blocks, 1)
    stretches = [(0, of.blocks)]
    if of.groups is not None:
        groups, counts = torch.unique_consecutive(of.groups, return_counts=True)
        stretches = list(zip(groups.tolist(), counts.tolist(), strict=True))
    first = 0
    for group, count in stretches:
        for start in range(first, first + count, longest):
            yield start, min(start + longest, first + count), group
        first += count


def update_blocks(
    of: SliceTensors,
    gradient: Tensor,
    step: UpdateStep,
    blocks: tuple[int, int],
    advance: Callable[[Tensor, Moments, Tensor, bool], Tensor | None],
    sign: float = 1.0,
    statistics: Tensor | None = None,
) -> None:
    """Update blocks [first, last) of a slice by `advance`, which gets fp32 values to change in place.

    The values are weight, moments and scaled gradient. With True as well, `advance` returns the change that
    it wanted, for statistics.
    """
    first, last = blocks
    start, stop = first * BLOCK, min(last * BLOCK, of.numel)
    # Filled on the device: the host would wait for a copy from the host.
    scale = torch.full((), step.multiplier * sign, dtype=torch.float32, device=of.storage.device)
    scaled = gradient[start:stop].float() * scale
    weight = read(of, start, stop)
    moments = tuple(read_moment(of, number, first, last) for number in range(len(of.moments)))
    before = None
    if statistics is not None:
        before = (weight.clone(), of.storage[start:stop].clone(), scaled.clone())
    change = advance(weight, moments, scaled, statistics is not None)
    write(of, weight, start)
    words = draw(of, step.number, first, last)
    for number, moment in enumerate(moments):
        write_moment(of, number, moment, first, words)
    if statistics is not None and before is not None and change is not None:
        stored = read_moment(of, len(moments) - 1, first, last) if moments else None
        after = (read(of, start, stop), of.storage[start:stop], stored)
        account(statistics[first:last], change, before, after)
