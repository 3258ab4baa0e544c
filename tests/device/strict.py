"""A process group for the stand-in device that is as strict as NCCL; gloo carries the bytes.

A collective waits for the stream that it is called on, and `wait` makes the current stream wait for it,
never the host. Operations of one communicator run in the order of the calls, whatever their streams. Each
rank sends what it is about to do before it does it. Ranks that differ get an error that names both, where
NCCL would hang or mix values; ranks that wait for each other through two communicators get one that names
what each waits for.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.device.standin import NAME, accesses, install

TEXT = 96
"""Bytes of the words for an operation."""

CARRIED = frozenset(
    {
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""Dtypes that NCCL carries everywhere; fp8 only from 2.24 on, on some devices."""

COUNTED = frozenset({"all-gather", "reduce-scatter", "all-reduce", "broadcast"})
"""Operations for which all ranks give the same number of elements."""


class StrictError(RuntimeError):
    """An operation that NCCL would refuse, mix up, or wait for without end."""


class StreamWork(dist.Work):
    """An operation in a stream. `wait` makes the current stream wait for it."""

    def __init__(
        self,
        event: torch.Event | None,
        held: Sequence[torch.Tensor],
        stream: torch.Stream,
        outs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self._event, self._held, self._stream, self._outs = event, list(held), stream, list(outs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        self._held.clear()
        self._outs.clear()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future whose waiters' streams wait for the operation. Call it before `wait`."""
        made: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[self._stream.device])
        with self._stream:
            made.set_result(self._outs)
        return made


class _SlicedSum:
    """An all-reduce of which a rank keeps its slice: gloo's reduce-scatter ends only where the host waits."""

    def __init__(self, group: dist.ProcessGroupGloo, out: torch.Tensor, full: torch.Tensor) -> None:
        total = full.clone()
        self._work, self._out = group.allreduce([total]), out
        self._slice = total.view(group.size(), -1)[group.rank()]

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._out.view(-1).copy_(self._slice)


class _Message:
    """A message of gloo, which knows that it is over only where somebody waits."""

    def __init__(self, work: dist.Work) -> None:
        self._waits = threading.Thread(target=work.wait, daemon=True)
        self._waits.start()

    def is_completed(self) -> bool:
        return not self._waits.is_alive()

    def wait(self) -> None:
        self._waits.join()


class StrictGroup(dist.ProcessGroup):
    """One communicator."""

    numbers = itertools.count()

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._gloo = store, dist.ProcessGroupGloo(store, rank, size, timeout)
        self._device = install()
        self._stream = torch.Stream(torch.device(NAME, torch.accelerator.current_device_index()))
        self._number, self._name = next(self.numbers), ""
        self._issued = self._over = 0
        self._stalls: list[Any] = []
        if not self._number:
            self._device.on_stall = self._compare_stalls

    # --- what torch asks of a group --------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return "strict"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def _get_backend(self, device: torch.device) -> StrictGroup:
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    def get_group_store(self) -> dist.Store:
        return self._store

    def abort(self) -> None:
        """Forget everything that was issued."""
        self._device.queues.clear()

    def shutdown(self) -> None:
        """Wait for everything that was issued."""
        self._device.run()

    # --- collectives -----------------------------------------------------------------------------------

    def _allgather_base(self, out: torch.Tensor, shard: torch.Tensor, opts: Any = None) -> dist.Work:
        self._need(out.numel() == shard.numel() * self.size() and out.dtype is shard.dtype, out, shard)
        begin = lambda outs, values: self._gloo._allgather_base(outs[0], values[0])  # noqa: E731
        return self._collective("all-gather", [shard], [out], opts, begin)

    def _reduce_scatter_base(self, out: torch.Tensor, full: torch.Tensor, opts: Any = None) -> dist.Work:
        self._need(full.numel() == out.numel() * self.size() and out.dtype is full.dtype, out, full)
        begin = lambda outs, values: _SlicedSum(self._gloo, outs[0], values[0])  # noqa: E731
        return self._collective("reduce-scatter", [full], [out], opts, begin)

    def alltoall_base(
        self, out: torch.Tensor, rows: torch.Tensor, receive: list[int], send: list[int], opts: Any = None
    ) -> dist.Work:
        begin = lambda outs, values: self._gloo.alltoall_base(outs[0], values[0], receive, send)  # noqa: E731
        return self._collective("all-to-all", [rows], [out], opts, begin)

    # torch 2.13 gave these their new names.
    all_gather_single, reduce_scatter_single, all_to_all_single = (
        _allgather_base,
        _reduce_scatter_base,
        alltoall_base,
    )

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.AllreduceOptions()
        given.reduceOp = opts.reduceOp
        begin = lambda outs, values: self._gloo.allreduce(outs, given)  # noqa: E731
        return self._collective("all-reduce", tensors, tensors, opts, begin)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        given = dist.BroadcastOptions()
        given.rootRank, given.rootTensor = opts.rootRank, opts.rootTensor
        begin = lambda outs, values: self._gloo.broadcast(outs, given)  # noqa: E731
        return self._collective("broadcast", tensors, tensors, opts, begin)

    def allgather(
        self, outs: list[list[torch.Tensor]], shards: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        begin = lambda outs, values: self._gloo.allgather([outs], values)  # noqa: E731
        return self._collective("all-gather", shards, outs[0], opts, begin)

    def gather(
        self, outs: list[list[torch.Tensor]], values: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        given = dist.GatherOptions()
        given.rootRank = opts.rootRank
        begin = lambda outs, values: self._gloo.gather([outs] if outs else [], values, given)  # noqa: E731
        return self._collective("gather", values, outs[0] if outs else [], opts, begin)

    def barrier(self, opts: Any = None) -> dist.Work:
        work = self.allreduce([torch.zeros(1, device=self._stream.device)], dist.AllreduceOptions())
        work.wait()
        torch.accelerator.current_stream().synchronize()
        return work

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work:
        self._check("message", tensors)
        begin = lambda outs, values: _Message(self._gloo.send(values, to, tag))  # noqa: E731
        return self._issue(f"message to {to}", tensors, [], torch.Stream(self._stream.device), begin)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        self._check("message", tensors)
        begin = lambda outs, values: _Message(self._gloo.recv(outs, source, tag))  # noqa: E731
        return self._issue(f"message from {source}", [], tensors, torch.Stream(self._stream.device), begin)

    # --- what they have in common ----------------------------------------------------------------------

    def _collective(
        self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], opts: Any, begin: Any
    ) -> dist.Work:
        self._check(name, [*reads, *writes])
        shown = (reads or writes)[0]
        words = f"{name} of {shown.numel() if name in COUNTED else 'rows of'} {str(shown.dtype)[6:]}"
        stream = self._stream if getattr(opts, "asyncOp", True) else torch.accelerator.current_stream()
        number, self._issued = self._issued, self._issued + 1
        said, heard = torch.zeros(TEXT, dtype=torch.uint8), torch.zeros(self.size() * TEXT, dtype=torch.uint8)
        said[: len(words)] = torch.tensor(list(words.encode()))
        stages: list[Any] = []

        def progress(outs: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
            if number != self._over:
                return False
            if not stages:
                stages.append(self._gloo._allgather_base(heard, said))
            if not stages[-1].is_completed():
                return False
            stages[-1].wait()
            if len(stages) == 1:
                self._compare(number, heard)
                stages.append(begin(outs, values))
                return False
            self._over += 1
            return True

        self._device.counts["collectives"] += 1
        return self._put(f"{name} of communicator {self._number}", reads, writes, stream, progress)

    def _issue(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        stream: torch.Stream,
        begin: Any,
    ) -> dist.Work:
        under_way: list[Any] = []

        def progress(outs: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
            if not under_way:
                under_way.append(begin(outs, values))
            if not under_way[0].is_completed():
                return False
            under_way[0].wait()
            return True

        return self._put(f"{name} on communicator {self._number}", reads, writes, stream, progress)

    def _put(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        stream: torch.Stream,
        progress: Callable[..., bool],
    ) -> dist.Work:
        """Put an operation into a stream, behind what the current stream was given."""
        current = torch.accelerator.current_stream()
        if stream != current:
            stream.wait_stream(current)
        view = self._device.native.host_view
        values, outs = [view(tensor) for tensor in reads], [view(tensor) for tensor in writes]
        ranges = [*accesses(reads, writes=False), *accesses(writes, writes=True)]
        self._device.launch(stream.stream_id, name, ranges, lambda: progress(outs, values))
        if stream == current:
            return StreamWork(None, (), stream, writes)
        return StreamWork(stream.record_event(), [*reads, *writes], stream, writes)

    def _compare(self, number: int, heard: torch.Tensor) -> None:
        texts = [bytes(part).rstrip(b"\0").decode() for part in heard.view(self.size(), TEXT).tolist()]
        if len(set(texts)) > 1:
            each = ", ".join(f"rank {rank} {text}" for rank, text in enumerate(texts))
            must = f"all ranks must issue the same operation {number} on communicator {self._number}"
            raise StrictError(f"{must}; got {each}")

    def _check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            problems = {
                f"a tensor on {tensor.device}": tensor.device.type != NAME,
                "a tensor that is not contiguous": not tensor.is_contiguous(),
                f"{tensor.dtype}": tensor.dtype not in CARRIED,
                "an address that its dtype is not aligned to": tensor.data_ptr() % tensor.itemsize != 0,
            }
            if wrong := [problem for problem, holds in problems.items() if holds]:
                raise StrictError(f"NCCL does not carry {wrong[0]}, in an operation `{name}`")

    def _need(self, holds: bool, out: torch.Tensor, values: torch.Tensor) -> None:
        if not holds:
            sizes = f"{values.numel()} {values.dtype} and {out.numel()} {out.dtype}"
            raise StrictError(f"sizes and dtypes must fit {self.size()} ranks; got {sizes}")

    def _compare_stalls(self, waiting: list[str]) -> None:
        """Raise if all ranks have said twice that they wait, and not for the same collective."""
        if any("message" in name for name in waiting):
            return
        keys = [f"strict/stalled/{rank}" for rank in range(self.size())]
        self._store.set(keys[self.rank()], json.dumps([time.time(), waiting]))
        if not self._store.check(keys):
            return
        before, self._stalls = self._stalls, [json.loads(self._store.get(key)) for key in keys]
        pairs = list(zip(before, self._stalls, strict=False))
        still = bool(pairs) and all(old[1] == new[1] and old[0] < new[0] for old, new in pairs)
        if still and len({str(names) for _, names in self._stalls}) > 1:
            each = ", ".join(
                f"rank {rank} in {' and '.join(of)}" for rank, (_, of) in enumerate(self._stalls)
            )
            raise StrictError(f"ranks wait for each other: {each}")


def begin() -> None:
    """Make `strict` the backend of the stand-in device, whose communicators are counted from zero."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend("strict", StrictGroup, devices=[NAME])
    StrictGroup.numbers = itertools.count()
