"""A process group for the stand-in device that is as strict as NCCL; gloo carries the bytes.

A collective waits for the stream that it is called on, and `wait` makes the current stream wait for it,
never the host. Operations of one communicator run in the order of the calls, whatever their streams. Each
rank sends what it is about to do before it does it. Ranks that differ get an error that names both, where
NCCL would hang or mix values. Ranks that wait for each other, through communicators or messages, hang here
too, and the test fails by its time limit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.device.races import lines, stack
from tests.device.standin import NAME, accesses, install

TEXT = 512
"""Bytes of an operation's description."""

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
    """An all-reduce and a slice, because gloo's reduce-scatter ends only where the host waits."""

    def __init__(self, group: dist.ProcessGroupGloo, out: torch.Tensor, full: torch.Tensor) -> None:
        total = full.clone()
        self._work, self._out = group.allreduce([total]), out
        self._slice = total.view(group.size(), -1)[group.rank()]

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        self._out.view(-1).copy_(self._slice)


class _Messages:
    """Messages in flight. NCCL has no tags: those of a pair meet in the order of the calls."""

    def __init__(self, ends: Sequence[Callable[[], None]]) -> None:
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(end,), daemon=True) for end in ends]
        for thread in self._threads:
            thread.start()

    def _run(self, end: Callable[[], None]) -> None:
        try:
            end()
        except BaseException as error:
            self._errors.append(error)

    def is_completed(self) -> bool:
        return bool(self._errors) or not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        if self._errors:
            raise self._errors[0]


@dataclass(frozen=True)
class _End:
    """A rank's end of a message."""

    tensor: torch.Tensor
    peer: int
    sends: bool

    def __str__(self) -> str:
        return f"{'to' if self.sends else 'from'} {self.peer}"


