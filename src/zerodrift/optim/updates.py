"""The definition of each elementwise update on flat fp32 values, in plain PyTorch.

`ARITHMETIC` has them by the records of `optimizers.py`. `reference` applies these to slices in every scheme;
the compiled path equals them bit for bit. They are torch's own operations in torch's own order, so with
`Root.TORCH` an fp32 slice goes through the same bits as `torch.optim.AdamW`, `Adam` and `SGD` in their
default form (one tensor at a time) and with `foreach=True`, on any slicing.

[Note: roots] torch's `fused=True` kernels do the same operations in the same order with one difference: they
take the processor's square root, which is correctly rounded, where `torch.sqrt` asks a vector library that
is off by one ulp for about a fifth of all values and may differ between machines. `Root.EXACT` is the
former, and the default: its bits are the same on every machine. One limit remains: for the last
`numel % 16` elements of a tensor (of each thread's part, with several threads) torch's fused kernels run a
scalar loop that computes in fp64, so there, and only there, they differ by an ulp from themselves elsewhere.

All of a step's derived numbers are formed in double precision in Python, as torch does, and rounded once.

Invariant: an element's result depends on its own values and its group's numbers alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zerodrift.kernels.probe import exact_sqrt
from zerodrift.optimizers import ADAM, ADAMW, LION, SGD, Algorithm


class Root(enum.Enum):
    """Whose square root Adam takes. See [Note: roots]."""

    __hash__ = object.__hash__  # as `DType`
    EXACT = "exact"
    """Correctly rounded: the same bits on every machine, and those of torch's fused kernels."""
    TORCH = "torch"
    """`torch.sqrt` as it is on this machine: the bits of torch's default and foreach kernels."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Hyper:
    """The numbers of one group of parameters at one step. Each algorithm reads its own."""

    lr: float
    step: int = 1
    """Which update of this group it is, from 1: bias corrections, and SGD's first buffer, depend on it."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam, AdamW, Lion."""
    eps: float = 1e-8
    """Adam, AdamW."""
    weight_decay: float = 0.0
    momentum: float = 0.0
    """SGD."""
    dampening: float = 0.0
    """SGD."""
    nesterov: bool = False
    """SGD."""
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a group's numbers come to, in double precision; every use rounds one of them to fp32.

    The order of fields is the row of the compiled path's table.
    """

    sign: float = 1.0
    """Multiplies the gradient together with the step's multiplier: -1 to maximize."""
    decay: float = 1.0
    """Multiplies the parameter."""
    l2: float = 0.0
    """Times the parameter, added to the gradient."""
    blend1: float = 0.0
    """Weight of the gradient in the first moment (Lion: in the direction)."""
    keep1: float = 0.0
    """Weight of the old first moment (SGD: the momentum)."""
    blend2: float = 0.0
    """Weight of the new value in the second moment (Lion: of the gradient in the stored moment)."""
    keep2: float = 0.0
    """Weight of the old one."""
    correction: float = 1.0
    """Divides the root of the second moment."""
    eps: float = 0.0
    step: float = 0.0
    """The negative learning rate, bias correction included."""
    first: float = 0.0
    """1 on a group's first update: SGD's buffer starts as the gradient."""
    nesterov: float = 0.0


Moments = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What one optimizer computes."""

    coefficients: Callable[[Hyper], Coefficients]
    """A group's numbers, formed in the order in which torch forms them."""
    advance: Callable[[Coefficients, Tensor, Moments, Tensor, Root], None]
    """One update in place: flat, fp32, of a gradient that is scaled and has `l2` in it."""
    wanted: Callable[[Coefficients, Tensor, Moments, Tensor, Root], Tensor]
    """What `advance` added to the weight it found, from the moments and the gradient that it left."""
    compiled: int | None = None
    """Its number in `kernels/updates.h` and `kernels/programs.py`; None runs in PyTorch everywhere."""
    roots: bool = False
    """Whether it takes the square root that `Root` is about."""


def moment_count(algorithm: Algorithm, hypers: tuple[Hyper, ...]) -> int:
    """How many moments a slice with these groups carries."""
    name = algorithm.moments_with
    return len(algorithm.kept({name: getattr(hyper, name)} for hyper in hypers))


def coefficients(algorithm: Algorithm, hyper: Hyper) -> Coefficients:
    return ARITHMETIC[algorithm].coefficients(hyper)


def advance(
    algorithm: Algorithm,
    numbers: Coefficients,
    weight: Tensor,
    moments: Moments,
    gradient: Tensor,
    root: Root,
) -> None:
    """One update in place on flat fp32 tensors.

    The gradient is already scaled, and is overwritten: SGD and Lion leave the direction they took in it.
    """
    if numbers.l2 != 0:
        gradient.add_(weight, alpha=numbers.l2)
    ARITHMETIC[algorithm].advance(numbers, weight, moments, gradient, root)


