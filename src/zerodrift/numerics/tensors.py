"""Whether a tensor is the bits that were trained, and if not, what became of it.

A tensor that left a trainer may be in another dtype: then it must be what was trained, each element rounded
once to the nearest value. Whatever else is there has a name of its own: rounded on another way, of another
place, of another tensor, or other values.

Invariant: pure, and a verdict is shown by equality of bits; only of a quantised tensor is it a bound, half a
step of its scale.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zerodrift.dtypes import from_torch

Kind = Literal[
    "same",
    "rounded",
    "quantised",
    "rounded-otherwise",
    "overflowed",
    "not-finite",
    "another-tensor",
    "transposed",
    "permuted",
    "scaled",
    "other-values",
    "untied",
    "missing",
]

PRECISION: frozenset[Kind] = frozenset(("same", "rounded", "quantised"))
"""What is trained, in the dtype that the tensor says it has."""

_SHOWN = 8
"""Slices of a tensor that are told by number."""


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """What a tensor is beside the one that was trained."""

    kind: Kind
    told: str
    """In words, without the tensor's name."""
    differ: int
    """Elements that are not what was trained, rounded to the tensor's own dtype."""
    distance: float
    """Of the two tensors over the norm of the trained one, in fp64; of a verdict alone NaN."""

    @property
    def is_precision(self) -> bool:
        return self.kind in PRECISION


def digest(tensor: Tensor) -> str:
    """Of a tensor's bits."""
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def judged(
    trained: Tensor,
    other: Tensor,
    others: Mapping[str, Tensor] | None = None,
    scale: Tensor | None = None,
) -> TensorVerdict:
    """Of `other` beside `trained`, of the same shape. `others` are trained tensors that it might be instead.

    A quantised tensor is given dequantised, with its `scale` (a step of each element) beside it.
    """
    if not trained.is_floating_point():
        same = torch.equal(trained, other)
        count = 0 if same else int((trained != other).sum())
        told = "as trained" if same else f"{count:,} elements are others"
        return TensorVerdict("same" if same else "other-values", told, count, float(not same))
    far = distance(other, trained)
    if scale is not None and bool(((other - trained).abs() <= scale).all()):
        return TensorVerdict("quantised", "within half a step of its scale", 0, far)
    wanted = trained.to(other.dtype)
    differs = ~_same_bits(wanted, other)
    count = int(differs.sum())
    if count == 0 and bool(wanted.isfinite().all()):
        exact = torch.equal(wanted.to(trained.dtype), trained)
        name = short(other.dtype)
        told = f"as trained, in {name}" if exact else f"rounded to {name}"
        return TensorVerdict("same" if exact else "rounded", told, 0, far)
    if not bool(other.isfinite().all()):
        return _not_finite(trained, other, wanted, far)
    where = _where(differs, count)
    for told in _roundings(trained[differs], other[differs]):
        return TensorVerdict("rounded-otherwise", f"{told}: {where}", count, far)
    moved = _moved(trained, other, wanted, others or {})
    if moved is not None:
        return TensorVerdict(moved[0], moved[1], count, far)
    return TensorVerdict("other-values", f"values of another step or model: {where}", count, far)


