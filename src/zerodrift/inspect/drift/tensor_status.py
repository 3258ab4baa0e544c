"""Follow every tensor from the trainer to the sampler, and judge whether it is what was trained.

A tensor may leave the trainer in another dtype if each element is rounded once, to a nearest value. All other
changes have names: rounded another way, moved, another tensor, other values. With a folder of sent and one of
loaded tensors, the step at which a tensor changed is named.

Invariant: tensors are compared bit by bit. Except that ties may be rounded either way, and that elements of
quantised tensors may differ by half a step of their scale.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from zerodrift.dtypes import from_torch
from zerodrift.errors import first_of
from zerodrift.inspect.drift.sampler import SamplerTensor, read_sampler_weights
from zerodrift.inspect.drift.trainer import TrainerSide
from zerodrift.weights import expected_tensors

Kind = Literal[
    "same", "rounded", "quantised", "rounded-otherwise", "overflowed", "not-finite", "another-tensor",
    "transposed", "permuted", "scaled", "other-values", "untied", "missing",
]  # fmt: skip

_SHOWN = 8  # slices of a tensor that are named
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorVerdict:
    """Result of comparing a tensor with the trained one."""

    kind: Kind
    told: str  # the verdict in words, without the tensor's name
    differ: int  # elements that differ from the trained values rounded to the tensor's dtype
    distance: float  # norm of the difference over the norm of the trained tensor, NaN for a missing tensor

    @property
    def is_as_trained(self) -> bool:
        return self.kind in ("same", "rounded", "quantised")


@dataclass(frozen=True, slots=True)
class TensorStatus:
    name: str
    verdict: TensorVerdict
    step: str  # step at which the tensor changed: `sent` or `loaded`
    dtype: str
    digests: tuple[tuple[str, str], ...]
    """(`trained`, `sent` or `loaded`; hex digest) pairs. `trained` is of the trained values in this dtype."""


def follow_tensors(
    trainer: TrainerSide, sent: Path | None, loaded: Path | None
) -> tuple[list[TensorStatus], dict[str, SamplerTensor], tuple[tuple[str, int], ...], list[str]]:
    """Return the status of every tensor, the sampler's tensors, counts of verdicts, and notes."""
    want = expected_tensors(trainer.spec.parameters, trainer.spec.buffers, trainer.module)
    folders = [(step, path.expanduser()) for step, path in (("sent", sent), ("loaded", loaded)) if path]
    read = [(step, read_sampler_weights(path, trainer.module, want)) for step, path in folders]
    if not read:
        return [], {}, (), []
    trained = trainer.tensors()
    names = {name: parameter.names for parameter in trainer.spec.parameters for name in parameter.names}
    (_, first), (last_step, last) = read[0], read[-1]
    held = dict(last.tensors)
    for alias in [name for name in held if names.get(name, (name,))[0] != name]:
        original = held.get(names[alias][0])
        if original is not None and torch.equal(original.values, held[alias].values):
            del held[alias]
    found: list[TensorStatus] = []
    for name, tensor in held.items():
        verdict = _judge_in_model(name, trained, held, names.get(name, (name,)))
        digests = [("trained", digest(trained[name].to(tensor.values.dtype)))]
        digests += [(step, digest(side.tensors[name].values)) for step, side in read if name in side.tensors]
        before = first.tensors.get(name) if len(read) == 2 and not verdict.is_as_trained else None
        changed = before is not None and not judge(trained[name], before.values).is_as_trained
        step = "sent" if changed else last_step
        found.append(TensorStatus(name, verdict, step, tensor.dtype, tuple(digests)))
    notes = []
    for step, side in read:
        gone = TensorVerdict("missing", f"not among the tensors that were {step}", 0, float("nan"))
        known = {status.name for status in found}
        found += [TensorStatus(name, gone, step, "-", ()) for name in side.missing if name not in known]
        if side.unread:
            some = first_of(side.unread, 3)
            notes.append(f"{side.path}: {some} not read: the model has no place for it.")
    words = (
        status.dtype if (kind := status.verdict.kind) == "quantised"
        else status.verdict.told if kind in ("same", "rounded") else kind
        for status in found
    )  # fmt: skip
    return found, held, tuple(Counter(words).most_common()), notes


