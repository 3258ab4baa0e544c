"""The sum of a reduction: the parts of all ranks, in a known order, in one dtype, rounded where it is said.

Pure arithmetic on tensors that have arrived; `collectives` brings them. A backend's own reduction adds in
an order and a dtype of its choosing, which is why it is done here.

Invariant: ((part 0 + part 1) + part 2) + ..., or the same parts by a binary tree, in `Sum.dtype`, then one
true division, then one conversion to the dtype of the result. The same bits on every rank, at every chunk
size, whatever carried the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from zerodrift.kernels.sums import FEW, add_up


@dataclass(frozen=True, slots=True)
class Sum:
    """How parts become a result."""

    dtype: torch.dtype
    """What the parts are added in; holds every value of their own dtype."""
    divisor: float = 1.0
    """The sum is divided by it: the number of ranks, for a mean."""
    add: bool = False
    """Add to what the result holds instead of overwriting it."""
    order: Literal["rank", "tree", "native"] = "rank"
    """One part after the other, by the tree of `additions`, or left to what carries them: where that can add,
    and wire and sum are one dtype; elsewhere one after the other."""


def carries(number: int) -> Iterator[tuple[int, int]]:
    """(left, right): what is added to what when part `number` has come, of parts that come one by one. A sum
    is called by its first part, and the right one is no more."""
    right, size = number, 1
    while right & size:
        yield right - size, right
        right, size = right - size, 2 * size


def leftovers(count: int) -> Iterator[tuple[int, int]]:
    """And when `count` parts have come and no more will: a right half that is missing is skipped."""
    right = count & (count - 1)
    while right:
        left = right & (right - 1)
        yield left, right
        right = left


def additions(count: int) -> Iterator[tuple[int, int]]:
    """The binary tree over `count` parts, all of it."""
    for number in range(count):
        yield from carries(number)
    yield from leftovers(count)


@torch.no_grad()
def fold(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor] | torch.Tensor,
    how: Sum,
    spare: torch.Tensor | None = None,
) -> None:
    """Write the sum of `parts` to `out`; flat tensors of one length, and `out` may be one of them. Where they
    lie one behind the other, as `[parts, elements]`, the host makes as many calls for many as for few.

    `spare` holds the sum where it cannot be formed in `out`: of `how.dtype` and at least as long. It may be
    one of two parts.
    """
    if _forms_in(out, parts, how):
        total = out
    elif spare is None:
        total = torch.empty_like(out, dtype=how.dtype)
    else:
        total = spare[: out.numel()]
    tree = how.order == "tree"
    if not add_up(total, parts, tree=tree):
        if not tree:
            _add_in_turn(total, parts)
        elif isinstance(parts, torch.Tensor) and len(parts) > FEW:
            _add_by_levels(total, parts)
        else:
            _add_by_tree(total, parts)
    if how.divisor != 1.0:
        _divide(total, how.divisor)
    if total is out:
        return
    if how.add:
        out.add_(total)
    else:
        out.copy_(total)


def _add_in_turn(total: torch.Tensor, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
    first, *others = parts
    if others and first.dtype is total.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        # With `out=`, torch would add in the dtype of the parts and convert the rounded sum.
        total.copy_(first)
    for part in others:
        total.add_(part)


def _add_by_levels(total: torch.Tensor, parts: torch.Tensor) -> None:
    """The tree from its leaves up, a level in one call; the last sum of a level may wait for one above."""
    sums, last = parts, None
    while len(sums) > 1:
        pairs = len(sums) // 2
        left, right = sums[: 2 * pairs : 2], sums[1 : 2 * pairs : 2]
        if len(sums) % 2:
            odd = sums[-1].to(total.dtype, copy=True)
            last = odd if last is None else odd.add_(last)
        sums = (left.to(total.dtype, copy=True) if sums is parts else left).add_(right)
    if last is None:
        total.copy_(sums[0])
    else:
        torch.add(sums[0], last, out=total)


def _add_by_tree(total: torch.Tensor, parts: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Sums that begin with the first part are formed in `total`, the others in memory of their own."""
    sums: dict[int, torch.Tensor] = {}
    for left, right in additions(len(parts)):
        other = sums.pop(right, parts[right])
        if left in sums:
            sums[left].add_(other)
        elif left == 0:
            _add_in_turn(total, (parts[0], other))
            sums[0] = total
        else:
            sums[left] = parts[left].to(total.dtype, copy=True).add_(other)
    if len(parts) == 1:
        total.copy_(parts[0])


def _forms_in(out: torch.Tensor, parts: Sequence[torch.Tensor] | torch.Tensor, how: Sum) -> bool:
    """Whether `out` may hold the running sum: it is read only by the first addition, if at all."""
    if out.dtype is not how.dtype or how.add:
        return False
    if isinstance(parts, torch.Tensor):
        return parts.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    return all(part.data_ptr() != out.data_ptr() for part in parts[2:])


def _divide(total: torch.Tensor, divisor: float) -> None:
    """One true division. A Python number would become a multiplication by its reciprocal on CUDA."""
    wide = torch.promote_types(total.dtype, torch.float32)
    by = torch.full((), divisor, dtype=wide, device=total.device)
    if total.dtype is wide:
        total.div_(by)
    else:
        # A 16-bit divisor would itself be rounded: 257 is not a bf16.
        total.copy_(total.to(wide).div_(by))