def distance(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of `b`."""
    gap, norm = float((a.double() - b.double()).norm()), float(b.double().norm())
    return gap / norm if norm else gap


def short(dtype: torch.dtype) -> str:
    """`bf16`, or torch's own word for what has no short one."""
    known = from_torch(dtype)
    return str(known) if known is not None else str(dtype).removeprefix("torch.")


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    word = _WORDS[a.itemsize]
    return a.contiguous().view(word) == b.contiguous().view(word)


def _where(differs: Tensor, count: int) -> str:
    """How many elements, and in which slices of the first dimension where those are few."""
    total = differs.numel()
    told = f"{count:,} of {total:,} elements"
    if differs.dim() > 1 and count < total:
        rows = differs.flatten(1).any(1).nonzero().flatten().tolist()
        if len(rows) < differs.shape[0] and len(rows) <= _SHOWN:
            told += f", in {'slice' if len(rows) == 1 else 'slices'} {', '.join(map(str, rows))}"
    return told


def _not_finite(trained: Tensor, other: Tensor, wanted: Tensor, far: float) -> TensorVerdict:
    bad = ~other.isfinite()
    count, name = int(bad.sum()), short(other.dtype)
    largest = float(trained[bad].abs().max())
    if bool(_same_bits(wanted, other).all()):
        told = f"{count:,} elements beyond the range of {name} are infinite, the largest {largest:.3g}"
        return TensorVerdict("overflowed", told, count, far)
    return TensorVerdict("not-finite", f"{count:,} elements are inf or nan", count, far)


# --- rounded on another way ------------------------------------------------------------------------------


def _roundings(trained: Tensor, other: Tensor) -> Iterator[str]:
    """Ways that lead from what was trained to what is there, in elements that are not rounded once."""
    for told, way in _WAYS:
        made = way(trained, other.dtype)
        if made is not None and bool(_same_bits(made, other).all()):
            yield told
    low, high = neighbours(trained, other.dtype)
    if bool((_same_bits(low, other) | _same_bits(high, other)).all()):
        yield "rounded to a neighbour that is not the nearest, as stochastic rounding does"


Way = Callable[[Tensor, torch.dtype], "Tensor | None"]


def _through(middle: torch.dtype) -> Way:
    def way(values: Tensor, dtype: torch.dtype) -> Tensor | None:
        return None if middle is dtype else values.to(middle).to(dtype)

    return way


def _cut(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The bits of an fp32 value that bf16 has no room for, dropped."""
    if dtype is not torch.bfloat16 or values.dtype is not torch.float32:
        return None
    return (values.contiguous().view(torch.int32) & -65536).view(torch.float32).to(dtype)


def _without_subnormals(values: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = values.to(dtype)
    return torch.where(rounded.abs() < torch.finfo(dtype).tiny, torch.zeros_like(rounded), rounded)


def _saturated(values: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype)


_WAYS: tuple[tuple[str, Way], ...] = (
    ("subnormal values are zero", _without_subnormals),
    ("values beyond its range are its largest", _saturated),
    ("cut off, not rounded", _cut),
    ("rounded to bf16 on the way", _through(torch.bfloat16)),
    ("rounded to fp16 on the way", _through(torch.float16)),
    ("rounded to fp8_e4m3 on the way", _through(torch.float8_e4m3fn)),
    ("rounded to fp8_e5m2 on the way", _through(torch.float8_e5m2)),
)


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of a dtype at both sides of each element; twice the element where it is one of them."""
    near = values.to(dtype)
    wide = near.to(values.dtype)
    if dtype is values.dtype:
        return near, near
    up = torch.where(values > wide, 1, torch.where(values < wide, -1, 0))
    word = _WORDS[near.itemsize]
    bits = near.contiguous().view(word)
    # Sign and magnitude: away from zero is one more, whatever the sign.
    step = torch.where(wide > 0, up, -up)
    zero = torch.where(up > 0, torch.full_like(wide, 1.0), torch.full_like(wide, -1.0))
    beside = (bits + step.to(word)).view(dtype)
    smallest = (zero * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).to(dtype)
    beside = torch.where((wide == 0) & (up != 0), smallest, beside)
    return near, beside


# --- of another place, or of another tensor --------------------------------------------------------------


def _moved(
    trained: Tensor, other: Tensor, wanted: Tensor, others: Mapping[str, Tensor]
) -> tuple[Kind, str] | None:
    for name, values in others.items():
        if _is(values, other):
            return "another-tensor", f"the values of `{name}`"
    if wanted.dim() >= 2:
        turned = wanted.transpose(-1, -2)
        if turned.shape == other.shape and bool(_same_bits(turned, other).all()):
            return "transposed", "its last two dimensions are exchanged"
    for dimension in range(other.dim()):
        order = _order(wanted.movedim(dimension, 0), other.movedim(dimension, 0))
        if order is not None:
            return "permuted", f"dimension {dimension} is in another order: {_told(order)}"
    if not bool(other.any()):
        return "other-values", "all zero"
    factor = float((other.double() * trained.double()).sum() / trained.double().square().sum())
    made = (trained.double() * factor).to(other.dtype)
    if distance(other, made) < torch.finfo(other.dtype).eps / 2:
        return "scaled", f"what was trained times {factor:.6g}"
    return None


def _is(values: Tensor, other: Tensor) -> bool:
    """Whether `other` is these values, rounded once; a few are looked at before all."""
    if values.shape != other.shape:
        return False
    first = values.reshape(-1)[:_SHOWN].to(other.dtype)
    if not bool(_same_bits(first, other.reshape(-1)[:_SHOWN]).all()):
        return False
    return bool(_same_bits(values.to(other.dtype), other).all())


def _order(wanted: Tensor, other: Tensor) -> list[int] | None:
    """Which slice of `wanted` each slice of `other` is, if each is one."""
    if wanted.shape[0] < 2:
        return None
    place: dict[bytes, list[int]] = {}
    for number, row in enumerate(_rows(wanted)):
        place.setdefault(row, []).append(number)
    order = []
    for number, row in enumerate(_rows(other)):
        found = place.get(row)
        if not found:
            return None
        order.append(found.pop(found.index(number)) if number in found else found.pop(0))
    return order


def _rows(tensor: Tensor) -> list[bytes]:
    flat = tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).numpy()
    return [row.tobytes() for row in flat]


def _told(order: list[int]) -> str:
    moved = [(here, there) for here, there in enumerate(order) if here != there]
    told = ", ".join(f"{here} has what was {there}" for here, there in moved[:4])
    return told if len(moved) <= 4 else f"{told} and {len(moved) - 4:,} more"