def wanted_change(
    algorithm: Algorithm,
    numbers: Coefficients,
    before: Tensor,
    moments: Moments,
    gradient: Tensor,
    root: Root,
) -> Tensor:
    """What `advance` added to the weight it found, before that sum was rounded. For statistics.

    `moments` and `gradient` are what `advance` left behind.
    """
    return ARITHMETIC[algorithm].wanted(numbers, before, moments, gradient, root)


def _with_decay(change: Tensor, numbers: Coefficients, before: Tensor) -> Tensor:
    decay = torch.tensor(numbers.decay, dtype=torch.float32, device=before.device)
    return change + before * (decay - 1)


# --- Adam -----------------------------------------------------------------------------------------------


def _sign(hyper: Hyper) -> float:
    return -1.0 if hyper.maximize else 1.0


def _decoupled(hyper: Hyper) -> float:
    return 1 - hyper.lr * hyper.weight_decay


def _adam_numbers(hyper: Hyper, decay: float, l2: float) -> Coefficients:
    beta1, beta2 = hyper.betas
    return Coefficients(
        sign=_sign(hyper),
        decay=decay,
        l2=l2,
        blend1=1 - beta1,
        keep1=beta1,
        blend2=1 - beta2,
        keep2=beta2,
        correction=(1 - beta2 ** float(hyper.step)) ** 0.5,
        eps=hyper.eps,
        step=-(hyper.lr / (1 - beta1 ** float(hyper.step))),
    )


def _adam(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> None:
    mean, square = moments
    if numbers.decay != 1:
        weight.mul_(numbers.decay)
    mean.lerp_(gradient, numbers.blend1)
    square.mul_(numbers.keep2).addcmul_(gradient, gradient, value=numbers.blend2)
    weight.addcdiv_(mean, _denominator(numbers, square, root), value=numbers.step)


def _denominator(numbers: Coefficients, square: Tensor, root: Root) -> Tensor:
    taken = exact_sqrt(square) if root is Root.EXACT else square.sqrt()
    return taken.div_(numbers.correction).add_(numbers.eps)


def _adam_wanted(
    numbers: Coefficients, before: Tensor, moments: Moments, gradient: Tensor, root: Root
) -> Tensor:
    change = (moments[0] * numbers.step) / _denominator(numbers, moments[1], root)
    return _with_decay(change, numbers, before)


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


def _sgd(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> None:
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


def _sgd_wanted(
    numbers: Coefficients, before: Tensor, moments: Moments, gradient: Tensor, root: Root
) -> Tensor:
    return gradient * numbers.step


def _lion_numbers(hyper: Hyper) -> Coefficients:
    beta1, beta2 = hyper.betas
    return Coefficients(
        sign=_sign(hyper),
        decay=_decoupled(hyper),
        blend1=1 - beta1,
        keep1=beta1,
        blend2=1 - beta2,
        keep2=beta2,
        step=-hyper.lr,
    )


def _lion(numbers: Coefficients, weight: Tensor, moments: Moments, gradient: Tensor, root: Root) -> None:
    mean = moments[0]
    direction = mean.mul(numbers.keep1).add_(gradient, alpha=numbers.blend1).sign_()
    if numbers.decay != 1:
        weight.mul_(numbers.decay)
    weight.add_(direction, alpha=numbers.step)
    mean.mul_(numbers.keep2).add_(gradient, alpha=numbers.blend2)
    gradient.copy_(direction)


def _lion_wanted(
    numbers: Coefficients, before: Tensor, moments: Moments, gradient: Tensor, root: Root
) -> Tensor:
    return _with_decay(gradient * numbers.step, numbers, before)


ARITHMETIC: Mapping[Algorithm, Arithmetic] = {
    ADAMW: Arithmetic(
        lambda hyper: _adam_numbers(hyper, decay=_decoupled(hyper), l2=0.0),
        _adam,
        _adam_wanted,
        compiled=0,
        roots=True,
    ),
    ADAM: Arithmetic(
        lambda hyper: _adam_numbers(hyper, decay=1.0, l2=hyper.weight_decay),
        _adam,
        _adam_wanted,
        compiled=0,
        roots=True,
    ),
    SGD: Arithmetic(_sgd_numbers, _sgd, _sgd_wanted, compiled=1),
    LION: Arithmetic(_lion_numbers, _lion, _lion_wanted, compiled=2),
}
"""The optimizers that update flat slices."""
