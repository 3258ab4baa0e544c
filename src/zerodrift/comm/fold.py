"""Sums of the parts of all ranks: in a known order, in one dtype, rounded where the plan says.

A backend's own reduction chooses its order and dtype. So parts travel unchanged, and `fold` adds them: pure
arithmetic on tensors that have arrived. A sum by the tree over a power of two of ranks may travel by
recursive halving instead.

Invariant: ((part 0 + part 1) + part 2) + ..., or the same parts by a binary tree, in `Sum.dtype`, then one
conversion to the dtype of the result. The bits are the same on every rank, at every chunk size, by any
carrier; ranks that follow `halving_exchanges` to the end have the bits of `fold`.

[Note: halving] In the first exchange a rank and its neighbour, whose number differs in the lowest bit, send
each other the slices of all ranks that have the other's bit, and both add the incoming values to the rest. In
the next exchange, ranks 2 apart do so with half of those slices, until a rank has its own slice and one part
to add. That takes log2(N) messages and additions, of N - 1 slices in all, instead of N - 1 each. The first
sums are of neighbours, as in the tree over ranks, and most bytes go to the nearest ranks: of machines of 8,
an eighth leaves one. Beginning with the furthest rank would send neighbouring slices without a copy, but
nearly all bytes would leave the machine, and the tree would have ranks in the order of their reversed bits.
Incoming values become the running sum: left + right is right + left to the bit, and the caller's buffer is
only read. Nothing is rounded on the way only if sums travel in the dtype in which they are formed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zerodrift.kernels import device, native

FEW = 2
"""Most parts that torch adds in one call."""


@dataclass(frozen=True, slots=True)
class Sum:
    """The arithmetic by which parts become a result."""

    dtype: torch.dtype
    """The dtype of the additions; holds every value of the parts."""
    add: bool = False
    """Add to the old values of the result instead of overwriting them."""
    order: Literal["rank", "tree", "native"] = "rank"
    """One part after the other, by the tree of `additions`, or left to the backend if wire and sum have one
    dtype; one after the other if not."""


def carries(number: int) -> Iterator[tuple[int, int]]:
    """Yield the additions (left, right) that part `number` completes, if parts arrive in order.

    A sum has the number of its first part and replaces both operands.
    """
    right, size = number, 1
    while right & size:
        yield right - size, right
        right, size = right - size, 2 * size


def leftovers(count: int) -> Iterator[tuple[int, int]]:
    """Yield the additions (left, right) that are left after `count` parts. Missing halves are skipped."""
    right = count & (count - 1)
    while right:
        left = right & (right - 1)
        yield left, right
        right = left


def additions(count: int) -> Iterator[tuple[int, int]]:
    """Yield all additions (left, right) of the binary tree over `count` parts."""
    for number in range(count):
        yield from carries(number)
    yield from leftovers(count)


@torch.no_grad()
def fold(
    out: Tensor,
    parts: Sequence[Tensor] | Tensor,
    how: Sum,
    spare: Tensor | None = None,
    *,
    scratch: bool = False,
) -> None:
    """Write the sum of `parts` to `out`: flat tensors of one length, and `out` may be one of them.

    For parts in one tensor, shape [parts, elements], the host makes as many calls for many as for few. The
    tree may form its sums in them if they are `scratch`.
    `spare` holds the sum if it cannot be formed in `out`: in `how.dtype`, at least as long, or one of two
    parts.
    """
    # Only the first addition may read what `out` holds.
    can_hold = out.dtype is how.dtype and not how.add
    if isinstance(parts, Tensor):
        can_hold = can_hold and parts.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    else:
        can_hold = can_hold and all(part.data_ptr() != out.data_ptr() for part in parts[2:])
    if can_hold:
        total = out
    elif spare is None:
        total = torch.empty_like(out, dtype=how.dtype)
    else:
        total = spare[: out.numel()]
    tree = how.order == "tree"
    if not _add_up(total, parts, tree=tree):
        if not tree:
            _add_in_turn(total, parts)
        elif isinstance(parts, Tensor) and len(parts) > FEW:
            _add_by_levels(total, parts, scratch=scratch)
        else:
            _add_by_tree(total, parts)
    if total is out:
        return
    if how.add:
        out.add_(total)
    else:
        out.copy_(total)


def _add_up(total: Tensor, parts: Sequence[Tensor] | Tensor, *, tree: bool) -> bool:
    """Add up all parts in one call, with the same bits; return False if this case is not compiled."""
    kind, count = parts[0].dtype, len(parts)
    if count <= FEW or kind not in native.TYPES or total.dtype not in (kind, torch.float32):
        return False
    if total.device.type != "cpu":
        if not isinstance(parts, Tensor) or not parts.is_contiguous():
            return False
        if (tree and count > device.TREE_PARTS) or not device.works(total.device):
            return False
        device.sums(parts, total, tree=tree)
        return True
    built = native.library()
    if built is None:
        return False
    if isinstance(parts, Tensor):
        addresses = np.arange(count, dtype=np.int64) * (parts.stride(0) * parts.itemsize) + parts.data_ptr()
    else:
        addresses = np.array([part.data_ptr() for part in parts], dtype=np.int64)
    source, target = (
        (addresses.ctypes.data, native.TYPES[kind]),
        (total.data_ptr(), native.TYPES[total.dtype]),
    )
    built.sums(total.numel(), count, *source, *target, int(tree), torch.get_num_threads())
    return True


def _add_in_turn(total: Tensor, parts: Sequence[Tensor] | Tensor) -> None:
    first, *others = parts
    if others and first.dtype is total.dtype:
        torch.add(first, others.pop(0), out=total)
    else:
        # With `out=`, torch would add in the dtype of the parts and convert the rounded sum.
        total.copy_(first)
    for part in others:
        total.add_(part)


def _add_by_levels(total: Tensor, parts: Tensor, *, scratch: bool) -> None:
    """Add the tree level by level, each in one call. An odd last sum is added at the end."""
    is_room = scratch and parts.dtype is total.dtype
    sums, last = parts if is_room else parts.to(total.dtype, copy=True), None
    while len(sums) > 1:
        pairs = len(sums) // 2
        if len(sums) % 2:
            last = sums[-1] if last is None else sums[-1].add_(last)
        sums = sums[: 2 * pairs : 2].add_(sums[1 : 2 * pairs : 2])
    if last is None:
        total.copy_(sums[0])
    else:
        torch.add(sums[0], last, out=total)


def _add_by_tree(total: Tensor, parts: Sequence[Tensor] | Tensor) -> None:
    """Add by the tree. Sums that begin with the first part are formed in `total`, others in new memory."""
    sums: dict[int, Tensor] = {}
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


# --- recursive halving ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HalvingExchange:
    """One exchange of two ranks."""

    partner: int
    outgoing: Tensor
    incoming: Tensor
    """Memory for what the partner sends, which is to be added to `kept`."""
    kept: Tensor
    """Values of this rank. In the last exchange they are flat, like `incoming`."""


def halving_exchanges(full: Tensor, rank: int, ranks: int, room: Tensor) -> Iterator[HalvingExchange]:
    """Yield the exchanges of a rank, each to be done before the next is asked for. See [Note: halving].

    After the last, the sum of the rank's slice is `incoming + kept`. `room` has as many elements as `full`.
    """
    running, distance = full, 1
    incoming_room, outgoing_room = room.chunk(2)
    free = itertools.cycle((outgoing_room, incoming_room))
    while True:
        slices = running.view(-1, 2, full.numel() // ranks)
        bit = 1 if rank & distance else 0
        kept, outgoing = slices[:, bit], slices[:, 1 - bit]
        if not outgoing.is_contiguous():
            outgoing = outgoing_room[: outgoing.numel()].view_as(outgoing).copy_(outgoing)
        incoming = incoming_room[: kept.numel()].view_as(kept)
        is_last = len(kept) == 1
        yield HalvingExchange(
            rank ^ distance, outgoing.view(-1), incoming.view(-1), kept.view(-1) if is_last else kept
        )
        if is_last:
            return
        running, distance = incoming.add_(kept).view(-1), 2 * distance
        incoming_room, outgoing_room = next(free).chunk(2)
