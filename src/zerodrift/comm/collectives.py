"""Every collective that zerodrift makes. Nothing else calls torch.distributed's.

An operation has the plan's word (`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`), or is an
`all_to_all` of rows, whose sizes the data decides; `record` lists the calls in these words. Its messages
depend on the carrier: gloo has messages between pairs of ranks (`pairs.py`), NCCL has calls of its own
(`native.py`). Both carriers have the same methods. The parts of a sum travel in the wire dtype and `fold`
adds them; a sum by the tree travels by recursive halving if the number of ranks is a power of two. The
backend itself only sums integers, which have no order, and forms sums of the order `native`.

Invariant: a result depends on the values, the rank order and the dtypes, never on the carrier, except for
sums that are left to it. A missing rank becomes a RankError with the operation, the axis and its number.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerodrift.comm.fold import Sum, fold
from zerodrift.comm.mesh import Axis, AxisName, Mesh, StartedCollective
from zerodrift.comm.native import CommunicationStream, NativeCalls
from zerodrift.comm.pairs import Pairs
from zerodrift.comm.watch import EVERYWHERE
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import RankError
from zerodrift.kernels import device

T = TypeVar("T")

Carrier = Literal["shared", "pairs", "native"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]

DIRECT = 1 << 18
"""Bytes below which an all-reduce sends whole tensors to all ranks: one round trip instead of two."""

FEW = {"pairs": 4, "native": 1}
"""Ranks up to which integers are added like other values; the backend adds those of more ranks."""

AT_ONCE = 16
"""Ranks from which on gloo exchanges the parts of a sum in one call. With 16 to 64 ranks that takes 0.4 to
0.8 times the time of messages between pairs; gathers are faster by pairs."""

SEVERAL = 32
"""Ranks up to which objects are gathered at once. More ranks first compare a hash, as most have the same."""

HALVING = {"pairs": 8, "native": 16}
"""Ranks from which on a sum by the tree travels by halves. With 4 ranks on gloo, two messages in turn take
1.2 to 1.35 times the time of three at once. Up to 8 ranks on GPUs are those of one machine, which halves do
not keep bytes from leaving: all parts come in one call, as in the order of ranks."""

SMALL = 1 << 20
"""Bytes below which up to `TREE_PARTS` ranks on GPUs send all parts in one call too. On 64 ranks six messages
in turn, with a copy and an addition each, take longer than the bytes that halves keep inside a machine."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective as this rank issued it; compare with `plan.schedule.Collective`."""

    op: Op
    dtype: DType
    """The wire dtype."""
    numel: int
    """Elements of the whole buffer: all slices together."""
    axis: AxisName
    sum: DType | None
    """The dtype of the sum; None for an operation that only moves."""


def travels_by_halves(ranks: int, nbytes: int, calls: str) -> bool:
    """Return whether a sum by the tree of `nbytes` from each rank travels by recursive halving, if its wire
    rounds nothing."""
    is_small = calls == "native" and nbytes < SMALL and ranks <= device.TREE_PARTS
    return ranks >= HALVING[calls] and not ranks & (ranks - 1) and not is_small