def _judge_in_model(
    name: str, trained: Mapping[str, Tensor], held: Mapping[str, SamplerTensor], tied: tuple[str, ...]
) -> TensorVerdict:
    tensor, mine = held[name], trained[name]
    others = {n: values for n, values in trained.items() if n not in tied and values.shape == mine.shape}
    verdict = judge(mine, tensor.values, others, tensor.half_step)
    first = next((other for other in tied if other != name and other in held), "")
    if first and not verdict.is_as_trained:
        told = f"no longer equal to `{first}`, which the model ties it to; {verdict.told}"
        return TensorVerdict("untied", told, verdict.differ, verdict.distance)
    return verdict


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def judge(
    trained: Tensor,
    other: Tensor,
    others: Mapping[str, Tensor] | None = None,
    half_step: Tensor | None = None,
) -> TensorVerdict:
    """Compare `other` with `trained`, of the same shape. `others` are trained tensors with which it may have
    been confused. A quantised tensor must be dequantised, with half a step of each element."""
    if not trained.is_floating_point():
        count = int((trained != other).sum())
        if not count:
            return TensorVerdict("same", "as trained", 0, 0.0)
        return TensorVerdict("other-values", f"{count:,} elements are others", count, 1.0)
    far = distance(other, trained)
    if half_step is not None and bool(((other - trained).abs() <= half_step).all()):
        return TensorVerdict("quantised", "within half a step of its scale", 0, far)
    known, wanted = from_torch(other.dtype), trained.to(other.dtype)
    dtype = str(known) if known is not None else str(other.dtype).removeprefix("torch.")
    differs = _differs(trained, wanted, other)
    count, total = int(differs.sum()), differs.numel()
    if count == 0 and bool(wanted.float().isfinite().all()):
        exact = torch.equal(wanted.to(trained.dtype), trained)
        kind: Kind = "same" if exact else "rounded"
        return TensorVerdict(kind, f"as trained, in {dtype}" if exact else f"rounded to {dtype}", 0, far)
    bad = ~other.float().isfinite()
    if infinite := int(bad.sum()):
        if count:
            return TensorVerdict("not-finite", f"{infinite:,} elements are inf or nan", infinite, far)
        largest = float(trained[bad].abs().max())
        told = f"{infinite:,} elements beyond the range of {dtype} are infinite, the largest {largest:.3g}"
        return TensorVerdict("overflowed", told, infinite, far)
    where = f"{count:,} of {total:,} elements"
    if differs.dim() > 1 and count < total:
        rows = differs.flatten(1).any(1).nonzero().flatten().tolist()
        if len(rows) < differs.shape[0] and len(rows) <= _SHOWN:
            where += f", in {'slice' if len(rows) == 1 else 'slices'} {', '.join(map(str, rows))}"
    mine, theirs = trained[differs], other[differs]
    ways = _roundings(mine, other.dtype)
    told = next((words for words, made in ways if bool(_same_bits(made, theirs).all())), "")
    if not told and _is_beside(mine, theirs):
        told = "rounded to a neighbour that is not the nearest, as stochastic rounding does"
    if told:
        return TensorVerdict("rounded-otherwise", f"{told}: {where}", count, far)
    if (moved := _moved(trained, other, wanted, others or {})) is not None:
        return TensorVerdict(*moved, count, far)
    return TensorVerdict("other-values", f"values of another step or model: {where}", count, far)


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference over the norm of `b`."""
    gap, norm = float((a.double() - b.double()).norm()), float(b.double().norm())
    return gap / norm if norm else gap


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    word = _WORDS[a.itemsize]
    return a.contiguous().view(word) == b.contiguous().view(word)


def _differs(trained: Tensor, wanted: Tensor, other: Tensor) -> Tensor:
    """Return True for each element of `other` that is not a nearest value. Of two equally near, both are.

    torch rounds ties to even. Split masters round the ties of their bf16 weights away from zero.
    """
    differs = ~_same_bits(wanted, other)
    exact, near, made = (each[differs].double() for each in (trained, wanted, other))
    gap = (near - exact).abs()
    return differs.masked_scatter(differs, (gap == 0) | (gap != (made - exact).abs()))


def _roundings(values: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield descriptions of wrong ways of rounding values to a dtype, with their results."""
    nearest, limits = values.to(dtype), torch.finfo(dtype)
    yield (
        "subnormal values are zero",
        torch.where(nearest.float().abs() < limits.tiny, 0, nearest.float()).to(dtype),
    )
    yield "values beyond its range are its largest", values.clamp(-limits.max, limits.max).to(dtype)
    if dtype is torch.bfloat16 and values.dtype is torch.float32:
        upper = values.contiguous().view(torch.int32) & -65536
        yield "cut off, not rounded", upper.view(torch.float32).to(dtype)
    for middle in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        if middle is not dtype:
            yield f"rounded to {from_torch(middle)} on the way", values.to(middle).to(dtype)


