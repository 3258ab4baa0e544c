"""Digest a run's whole state: one number that is equal if all bits are, for any distribution over ranks.

The digest is the sum, modulo 2^64, of each element's bits times an odd weight, which depends on its kind, its
parameter's name and its place. So the digest of a model is the sum of its slices' digests, at any stage and
on any backend. A change of one element always changes it; several changes cancel about once in 2^32. State
that several ranks hold is counted once and compared, and an error names a rank whose copy differs.

Invariant: the digest of a state is the same in all versions, because runs record it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.comm import Collectives
from zerodrift.dtypes import BLOCK
from zerodrift.engine.habits.determinism import cuda_switches
from zerodrift.engine.shards import SegmentShard, Span
from zerodrift.errors import RankError
from zerodrift.kernels import block_digests, block_keys, native, parameter_key
from zerodrift.plan import Plan

WEIGHTS, VISIBLE, MOMENTS, GRADIENTS = KINDS = ("weights", "visible weights", "moments", "gradients")
"""The masters, or storage if there are none; the values that the model computes with, if they are rounded;
the optimizer's state; the summed gradients before an update."""

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Digest:
    """The digest of all ranks' state."""

    cells: Mapping[tuple[str, str], int]

    def __str__(self) -> str:
        return _text(sum(self.cells.values()))

    def by_unit(self) -> dict[str, str]:
        """Return digests of every unit of the plan by name, in its order."""
        return self._added(0)

    def by_kind(self) -> dict[str, str]:
        return self._added(1)

    def _added(self, by: int) -> dict[str, str]:
        sums: dict[str, int] = {}
        for cell, word in self.cells.items():
            sums[cell[by]] = sums.get(cell[by], 0) + word
        return {name: _text(word) for name, word in sums.items()}


def state_digest(plan: Plan, pieces: Iterable[SegmentShard], comm: Collectives) -> Digest:
    """Digest weights and moments. Every rank calls it. Raise on all ranks if copies differ."""
    sums = _Sums(plan, comm.mesh.device)
    spans: list[list[Any]] = [[], []]
    digests = [0, 0]
    """Digests of state that other ranks hold too, of parts of segments and of whole ones."""
    for piece in pieces:
        copied = piece.held if piece.share != piece.held else ()
        whole = sum(span.numel for span in copied) == sum(row.numel for row in piece.rows)
        spans[whole] += [(span.row.name, span.start, span.numel) for span in copied]
        for kind, what, flat in _state(piece) if piece.held else ():
            sums.add(kind, what, flat, piece.share)
            digests[whole] += sum(int(_digest_of(kind, what, flat, span)) for span in copied)
    copies = [
        (parameter_key(str(held)), one & _WORD) for held, one in zip(spans, digests, strict=True) if held
    ]
    _compare(copies, comm)
    return sums.over_ranks(comm, (WEIGHTS, VISIBLE, MOMENTS))


def gradient_digest(
    plan: Plan, parts: Iterable[tuple[Sequence[Span], torch.Tensor]], comm: Collectives
) -> Digest:
    """Digest reduced gradients, of which ranks share no element. Every rank calls it."""
    sums = _Sums(plan, comm.mesh.device)
    for spans, flat in parts:
        sums.add(GRADIENTS, "", flat, spans)
    return sums.over_ranks(comm, (GRADIENTS,))


def _state(piece: SegmentShard) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (kind, torch's name of a moment, values) of a piece."""
    yield WEIGHTS, "", piece.weights()
    stored = piece.stored()
    if stored.dtype is not piece.dtype:
        yield VISIBLE, "", stored
    if piece.updated:
        yield from ((MOMENTS, name, flat) for name, flat in piece.moments().items())


class _Sums:
    """The sums of this rank, by unit and kind."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._units = list(dict.fromkeys(unit.name for unit in plan.units))
        self._unit_of = {row.name: self._units.index(plan.units[row.unit].name) for row in plan.rows}
        self._sums = torch.zeros(len(self._units), len(KINDS), dtype=torch.int64, device=device)

    def add(self, kind: str, what: str, flat: torch.Tensor, spans: Sequence[Span]) -> None:
        for span in spans:
            at = self._unit_of[span.row.name], KINDS.index(kind)
            self._sums[at] += _digest_of(kind, what, flat, span)

    def over_ranks(self, comm: Collectives, kinds: Sequence[str]) -> Digest:
        words = comm.read(comm.all_reduce_sum(self._sums, "world", "digest"))
        return Digest(
            {
                (unit, kind): words[number][KINDS.index(kind)] & _WORD
                for number, unit in enumerate(self._units)
                for kind in kinds
            }
        )


def _digest_of(kind: str, what: str, flat: torch.Tensor, span: Span) -> torch.Tensor:
    flat, start = flat[span.place], span.start
    if flat.itemsize > 8:
        flat, start = flat.view(torch.int64), 2 * start
    key = parameter_key(f"{kind} {what} {span.row.name}")
    sums = block_digests(flat.contiguous(), start % BLOCK)
    return (sums * (block_keys(key, start // BLOCK, len(sums), flat.device) | 1)).sum()


def tensor_digest(name: str, value: torch.Tensor) -> str:
    """Return the digest of a whole tensor, which depends on its name and dtype."""
    flat = value.detach().contiguous().view(-1)
    sums = block_digests(flat)
    keys = block_keys(parameter_key(f"{value.dtype} {name}"), 0, len(sums), flat.device)
    return _text(int((sums * (keys | 1)).sum()))


def computed_by(device: torch.device) -> dict[str, Any]:
    """Return the versions and settings that change bits, beside the plan, the model and the data."""
    compiled = native.library() is not None
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": native.processor().partition("\n")[0].partition(":")[2].strip() or native.processor(),
        "kernels": "compiled" if compiled else "plain",
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_device_name(device)
    if device.type == "cuda":
        found |= {"cuda": str(torch.version.cuda), **cuda_switches()}
    return found


def _compare(copies: list[tuple[int, int]], comm: Collectives) -> None:
    """Require one digest of each part of the state that several ranks hold; `copies` are (key, digest)."""
    ranks: dict[int, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for rank, theirs in enumerate(comm.all_gather_object(copies)):
        for spans, digest in theirs:
            ranks[spans][digest].append(rank)
    for by_digest in ranks.values():
        *fewer, most = sorted(by_digest.values(), key=len)
        if fewer:
            others = [rank for alike in fewer for rank in alike]
            must = "must be the same bits on ranks that hold the same"
            got = f"different bits on {_named(others)} than on {_named(most)}"
            do = "Load the last checkpoint. If the same rank differs again, test its memory and processor."
            raise RankError("state", must, got=got, do=do)


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _text(word: int) -> str:
    return f"{word & _WORD:016x}"
