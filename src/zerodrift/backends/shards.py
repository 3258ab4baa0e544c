"""What this rank of an `fsdp2` engine owns of a plan's segment, as a flat piece: see `engine/shards.py`.

A piece is the parts of the segment's parameters that this rank holds, one after the other. Every replica
holds the same; where it is read, each takes its share.

Invariant: over all ranks the shares are every element of the model, each exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from zerodrift.backends.group import Member
from zerodrift.backends.optimizer import TensorUpdater
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.engine.shards import Span
from zerodrift.plan.table import Plan, Row


class DTensorShard:
    """This rank's part of one segment."""

    def __init__(
        self, number: int, members: Sequence[Member], updater: TensorUpdater | None, copy: tuple[int, int]
    ) -> None:
        self.number = number
        self._members = members
        trained = any(member.row.trained for member in members)
        self._updater = updater if trained else None
        self.numel = sum(member.range.numel for member in members)
        """Elements; there is no padding."""
        self.held = tuple(_spans(members, 0, self.numel))
        """All that this rank holds."""
        index, copies = copy
        self.share = tuple(_spans(members, *(self.numel * n // copies for n in (index, index + 1))))
        """The part of it that no other rank reads."""
        self.filled = self.held
        """What this rank fills where values come from files."""
        self.rows: tuple[Row, ...] = tuple(member.row for member in members)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in and out: fp32 where they are trained, else that of storage."""
        return self._members[0].row.columns.storage.dtype.torch if self._updater is None else torch.float32

    @property
    def updated(self) -> bool:
        """Whether an optimizer owns it: there may be moments."""
        return self._updater is not None

    def zeros(self) -> torch.Tensor:
        """`[numel]`, to be filled and handed to `set_weights`."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self._members[0].storage().device)

    def weights(self) -> torch.Tensor:
        """`[numel]`: storage, which is the master."""
        return self.stored().to(self.dtype)

    def stored(self) -> torch.Tensor:
        """`[numel]`: what rests on this rank, in the storage dtype; a copy."""
        return torch.cat([member.storage() for member in self._members])

    def moments(self) -> dict[str, torch.Tensor]:
        """`[numel]` in fp32 by torch's names; none before the first step."""
        return {} if self._updater is None else self._updater.states(self.number)

    @torch.no_grad()
    def set_weights(self, values: torch.Tensor) -> None:
        start = 0
        for member in self._members:
            member.storage().copy_(values[start : start + member.range.numel])
            start += member.range.numel

    def set_filled(self, values: torch.Tensor, comm: Collectives) -> None:
        self.set_weights(values)

    def set_moment(self, key: str, values: torch.Tensor) -> None:
        if self._updater is None:
            raise AssertionError(f"segment {self.number} has no optimizer")
        self._updater.set_state(self.number, key, values)


def pieces(
    plan: Plan, members: Mapping[str, Member], updater: TensorUpdater | None, mesh: Mesh
) -> Iterator[DTensorShard]:
    """One per segment, in the order of the plan. `members` by row name."""
    copy = mesh.rank("replicate"), mesh.size("replicate")
    for number, segment in enumerate(plan.segments):
        mine = [members[plan.rows[row].name] for row in segment.rows]
        yield DTensorShard(number, mine, updater, copy)


def _spans(members: Sequence[Member], low: int, high: int) -> Iterator[Span]:
    """What lies in `[low, high)` of the parts of all members, one after the other."""
    begin = 0
    for member in members:
        first, last = max(begin, low), min(begin + member.range.numel, high)
        if first < last:
            yield Span(member.row, member.range.start + first - begin, slice(first, last))
        begin += member.range.numel