def _is_beside(trained: Tensor, other: Tensor) -> bool:
    """Return True if every element is a neighbour of the trained one in its dtype."""
    low, high = neighbours(trained, other.dtype)
    return bool((_same_bits(low, other) | _same_bits(high, other)).all())


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the values of a dtype on both sides of each element, twice the element if the dtype has it."""
    near = values.to(dtype)
    wide = near.to(values.dtype)
    if dtype is values.dtype:
        return near, near
    up = torch.where(values > wide, 1, torch.where(values < wide, -1, 0))
    word = _WORDS[near.itemsize]
    # The format is sign and magnitude: adding one to the bits moves away from zero for either sign.
    beside = (near.contiguous().view(word) + torch.where(wide > 0, up, -up).to(word)).view(dtype)
    sign = torch.where(up > 0, torch.full_like(wide, 1.0), torch.full_like(wide, -1.0))
    smallest = (sign * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).to(dtype)
    return near, torch.where((wide == 0) & (up != 0), smallest, beside)


def _moved(
    trained: Tensor, other: Tensor, wanted: Tensor, others: Mapping[str, Tensor]
) -> tuple[Kind, str] | None:
    first = other.reshape(-1)[:_SHOWN]  # a few elements are compared before all
    for name, values in others.items():
        begins = _same_bits(values.reshape(-1)[:_SHOWN].to(other.dtype), first)
        if bool(begins.all()) and bool(_same_bits(values.to(other.dtype), other).all()):
            return "another-tensor", f"the values of `{name}`"
    if wanted.dim() >= 2:
        turned = wanted.transpose(-1, -2)
        if turned.shape == other.shape and bool(_same_bits(turned, other).all()):
            return "transposed", "its last two dimensions are exchanged"
    for dimension in range(other.dim()):
        order = _slice_order(wanted.movedim(dimension, 0), other.movedim(dimension, 0))
        if order is not None:
            moved = [f"{here} has what was {there}" for here, there in enumerate(order) if here != there]
            return "permuted", f"dimension {dimension} is in another order: {first_of(moved, 4)}"
    if not bool(other.any()):
        return "other-values", "all zero"
    factor = float((other.double() * trained.double()).sum() / trained.double().square().sum())
    made = (trained.double() * factor).to(other.dtype)
    if distance(other, made) < torch.finfo(other.dtype).eps / 2:
        return "scaled", f"the trained values times {factor:.6g}"
    return None


def _slice_order(wanted: Tensor, other: Tensor) -> list[int] | None:
    """Return for each slice of `other` the number of the equal slice of `wanted`. None if one has none."""
    if wanted.shape[0] < 2:
        return None

    def slices(tensor: Tensor) -> list[bytes]:
        flat = tensor.contiguous().view(torch.uint8).reshape(tensor.shape[0], -1).numpy()
        return [row.tobytes() for row in flat]

    places: dict[bytes, list[int]] = {}
    for number, row in enumerate(slices(wanted)):
        places.setdefault(row, []).append(number)
    order = []
    for number, row in enumerate(slices(other)):
        left = places.get(row)
        if not left:
            return None
        order.append(left.pop(left.index(number) if number in left else 0))
    return order
