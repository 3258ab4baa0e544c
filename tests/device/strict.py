"""A process group for the stand-in device that is as strict as NCCL, carried by gloo.

Operations run in streams: a collective waits for the stream that it was called on, and `wait` makes the current stream
wait for it, never the host. Every rank sends what it is about to do before it does it, so ranks that issue different
operations, sizes or dtypes on one communicator get an error that names both, where NCCL would hang or mix values.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device.standin import NAME, accesses, install

ALIGNED = 16
"""Bytes: what NCCL wants the addresses of buffers to be a multiple of, for its fastest path."""

TEXT = 96
"""Bytes of the words for an operation."""

_CARRIED = frozenset({torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64, torch.bfloat16})
"""What NCCL carries, without fp8, which it has since 2.24 on some devices only."""

_SUMMED = _CARRIED


class StrictError(RuntimeError):
    """An operation that NCCL would refuse, mix up, or wait for without end."""


class StreamWork(dist.Work):
    """An operation in a stream. `wait` makes the current stream wait for it."""

    def __init__(self, event: torch.Event | None, held: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._held = event, list(held)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._held.clear()
        return True

    def is_completed(self) -> bool:
        return True


class _Sliced:
    """An all-reduce of which one slice is wanted."""

    def __init__(self, work: dist.Work, out: torch.Tensor, part: torch.Tensor) -> None:
        self._work, self._out, self._part = work, out, part

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._out.view(-1).copy_(self._part)


class _Awaited:
    """A message of gloo, which only knows that it is over where somebody waits."""

    def __init__(self, work: dist.Work) -> None:
        self._waits = threading.Thread(target=work.wait, daemon=True)
        self._waits.start()

    def is_completed(self) -> bool:
        return not self._waits.is_alive()

    def wait(self) -> None:
        self._waits.join()


class StrictGroup(dist.ProcessGroup):
    """One communicator."""

    _numbers = itertools.count()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group_store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._device = install()
        self._stream = torch.Stream(torch.device(NAME, torch.accelerator.current_device_index()))
        self._name = f"communicator {next(self._numbers)}"
        self._issued = self._over = 0

    def getBackendName(self) -> str:  # noqa: N802
        return "strict"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    @property
    def group_name(self) -> str:
        return self._group_name

    def shutdown(self) -> None:
        """End this communicator: everything that was issued is over."""
        self._device.run()

    def get_group_store(self) -> dist.Store:
        return self._group_store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    # --- collectives ---------------------------------------------------------------------------------------

    def _allgather_base(self, out: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        self._need(out.numel() == shard.numel() * self.size() and out.dtype is shard.dtype, "all-gather", out, shard)
        return self._collective("all-gather", [shard], [out], opts, lambda o, s: self._gloo._allgather_base(o[0], s[0]))

    def _reduce_scatter_base(self, out: torch.Tensor, full: torch.Tensor, opts: Any = None) -> dist.Work:
        self._need(full.numel() == out.numel() * self.size() and out.dtype is full.dtype, "reduce-scatter", out, full)
        return self._collective("reduce-scatter", [full], [out], opts, self._sum_slices)

    def _sum_slices(self, outs: list[torch.Tensor], fulls: list[torch.Tensor]) -> _Sliced:
        # gloo's own reduce-scatter is only over when the host waits for it.
        full = fulls[0].clone()
        return _Sliced(self._gloo.allreduce([full]), outs[0], full.view(self.size(), -1)[self.rank()])

    # torch 2.13 gave these their new names.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def alltoall_base(
        self, out: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> dist.Work:
        return self._collective(
            "all-to-all", [rows], [out], opts, lambda o, r: self._gloo.alltoall_base(o[0], r[0], receive, send), equal=False
        )

    all_to_all_single = alltoall_base

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.AllreduceOptions()
        given.reduceOp = opts.reduceOp
        return self._collective("all-reduce", tensors, tensors, opts, lambda o, s: self._gloo.allreduce(o, given))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.BroadcastOptions()
        given.rootRank, given.rootTensor = opts.rootRank, opts.rootTensor
        reads = tensors if self.rank() == opts.rootRank else []
        return self._collective("broadcast", reads, tensors, opts, lambda o, s: self._gloo.broadcast(o, given))

    def allgather(self, outs: list[list[torch.Tensor]], shards: list[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._collective("all-gather", shards, outs[0], opts, lambda o, s: self._gloo.allgather([o], s))

    def gather(self, outs: list[list[torch.Tensor]], values: list[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.GatherOptions()
        given.rootRank = opts.rootRank
        targets = outs[0] if outs else []
        return self._collective(
            "gather", values, targets, opts, lambda o, s: self._gloo.gather([o] if o else [], s, given), equal=False
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        one = torch.zeros(1, device=torch.device(NAME, torch.accelerator.current_device_index()))
        work = self.allreduce([one], dist.AllreduceOptions())
        work.wait()
        torch.accelerator.current_stream().synchronize()
        return work

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        return self._message(tensors, [], lambda outs, values: _Awaited(self._gloo.send(values, to, tag)))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        return self._message([], tensors, lambda outs, values: _Awaited(self._gloo.recv(outs, source, tag)))

    def _message(self, reads: list[torch.Tensor], writes: list[torch.Tensor], begin: Callable[..., dist.Work]) -> dist.Work:
        self._check("message", [*reads, *writes])
        stream = torch.Stream(self._stream.device)
        return self._issue("message", reads, writes, stream, begin, words=None)

    # --- what all have in common ---------------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        opts: Any,
        begin: Callable[..., dist.Work],
        *,
        equal: bool = True,
    ) -> dist.Work:
        self._check(name, [*reads, *writes])
        shown = (reads or writes)[0]
        words = f"{name} of {shown.numel() if equal else 'any number of'} {str(shown.dtype).removeprefix('torch.')}"
        if equal and name == "broadcast":
            words = f"broadcast of {writes[0].numel()} {str(writes[0].dtype).removeprefix('torch.')}"
        stream = self._stream if getattr(opts, "asyncOp", True) else torch.accelerator.current_stream()
        return self._issue(name, reads, writes, stream, begin, words)

    def _issue(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        stream: torch.Stream,
        begin: Callable[..., dist.Work],
        words: str | None,
    ) -> dist.Work:
        """Put an operation into a stream. It is over when the other ranks have come to it."""
        current = torch.accelerator.current_stream()
        if stream != current:
            stream.wait_stream(current)
        view = self._device.native.host_view
        values, outs = [view(tensor) for tensor in reads], [view(tensor) for tensor in writes]
        number = self._issued
        self._issued += words is not None
        under_way: list[Any] = []
        said: list[torch.Tensor] = []

        def start() -> bool:
            if words is not None and number != self._over:
                return False  # NCCL keeps the order of the calls, whatever their streams
            if not under_way:
                if words is None:
                    under_way.append(begin(outs, values))
                else:
                    said.append(_text(f"{number}: {words}"))
                    said.append(torch.empty(self.size() * TEXT, dtype=torch.uint8))
                    under_way.append(self._gloo._allgather_base(said[1], said[0]))
            if not under_way[-1].is_completed():
                return False
            under_way[-1].wait()
            if words is not None and len(under_way) == 1:
                self._compare([bytes(part).rstrip(b" ").decode() for part in said[1].view(self.size(), TEXT).tolist()])
                under_way.append(begin(outs, values))
                return False
            self._over += words is not None
            return True

        ranges = [*accesses(reads, False), *accesses(writes, True)]
        self._device.launch(stream.stream_id, f"{name} of {self._name}", ranges, start)
        self._device.counts["collectives"] += 1
        if stream == current:
            return StreamWork(None, ())
        return StreamWork(stream.record_event(), [*reads, *writes])

    def _compare(self, texts: list[str]) -> None:
        if len(set(texts)) > 1:
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))
            raise StrictError(f"{self._name}: all ranks must issue the same operations in the same order; got {each}")

    def _check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            wrong = (
                f"a tensor on {tensor.device}"
                if tensor.device.type != NAME
                else "a tensor that is not contiguous"
                if not tensor.is_contiguous()
                else f"{tensor.dtype}"
                if tensor.dtype not in _CARRIED and tensor.dtype is not torch.bool
                else ""
            )
            if wrong:
                raise StrictError(f"{self._name}: {name} of {wrong}, which NCCL does not carry")

    def _need(self, holds: bool, name: str, out: torch.Tensor, values: torch.Tensor) -> None:
        if not holds:
            raise StrictError(
                f"{self._name}: {name} from {values.numel()} {values.dtype} to {out.numel()} {out.dtype} on {self.size()} ranks"
            )


def _text(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode().ljust(TEXT)[:TEXT]), dtype=torch.uint8)


def register() -> None:
    """Make `strict` the backend of the stand-in device."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend("strict", StrictGroup, devices=[NAME])