class Handle:
    """A collective under way. Its buffers belong to it until `wait` returns."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait for the other ranks, and finish the operation here. A second call does nothing."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Collectives:
    """The collectives of one mesh.

    `carrier` is `pairs` (messages between pairs of ranks, best on gloo), `shared` (the same, through shared
    memory if ranks have some) or `native` (the backend's own calls, best on NCCL). The bits do not depend on
    it. An operation takes `of`, words for what it moves, the same on every rank: ranks that move different
    things at once get an error that says so.
    """

    def __init__(self, mesh: Mesh, carrier: Carrier | None = None) -> None:
        self.mesh = mesh
        carrier = carrier or ("shared" if mesh.device.type == "cpu" else "native")
        self.calls: Literal["pairs", "native"] = "native" if carrier == "native" else "pairs"
        """The kind of calls that are made; with `shared`, messages between pairs."""
        self._logs: list[list[Recorded]] = []
        self._native = NativeCalls(mesh)
        self._pairs = Pairs(mesh, mesh.shared if carrier == "shared" else None)
        has_streams = mesh.asynchronous and self.calls != "pairs"
        self._gathers = CommunicationStream(mesh.device) if has_streams else None
        self._reductions = CommunicationStream(mesh.device) if has_streams else None
        self._last: StartedCollective | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """Yield a list that gets every collective issued inside the `with`, also on axes of one rank."""
        log: list[Recorded] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs = [kept for kept in self._logs if kept is not log]

    def all_gather(self, out: Tensor, shard: Tensor, axis: AxisName, of: str = "") -> None:
        """Gather every rank's slice, in rank order, into the flat buffer `out`."""
        self.start_all_gather(out, shard, axis, of).wait()

    def start_all_gather(
        self, out: Tensor, shard: Tensor, axis: AxisName, of: str = "", note: Recorded | None = None
    ) -> Handle:
        """Start an all-gather. `shard` may be its own place in `out`; slices travel in the dtype of `out`.
        `note` is recorded instead, of bytes that hold something else."""
        line = self.mesh.axis(axis)
        self._note("all_gather", out, axis, None, note)
        if line.group is None or not out.numel():
            _copy(line.slice(out, line.rank), shard)
            return Handle()
        turn = self._turn("all_gather", line, of)
        if self._gathers is not None:
            with self._gathers.current():
                self._carrier.gather(turn, out, _cast(shard, out, line))()
            return Handle(self._gathers.wait_for_work(out, shard))
        return Handle(self._carrier.gather(turn, out, _cast(shard, out, line)))

    def start_reduce_scatter(
        self, out: Tensor, full: Tensor, axis: AxisName, how: Sum, of: str = "", *, ahead: bool = True
    ) -> Handle:
        """Start to write this rank's slice of the sum of every rank's `full` into `out`.

        Values travel in the dtype of `full`, are summed as `how` says, and are converted once to the dtype of
        `out`, which may be this rank's slice of `full`. `ahead` gives the other ranks' slices memory of their
        own until `wait`.
        """
        if self._reductions is None or self.mesh.group(axis) is None:
            return self._reduce_scatter(out, full, axis, how, of, ahead=ahead)
        with self._reductions.current():
            self._reduce_scatter(out, full, axis, how, of, ahead=ahead).wait()  # the stream waits
        return Handle(self._reductions.wait_for_work(out, full))

    def _reduce_scatter(
        self, out: Tensor, full: Tensor, axis: AxisName, how: Sum, of: str, *, ahead: bool
    ) -> Handle:
        line = self.mesh.axis(axis)
        self._note("reduce_scatter", full, axis, how.dtype)
        if line.group is None or not full.numel():
            fold(out, [full], how)
            return Handle()
        turn = self._turn("reduce_scatter", line, of)
        is_exact = how.order == "tree" and full.dtype is how.dtype
        if is_exact and travels_by_halves(line.size, full.nbytes, self.calls):
            return Handle(self._carrier.halve(turn, out, full, how))
        if how.order == "native" and self.calls != "native":
            how = replace(how, order="rank")
        return Handle(self._carrier_for(line).sum(turn, out, full, how, ahead=ahead))

    @property
    def _carrier(self) -> NativeCalls | Pairs:
        return self._native if self.calls == "native" else self._pairs

    def _carrier_for(self, line: Axis) -> NativeCalls | Pairs:
        """Return the carrier of sums: see `AT_ONCE`."""
        return self._native if line.size >= AT_ONCE else self._carrier

    def all_reduce(self, out: Tensor, values: Tensor, axis: AxisName, how: Sum, of: str = "") -> None:
        """Write the sum of every rank's `values` into every rank's `out`, which may be `values` itself.

        Values are summed and converted as in a reduce-scatter. On CUDA the stream waits, not the host.
        """
        line = self.mesh.axis(axis)
        self._note("all_reduce", values, axis, how.dtype)
        if line.group is None or not values.numel():
            fold(out, [values], how)
        elif how == Sum(torch.int64) and out.dtype is how.dtype and line.size > FEW[self.calls]:
            out.copy_(values)
            turn = self._turn("all_reduce", line, of)
            self._native.call(turn, dist.all_reduce, out, group=line.group)
        elif values.nbytes <= DIRECT or line.size == 2 or values.numel() % line.size:
            # Everything goes to all ranks, each of which forms the whole sum.
            turn = self._turn("all_reduce", line, of)
            self._carrier_for(line).sum(turn, out, values, how, ahead=False)()
        else:
            mine = line.slice(out, line.rank)
            logs, self._logs = self._logs, []  # the parts of one operation are not recorded
            try:
                self.start_reduce_scatter(mine, values, axis, how, of, ahead=False).wait()
                self.all_gather(out, mine, axis, of)
            finally:
                self._logs = logs

    def all_reduce_sum(self, tensor: Tensor, axis: AxisName, of: str = "") -> Tensor:
        """Return the sum over ranks of a small tensor, such as a flag or part of a norm, in its own dtype."""
        values = tensor.detach().reshape(-1).contiguous()
        total = torch.empty_like(values)
        self.all_reduce(total, values, axis, Sum(tensor.dtype), of)
        return total.view(tensor.shape)

    def read(self, tensor: Tensor) -> list[Any]:
        """Return the values of a tensor on the host, after all collectives that were started before."""
        if self._last is None:
            return list(tensor.tolist())
        with self.mesh.at(self._last):
            return list(tensor.tolist())

    def broadcast(self, tensor: Tensor, source: int, axis: AxisName) -> None:
        """Overwrite `tensor`, of any contiguous shape, with that of rank `source` of the axis."""
        line = self.mesh.axis(axis)
        flat = tensor.detach().view(-1)
        self._note("broadcast", flat, axis, None)
        if line.group is not None and flat.numel():
            data = flat.view(torch.uint8)  # no backend knows every dtype
            turn = self._turn("broadcast", line, "")
            self._native.call(turn, dist.broadcast, data, group=line.group, group_src=source)

    def start_all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        axis: AxisName,
        of: str = "",
        note: Recorded | None = None,
    ) -> tuple[Tensor, Handle]:
        """Start to send the first `send[0]` of `rows` to rank 0 of the axis, and so on; return the rows that
        have arrived when the handle has been waited for.

        `receive` has the number of rows that arrive from each rank. Recorded with the elements that this rank
        sends; `note` is recorded instead, of rows that are parts of something else. Shape [rows, width].
        """
        line = self.mesh.axis(axis)
        self._note("all_to_all", rows, axis, None, note)
        if line.group is None:
            return rows.clone(), Handle()
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        turn = self._turn("all_to_all", line, of)
        return arrived, Handle(self._carrier.swap(turn, arrived, rows, receive, send))

    def all_gather_object(self, value: T, axis: AxisName = "world") -> list[T]:
        """Return every rank's small Python value, in rank order. Pickled; not recorded."""
        line = self.mesh.axis(axis)
        if line.group is None:
            return [value]
        values: list[Any] = [None] * line.size
        turn = self._turn("all_gather_object", line, "")
        numbered = (turn.number, value)
        if line.size > SEVERAL and self._all_have(pickle.dumps(numbered), turn):
            return [value] * line.size
        self._native.call(turn, dist.all_gather_object, values, numbered, group=line.group)
        if len({number for number, _ in values}) > 1:
            counts = (f"rank {rank} {count}" for rank, (count, _) in zip(line.ranks, values, strict=True))
            got = f"ranks of axis `{axis}` that have made different numbers of them: {', '.join(counts)}"
            raise RankError(
                "ranks", "must run the same collectives in the same order", got=got, do=EVERYWHERE
            )
        return [value for _, value in values]

    def _all_have(self, text: bytes, turn: StartedCollective) -> bool:
        """Return whether every rank has this text, by 126 bits of a hash; the same answer on every rank."""
        words = torch.tensor([word >> 1 for word in struct.unpack("<QQ", hashlib.sha256(text).digest()[:16])])
        both = torch.cat([words, -words]).to(self.mesh.device)

        def is_same() -> bool:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=turn.line.group)
            most, least = both.tolist()[:2], both.neg().tolist()[2:]
            return bool(most == least)

        return bool(self._native.call(turn, is_same))

    def gather_object(self, value: T, axis: AxisName = "world") -> list[T]:
        """Return every rank's Python value on rank 0, in rank order, and [] elsewhere. Not recorded."""
        line = self.mesh.axis(axis)
        if line.group is None:
            return [value]
        values: list[Any] | None = [None] * line.size if line.rank == 0 else None
        turn = self._turn("gather_object", line, "")
        self._native.call(turn, dist.gather_object, value, values, group=line.group, group_dst=0)
        return values or []

    def broadcast_object(self, value: T | None, source: int, axis: AxisName = "world") -> T:
        """Return the value of rank `source`; the others' are ignored. Pickled; not recorded."""
        line = self.mesh.axis(axis)
        held: list[Any] = [value]
        if line.group is not None:
            turn, send = self._turn("broadcast_object", line, ""), dist.broadcast_object_list
            self._native.call(turn, send, held, group=line.group, group_src=source)
        return held[0]

    def barrier(self, axis: AxisName = "world") -> None:
        """Return when every rank of the axis is here. Not recorded."""
        line = self.mesh.axis(axis)
        if line.group is not None:
            self._native.call(self._turn("barrier", line, ""), dist.barrier, group=line.group)

    def agree(self, digest: str, rows: Callable[[], Sequence[str]]) -> None:
        """Raise on every rank unless all have the same digest.

        Two ranks that differ write out their `rows`, whose first difference the error shows.
        """
        digests = self.all_gather_object(digest)
        other = next((rank for rank, theirs in enumerate(digests) if theirs != digests[0]), None)
        if other is None:
            return
        mine = list(rows()) if self.mesh.rank() in (0, other) else None
        here, there = (self.broadcast_object(mine, rank) or [] for rank in (0, other))
        got = f"different ones on ranks 0 and {other}, though their {len(here)} rows agree"
        for number, (one, two) in enumerate(itertools.zip_longest(here, there, fillvalue="nothing")):
            if one != two:
                got = f"different ones from row {number} on: {one} on rank 0, {two} on rank {other}"
                break
        do = "Give every rank the same config, model and world size."
        raise RankError("plan", "must be the same on every rank", got=got, do=do)

    def make_room(self, full: int, axis: AxisName) -> None:
        """Free what is kept between reductions, if a reduction of `full` bytes is too large for it."""
        line = self.mesh.axis(axis)
        if self.calls == "pairs" and line.group is not None:
            self._pairs.make_room(line, full // line.size)

    def release(self) -> None:
        """Free the memory that is kept between reductions."""
        self._pairs.release()

    # --- one collective ---------------------------------------------------------------------------------

    def _turn(self, op: str, line: Axis, of: str) -> StartedCollective:
        self._last = line.begin(op, of)
        return self._last

    def _note(
        self,
        op: Op,
        tensor: Tensor,
        axis: AxisName,
        sum_dtype: torch.dtype | None,
        note: Recorded | None = None,
    ) -> None:
        if not self._logs:
            return
        dtype, total = from_torch(tensor.dtype), None if sum_dtype is None else from_torch(sum_dtype)
        assert dtype is not None, f"{tensor.dtype} has no name in `dtypes`"
        entry = note or Recorded(op, dtype, tensor.numel(), axis, total)
        for log in self._logs:
            log.append(entry)


def _cast(shard: Tensor, out: Tensor, line: Axis) -> Tensor:
    """Return a slice in the dtype of `out`. If that is another dtype, the slice is in its place in `out`."""
    if shard.dtype is out.dtype:
        return shard
    place = line.slice(out, line.rank)
    _copy(place, shard)
    return place


@torch.no_grad()
def _copy(place: Tensor, shard: Tensor) -> None:
    if place.data_ptr() != shard.data_ptr():
        place.copy_(shard)