class StrictGroup(dist.ProcessGroup):
    """One communicator."""

    numbers = itertools.count()
    aborted: ClassVar[bool] = False
    """Whether a rank has died. The host gets one error, and all pending operations end as if they had run."""
    _is_aborted = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._device = install()
        self._device.run()  # gloo waits for all ranks, which may wait for what was issued here; streams go on
        self._store, self._gloo = store, dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream(torch.device(NAME, torch.accelerator.current_device_index()))
        self._number, self._name = next(self.numbers), ""
        self._issued = self._over = 0
        place = self._stream.device
        self._pairs: dict[int, torch.Stream] = defaultdict(lambda: torch.Stream(place))
        self._counts: Counter[tuple[int, bool]] = Counter()
        self._coalesced: list[_End] | None = None

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

    @property
    def supports_coalescing(self) -> bool:
        return True

    def get_group_store(self) -> dist.Store:
        return self._store

    def abort(self) -> None:
        """End all pending operations as if they had run, from any thread. Later ones are errors."""
        self._is_aborted = True

    def shutdown(self) -> None:
        """Wait for all pending operations."""
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
        for tensor, splits in ((out, receive), (rows, send)):
            fits = sum(splits) == len(tensor) if splits else len(tensor) % self.size() == 0
            self._need(fits and len(splits) in (0, self.size()) and out.dtype is rows.dtype, out, rows)
        begin = lambda outs, values: self._gloo.alltoall_base(outs[0], values[0], receive, send)  # noqa: E731
        even = [len(rows) // self.size()] * self.size()
        splits = {"send": list(send) or even, "receive": list(receive) or even}
        return self._collective("all-to-all", [rows], [out], opts, begin, splits)

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

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> dist.Work | None:
        return self._message(_End(tensors[0], to, True))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work | None:
        return self._message(_End(tensors[0], source, False))

    def _message(self, end: _End) -> dist.Work | None:
        """Send or receive a message. Single messages of a pair run in order; those between
        `_start_coalescing` and its end run at once, on the stream of collectives."""
        if self._coalesced is None:
            return self._exchange([end], self._pairs[end.peer])
        self._coalesced.append(end)
        return None

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        ends, self._coalesced = self._coalesced or [], None
        return self._exchange(ends, self._stream)

    # --- what they have in common ----------------------------------------------------------------------

    def _collective(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        opts: Any,
        begin: Any,
        splits: dict[str, list[int]] | None = None,
    ) -> dist.Work:
        self._check(name, [*reads, *writes])
        words = _words(name, (reads or writes)[0], name in COUNTED, json.dumps(splits) if splits else "")
        stream = self._stream if getattr(opts, "asyncOp", True) else torch.accelerator.current_stream()
        number, self._issued = self._issued, self._issued + 1
        said = _encoded(words)
        heard = torch.zeros(self.size() * TEXT, dtype=torch.uint8, device="cpu")
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
                if difference := self._difference(number, heard):
                    self._meet()
                    raise StrictError(difference)
                stages.append(begin(outs, values))
                return False
            self._over += 1
            return True

        self._device.counts["collectives"] += 1
        return self._put(f"{name} of communicator {self._number}", reads, writes, stream, progress)

    def _exchange(self, ends: Sequence[_End], stream: torch.Stream) -> dist.Work:
        name = f"message {' and '.join(map(str, ends))} on communicator {self._number}"
        self._check("message", [end.tensor for end in ends])
        steps = [self._step(end) for end in ends]
        under_way: list[_Messages] = []

        def progress(outs: list[torch.Tensor], values: list[torch.Tensor]) -> bool:
            if not under_way:
                under_way.append(_Messages(steps))
            if not under_way[0].is_completed():
                return False
            under_way[0].wait()
            return True

        reads, writes = ([end.tensor for end in ends if end.sends is sends] for sends in (True, False))
        return self._put(name, reads, writes, stream, progress)

    def _step(self, end: _End) -> Callable[[], None]:
        """Return a function that carries one message, after both ends have compared their descriptions."""
        number = self._counts[end.peer, end.sends]
        self._counts[end.peer, end.sends] += 1
        view, words = self._device.native.host_view(end.tensor), _words("message", end.tensor)
        ours, theirs = (0, 1) if end.sends else (1, 0)

        def step() -> None:
            said, heard = _encoded(words), torch.zeros(TEXT, dtype=torch.uint8, device="cpu")
            sent = self._gloo.send([said], end.peer, 3 * number + ours)
            self._gloo.recv([heard], end.peer, 3 * number + theirs).wait()
            sent.wait()
            if (other := _decoded(heard)).partition("\n")[0] != words.partition("\n")[0]:
                must = f"both ends of message {number} must be alike"
                raise StrictError(f"{must}; got {_each({self.rank(): words, end.peer: other})}")
            carry = self._gloo.send if end.sends else self._gloo.recv
            carry([view], end.peer, 3 * number + 2).wait()

        return step

    def _put(
        self,
        name: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        stream: torch.Stream,
        progress: Callable[..., bool],
    ) -> dist.Work:
        """Put an operation into a stream, behind the earlier work of the current stream."""
        current = torch.accelerator.current_stream()
        if stream != current:
            stream.wait_stream(current)
        view = self._device.native.host_view
        values, outs = [view(tensor) for tensor in reads], [view(tensor) for tensor in writes]
        ranges = [*accesses(reads, writes=False), *accesses(writes, writes=True)]

        def start() -> bool:
            try:
                return StrictGroup.aborted or self._is_aborted or progress(outs, values)
            except RuntimeError as error:
                StrictGroup.aborted = not isinstance(error, StrictError)
                raise

        self._device.launch(stream.stream_id, name, ranges, start)
        if stream == current:
            return StreamWork(None, (), stream, writes)
        return StreamWork(stream.record_event(), [*reads, *writes], stream, writes)

    def _difference(self, number: int, heard: torch.Tensor) -> str:
        """Describe the difference between the next operations of the ranks; "" if there is none."""
        texts = dict(enumerate(map(_decoded, heard.view(self.size(), TEXT))))
        if len({text.partition("\n")[0] for text in texts.values()}) > 1:
            must = f"all ranks must issue the same operation {number} on communicator {self._number}"
            return f"{must}; got {_each(texts)}"
        rows = [text.split("\n  ")[1] for text in texts.values()]
        given = [json.loads(of) for of in rows if of]
        for sender, receiver in itertools.product(range(len(given)), repeat=2):
            sent, due = given[sender]["send"][receiver], given[receiver]["receive"][sender]
            if sent != due:
                text = f"rank {sender} sends {sent} rows to rank {receiver}, which receives {due}"
                return f"{text}; {_each(texts)}"
        return ""

    def _meet(self) -> None:
        """Wait until all ranks have found a difference, since a rank that leaves closes its connections."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=5)
        with contextlib.suppress(RuntimeError):  # what a rank was to send is not on its way any more
            self._gloo.barrier(options).wait()

    def _check(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if StrictGroup.aborted or self._is_aborted:
            raise RuntimeError(f"communicator {self._number} was aborted, and `{name}` is issued on it")
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


def _words(name: str, tensor: torch.Tensor, counted: bool = True, splits: str = "") -> str:
    """Describe an operation, below it the rows of an exchange, and where it was issued."""
    what = f"{name} of {tensor.numel() if counted else 'rows of'} {str(tensor.dtype)[6:]}"
    return "\n  ".join([what, splits, *lines(stack()[:5])])[:TEXT]


def _encoded(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()[:TEXT].ljust(TEXT, b"\0")), dtype=torch.uint8, device="cpu")


def _decoded(heard: torch.Tensor) -> str:
    return bytes(heard.tolist()).rstrip(b"\0").decode(errors="replace")


def _each(texts: Mapping[int, str]) -> str:
    return ", ".join(f"rank {rank} {text}" for rank, text in sorted(texts.items()))


def _batch_isend_irecv(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Send and receive at once on a strict group too. torch only does on groups of its own class."""
    group = messages[0].group or dist.group.WORLD
    if not isinstance(group, StrictGroup):
        return _original_batch(messages)
    group._start_coalescing(messages[0].tensor.device)
    for each in messages:
        (group.send if each.op is dist.isend else group.recv)([each.tensor], each.group_peer, each.tag)
    return [group._end_coalescing(messages[0].tensor.device)]


_original_batch = dist.batch_isend_irecv


def begin() -> None:
    """Make `strict` the backend of the stand-in device, whose communicators are counted from zero."""
    if "strict" not in dist.Backend.backend_list:
        dist.Backend.register_backend("strict", StrictGroup, devices=[NAME])
    StrictGroup.numbers = itertools.count()
    StrictGroup.aborted = False
    dist.batch_isend_irecv = _batch_isend_irecv
