"""Every collective that zerodrift makes. Nobody else calls torch.distributed's.

An operation is what the plan says it is (`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`), or an
`all_to_all` of rows, whose sizes the data decides; `record` lists the calls in those words. How it is
carried differs by backend: on gloo by messages between pairs of ranks (`pairs.py`), on NCCL by its
all-gather and all-to-all. The parts of a sum travel in the wire dtype and `fold` adds them; those of a sum by
the tree meet on the way where ranks are a power of two (`halving.py`); integers, whose sum has no order, and
the order `native` alone leave the sum to the backend. Which buffers move, and when, is the engine's affair.

Invariant: a result depends on the values, the rank order and the dtypes, never on the carrier, but for sums
that are left to it; and a rank that is missing surfaces as RankError with the operation, the axis and the
rank that was waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from zerodrift.comm.fold import Sum, fold
from zerodrift.comm.halving import Swap, room_for, swaps
from zerodrift.comm.lanes import Lane
from zerodrift.comm.mesh import Axis, AxisName, Mesh
from zerodrift.comm.pairs import Pairs, missing
from zerodrift.comm.watch import EVERYWHERE, StartedCollective
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import RankError

T = TypeVar("T")

Carrier = Literal["shared", "pairs", "native"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"]

DIRECT = 1 << 18
"""Bytes below which an all-reduce sends whole tensors to everybody: one round trip instead of two."""

FEW = {"pairs": 4, "native": 1}
"""Ranks up to which integers are added as all else is; above, by the backend: their sum has no order."""

AT_ONCE = 16
"""Ranks from which on gloo exchanges the parts of a sum in one call: with 16 to 64 ranks it takes 0.4 to 0.8
times the time of messages between pairs, which serve gathers better."""

SEVERAL = 32
"""Ranks up to which objects are gathered at once; above, where all have the same, a hash tells."""

HALVING = {"pairs": 8, "native": 4}
"""Ranks from which on a sum by the tree travels by halves. On gloo two messages, one after the other, are no
better than three at once: with 4 ranks 1.2 to 1.35 times the time, and 1.0 to 1.2 beside computation."""

# torch 2.13 gave these their new names and warns about the old ones.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Recorded:
    """One collective as this rank issued it; compare with `plan.schedule.Collective`."""

    op: Op
    dtype: DType
    """On the wire."""
    numel: int
    """Of the whole buffer: all slices together."""
    axis: AxisName
    sum: DType | None
    """What it was summed in; None for an operation that only moves."""


class Handle:
    """A collective under way. Its buffers belong to it until `wait` returns."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        """Wait for the other ranks and do what is left to do here. A second call does nothing."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Collectives:
    """The collectives of one mesh.

    `carrier` is `pairs` (messages between pairs of ranks, what gloo does best), `shared` (the same, through
    shared memory where ranks have some) or `native` (the backend's all-gather and all-to-all, what NCCL does
    best). The bits do not depend on it.
    """

    def __init__(self, mesh: Mesh, carrier: Carrier | None = None) -> None:
        self.mesh = mesh
        self.carrier: Carrier = carrier or ("shared" if mesh.device.type == "cpu" else "native")
        self._logs: list[list[Recorded]] = []
        self._pairs = Pairs(mesh.shared if self.carrier == "shared" else None)
        apart = mesh.asynchronous and self._way != "pairs"
        self._gathers = Lane(mesh.device) if apart else None
        self._reductions = Lane(mesh.device) if apart else None
        self._at = mesh.watch.at
        self._last: StartedCollective | None = None
        """What was started last."""

    @contextlib.contextmanager
    def record(self) -> Iterator[list[Recorded]]:
        """A list that grows by every collective issued inside the `with`, on axes of one rank too."""
        log: list[Recorded] = []
        self._logs.append(log)
        try:
            yield log
        finally:
            self._logs = [kept for kept in self._logs if kept is not log]

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, axis: AxisName, of: str = "") -> None:
        """Every rank's slice, in rank order, into the flat buffer `out`. `of` says what it is, the same on
        every rank: ranks that gather different things at once are told so."""
        self.start_all_gather(out, shard, axis, of).wait()

    def start_all_gather(
        self, out: torch.Tensor, shard: torch.Tensor, axis: AxisName, of: str = ""
    ) -> Handle:
        """`shard` may be its own place in `out`. Another dtype is cast on the way to that place, so slices
        always travel in the dtype of `out`."""
        line = self.mesh.axis(axis)
        _check_slices(out, shard, line)
        self._note("all_gather", out, axis, None)
        if line.group is None or not out.numel():
            _copy(line.slice(out, line.rank), shard)
            return Handle()
        turn = self._turn("all_gather", line, of)
        if self._gathers is not None:
            with self._gathers.beside():
                self._start(turn, line, _gather_single, out, _cast(shard, out, line))()
            return Handle(self._gathers.joined(out, shard))
        shard = _cast(shard, out, line)
        if self._way == "pairs":
            with self._at(turn):
                finish = self._pairs.gather(turn, line, out, shard)
            _copy(line.slice(out, line.rank), shard)  # while the messages travel
            return self._under_way(turn, finish)
        return Handle(self._start(turn, line, _gather_single, out, shard))

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, axis: AxisName, how: Sum) -> None:
        """This rank's slice of the sum of every rank's `full`, into `out`. Values travel in the dtype of
        `full`, are summed as `how` says, and are converted once to the dtype of `out`, which may be this
        rank's slice of `full`."""
        self._begin_reduce_scatter(out, full, axis, how, "", ahead=False).wait()

    def start_reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, axis: AxisName, how: Sum, of: str = ""
    ) -> Handle:
        """The same, under way: the other ranks' slices have room of their own until `wait` sums them."""
        return self._begin_reduce_scatter(out, full, axis, how, of, ahead=True)

    def _begin_reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, axis: AxisName, how: Sum, of: str, *, ahead: bool
    ) -> Handle:
        if self._reductions is None or self.mesh.group(axis) is None:
            return self._reduce_scatter(out, full, axis, how, of, ahead=ahead)
        with self._reductions.beside():
            self._reduce_scatter(out, full, axis, how, of, ahead=ahead).wait()  # which the lane does
        return Handle(self._reductions.joined(out, full))

    def _reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, axis: AxisName, how: Sum, of: str, *, ahead: bool
    ) -> Handle:
        line = self.mesh.axis(axis)
        _check_slices(full, out, line)
        _check_sum(full, how)
        self._note("reduce_scatter", full, axis, how.dtype)
        if line.group is None or not full.numel():
            fold(out, [full], how)
            return Handle()
        turn = self._turn("reduce_scatter", line, of)
        if self._goes_by_halves(line, full, how):
            if self._way == "pairs":
                with self._at(turn):
                    return self._under_way(turn, self._pairs.halve(turn, line, out, full, how))
            return self._halve(turn, line, out, full, how)
        if self._way == "pairs" and line.size < AT_ONCE:
            slices = [line.slice(full, rank) for rank in range(line.size)]
            with self._at(turn):
                finish = self._pairs.sum(turn, line, out, slices, how, ahead=ahead)
            return self._under_way(turn, finish)
        if self.carrier == how.order == "native" and full.dtype is how.dtype:
            if _is_the_sum(out, full, how):
                return Handle(self._start(turn, line, _reduce_scatter_single, out, full, bytewise=False))
            parts = torch.empty_like(out, dtype=full.dtype)[None]
            arrive = self._start(turn, line, _reduce_scatter_single, parts[0], full, bytewise=False)
        else:
            received = torch.empty_like(full)
            parts = received.view(line.size, -1)
            arrive = self._start(turn, line, dist.all_to_all_single, received, full)
        return Handle(lambda: _fold_received(arrive, out, parts, how))

    def _goes_by_halves(self, line: Axis, full: torch.Tensor, how: Sum) -> bool:
        """Where that rounds nothing on the way, and serves."""
        serves = line.size >= HALVING[self._way] and not line.size & (line.size - 1)
        return serves and how.order == "tree" and full.dtype is how.dtype

    def _halve(
        self, turn: StartedCollective, line: Axis, out: torch.Tensor, full: torch.Tensor, how: Sum
    ) -> Handle:
        """By halves, all of it from here: told to the device's lane, or over on return."""
        for swap in swaps(full, line.rank, line.size, full.new_empty(room_for(full))):
            self._swap(turn, line, swap)
        fold(out, (swap.coming, swap.kept), how, swap.coming)
        return Handle()

    def _swap(self, turn: StartedCollective, line: Axis, swap: Swap) -> None:
        """The current stream waits for it; on a CPU the host does."""

        def both() -> None:
            peer = line.ranks[swap.partner]  # torch would look for it among all ranks
            messages = [
                dist.P2POp(call, values.view(torch.uint8), peer, line.group)  # as in `_start`
                for call, values in ((dist.isend, swap.going), (dist.irecv, swap.coming))
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        self._issue(turn, line, both, peer=swap.partner)

    def all_reduce(
        self, out: torch.Tensor, values: torch.Tensor, axis: AxisName, how: Sum, of: str = ""
    ) -> None:
        """The sum of every rank's `values` into every rank's `out`, which may be `values` itself; summed and
        converted like a reduce-scatter. On CUDA it waits on the current stream, not on the host."""
        line = self.mesh.axis(axis)
        _check_flat(values, out)
        _check_sum(values, how)
        if out.numel() != values.numel() or how.add:
            raise AssertionError(f"an all-reduce of {values.numel()} elements into {out.numel()}, {how}")
        self._note("all_reduce", values, axis, how.dtype)
        if line.group is None or not values.numel():
            fold(out, [values], how)
        elif how == Sum(torch.int64) and out.dtype is how.dtype and line.size > FEW[self._way]:
            out.copy_(values)
            turn = self._turn("all_reduce", line, of)
            self._issue(turn, line, dist.all_reduce, out, group=line.group)
        elif values.numel() * values.itemsize <= DIRECT or line.size == 2 or values.numel() % line.size:
            self._all_reduce_directly(out, values, line, how, of)
        else:
            mine = line.slice(out, line.rank)
            with self._unrecorded():
                self._begin_reduce_scatter(mine, values, axis, how, of, ahead=False).wait()
                self.all_gather(out, mine, axis, of)

    def _all_reduce_directly(
        self, out: torch.Tensor, values: torch.Tensor, line: Axis, how: Sum, of: str
    ) -> None:
        """Everything to everybody, and every rank forms the whole sum."""
        turn = self._turn("all_reduce", line, of)
        if self._way == "pairs" and line.size < AT_ONCE:
            with self._at(turn):
                self._pairs.sum(turn, line, out, [values] * line.size, how, ahead=False)()
            return
        received = values.new_empty(values.numel() * line.size)
        arrive = self._start(turn, line, _gather_single, received, values)
        _fold_received(arrive, out, received.view(line.size, -1), how)

    def all_reduce_sum(self, tensor: torch.Tensor, axis: AxisName, of: str = "") -> torch.Tensor:
        """The sum over ranks of a small tensor, in its own dtype, as a new tensor: norm partials, flags."""
        values = tensor.detach().reshape(-1).contiguous()
        total = torch.empty_like(values)
        self.all_reduce(total, values, axis, Sum(tensor.dtype), of)
        return total.view(tensor.shape)

    def read(self, tensor: torch.Tensor) -> list[Any]:
        """The values of a tensor, on the host: what was started before has ended then, also on NCCL."""
        if self._last is None:
            return list(tensor.tolist())
        with self._at(self._last):
            return list(tensor.tolist())

    def broadcast(self, tensor: torch.Tensor, source: int, axis: AxisName) -> None:
        """Overwrite `tensor` with that of rank `source` of the axis. Any contiguous shape."""
        line = self.mesh.axis(axis)
        flat = tensor.detach().view(-1)
        self._note("broadcast", flat, axis, None)
        if line.group is not None and flat.numel():
            moved = flat.view(torch.uint8)  # as in `_start`
            turn = self._turn("broadcast", line, "")
            self._issue(turn, line, dist.broadcast, moved, group=line.group, group_src=source)

    def all_to_all(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: AxisName
    ) -> torch.Tensor:
        """Rows to other ranks: the first `send[0]` of `rows` `[rows, width]` to rank 0 of the axis, and so
        on. What arrives, `receive[0]` from rank 0 first. Every rank knows what comes: `receive` is what the
        others call `send`. Recorded with the elements that this rank gives."""
        arrived, under_way = self.start_all_to_all(rows, send, receive, axis)
        under_way.wait()
        return arrived

    def start_all_to_all(
        self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], axis: AxisName
    ) -> tuple[torch.Tensor, Handle]:
        """The same, under way: what arrives is there when its handle has been waited for."""
        line = self.mesh.axis(axis)
        if rows.dim() != 2 or not rows.is_contiguous() or rows.shape[0] != sum(send):
            raise AssertionError(f"rows {tuple(rows.shape)} for {list(send)}")
        self._note("all_to_all", rows, axis, None)
        if line.group is None:
            return rows.clone(), Handle()
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        going, coming = rows.split(list(send)), arrived.split(list(receive))
        turn = self._turn("all_to_all", line, "")
        if self._way == "pairs":
            with self._at(turn):
                return arrived, self._under_way(turn, self._pairs.swap(turn, line, coming, going))
        call, flat = dist.all_to_all_single, (arrived.view(torch.uint8), rows.view(torch.uint8))
        sizes = list(receive), list(send)
        work = self._issue(turn, line, call, *flat, *sizes, group=line.group, async_op=True)
        return arrived, Handle(lambda: self._issue(turn, line, work.wait))

    def all_gather_object(self, value: T, axis: AxisName = "world") -> list[T]:
        """Every rank's small Python value, in rank order. Pickled; not recorded."""
        line = self.mesh.axis(axis)
        if line.group is None:
            return [value]
        values: list[Any] = [None] * line.size
        turn = self._turn("all_gather_object", line, "")
        numbered = (turn.number, value)
        if line.size > SEVERAL and self._all_have(pickle.dumps(numbered), turn, line):
            return [value] * line.size
        self._issue(turn, line, dist.all_gather_object, values, numbered, group=line.group)
        if len({number for number, _ in values}) > 1:
            counts = ", ".join(
                f"rank {rank} {number}" for rank, (number, _) in zip(line.ranks, values, strict=True)
            )
            raise RankError(
                "ranks",
                "must come to the same collectives in the same order",
                got=f"ranks of axis `{axis}` that have made different numbers of them: {counts}",
                do=EVERYWHERE,
            )
        return [value for _, value in values]

    def _all_have(self, text: bytes, turn: StartedCollective, line: Axis) -> bool:
        """Whether every rank has that text, by 126 bits of a hash; the same answer on every rank."""
        words = [word >> 1 for word in struct.unpack("<QQ", hashlib.sha256(text).digest()[:16])]
        both = torch.tensor([*words, *(-word for word in words)], device=self.mesh.device)

        def read() -> list[int]:
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=line.group)
            return list(both.tolist())

        most = self._issue(turn, line, read)
        return bool(most[:2] == [-least for least in most[2:]])

    def gather_object(self, value: T, axis: AxisName = "world") -> list[T]:
        """Every rank's Python value on rank 0, in rank order; nothing elsewhere. Pickled; not recorded."""
        line = self.mesh.axis(axis)
        if line.group is None:
            return [value]
        values: list[Any] | None = [None] * line.size if line.rank == 0 else None
        turn = self._turn("gather_object", line, "")
        self._issue(turn, line, dist.gather_object, value, values, group=line.group, group_dst=0)
        return values or []

    def broadcast_object(self, value: T | None, source: int, axis: AxisName = "world") -> T:
        """The value of rank `source`; what the others pass is ignored. Pickled; not recorded."""
        line = self.mesh.axis(axis)
        held: list[Any] = [value]
        if line.group is not None:
            turn, send = self._turn("broadcast_object", line, ""), dist.broadcast_object_list
            self._issue(turn, line, send, held, group=line.group, group_src=source)
        return held[0]

    def barrier(self, axis: AxisName = "world") -> None:
        """Return when every rank of the axis is here. Not recorded."""
        line = self.mesh.axis(axis)
        if line.group is not None:
            self._issue(self._turn("barrier", line, ""), line, dist.barrier, group=line.group)

    def agree(self, digest: str, rows: Callable[[], Sequence[str]]) -> None:
        """Raise on every rank unless all have the same digest. Only two ranks that differ write out their
        `rows`, whose first difference the error shows."""
        digests = self.all_gather_object(digest)
        other = next(
            (rank for rank, digest_of_rank in enumerate(digests) if digest_of_rank != digests[0]), None
        )
        if other is None:
            return
        mine = list(rows()) if self.mesh.rank() in (0, other) else None
        raise _difference(other, self.broadcast_object(mine, 0), self.broadcast_object(mine, other))

    def release(self) -> None:
        """Let go of the memory that is kept between reductions."""
        self._pairs.release()

    @property
    def _way(self) -> Literal["pairs", "native"]:
        """Which calls are made, wherever the messages lie."""
        return "native" if self.carrier == "native" else "pairs"

    # --- one collective ---------------------------------------------------------------------------------

    def _turn(self, op: str, line: Axis, of: str) -> StartedCollective:
        self._last = line.trail.begin(op, of)
        return self._last

    def _under_way(self, turn: StartedCollective, finish: Callable[[], None]) -> Handle:
        def wait() -> None:
            with self._at(turn):
                finish()

        return Handle(wait)

    def _issue(
        self,
        turn: StartedCollective,
        line: Axis,
        call: Callable[..., Any],
        *args: Any,
        peer: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """`peer` is the rank that is waited for, where it is one."""
        with self._at(turn):
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                raise missing(turn.op, line, error, peer) from error

    def _start(
        self,
        turn: StartedCollective,
        line: Axis,
        call: Callable[..., Any],
        out: torch.Tensor,
        values: torch.Tensor,
        *,
        bytewise: bool = True,
    ) -> Callable[[], None]:
        """Returns what waits for it: nothing where the device goes on beside the host, for there the current
        stream does."""
        if bytewise:  # nothing is computed on the way, and no backend knows every dtype
            out, values = out.view(torch.uint8), values.view(torch.uint8)
        beside = not self.mesh.asynchronous
        work = self._issue(turn, line, call, out, values, group=line.group, async_op=beside)
        return (lambda: self._issue(turn, line, work.wait)) if beside else _nothing

    def _note(self, op: Op, tensor: torch.Tensor, axis: AxisName, sum_dtype: torch.dtype | None) -> None:
        if not self._logs:
            return
        total = None if sum_dtype is None else _name(sum_dtype)
        entry = Recorded(op, _name(tensor.dtype), tensor.numel(), axis, total)
        for log in self._logs:
            log.append(entry)

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """For the parts that an operation is made of."""
        logs, self._logs = self._logs, []
        try:
            yield
        finally:
            self._logs = logs


def _nothing() -> None:
    """What there is to wait for where the device does."""


def _is_the_sum(out: torch.Tensor, full: torch.Tensor, how: Sum) -> bool:
    """Whether what a carrier forms is all there is to do, and may be written where it belongs."""
    apart = out.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
    return apart and out.dtype is full.dtype and how.divisor == 1.0 and not how.add


def _fold_received(arrive: Callable[[], None], out: torch.Tensor, parts: torch.Tensor, how: Sum) -> None:
    arrive()
    fold(out, parts, how)


def _cast(shard: torch.Tensor, out: torch.Tensor, line: Axis) -> torch.Tensor:
    """A slice in the dtype of `out`; where that is another one, it is in its place there."""
    if shard.dtype is out.dtype:
        return shard
    place = line.slice(out, line.rank)
    _copy(place, shard)
    return place


@torch.no_grad()
def _copy(place: torch.Tensor, shard: torch.Tensor) -> None:
    if place.data_ptr() != shard.data_ptr():
        place.copy_(shard)


def _difference(other: int, here: Sequence[str], there: Sequence[str]) -> RankError:
    """What two ranks whose digests differ do not agree on."""
    got = f"different ones on ranks 0 and {other}, though their {len(here)} rows agree"
    for number, (mine, theirs) in enumerate(itertools.zip_longest(here, there, fillvalue="nothing")):
        if mine != theirs:
            got = f"different ones from row {number} on: {mine} on rank 0, {theirs} on rank {other}"
            break
    do = "Give every rank the same config, model and world size."
    return RankError("plan", "must be the same on every rank", got=got, do=do)


def _check_flat(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise AssertionError(f"a collective moves flat buffers, not {tuple(tensor.shape)}")


def _check_slices(full: torch.Tensor, shard: torch.Tensor, line: Axis) -> None:
    count, ranks = shard.numel(), line.size
    if shard.shape != (count,) or full.shape != (count * ranks,):
        raise AssertionError(f"{ranks} slices of {tuple(shard.shape)} for {tuple(full.shape)}")
    if not (full.is_contiguous() and shard.is_contiguous()):
        _check_flat(full, shard)


def _check_sum(values: torch.Tensor, how: Sum) -> None:
    if values.dtype is not how.dtype and torch.promote_types(values.dtype, how.dtype) is not how.dtype:
        raise AssertionError(f"a sum in {how.dtype} would round values that travel in {values.dtype}")


def _name(dtype: torch.dtype) -> DType:
    known = from_torch(dtype)
    if known is None:
        raise AssertionError(f"{dtype} has no name in `dtypes`")
    return known
