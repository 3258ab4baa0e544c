"""Collectives by the backend's own calls: the carrier of NCCL, and of gloo where one call beats messages.

`collectives.py` decides which values move, and checks and records it. Calls return a function that waits: on
a CPU for the call, on CUDA for nothing, since the current stream waits already.

On CUDA gathers and reductions each have a stream beside that of the computation, so their casts and additions
run beside the computation too. NCCL keeps the order of the calls on one communicator, whatever their streams.

Invariant: the backend moves values, and forms sums of the order `native`; `fold` forms all other sums.

[Note: buffers on streams] A buffer belongs to the stream that it was allocated on. As soon as the host drops
it, its memory is free for other work of that stream. The buffers of a collective are allocated on the
computation's stream, so the handle holds them until that stream has been told to wait for the collective:
later users of the memory come later on the same stream. Memory that is allocated inside of a stream is used
there alone. So no `record_stream` is needed, which would delay the reuse of memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerodrift.comm.fold import Sum, fold, halving_exchanges
from zerodrift.comm.mesh import Mesh, StartedCollective


class NativeCalls:
    """Carries collectives by calls of torch.distributed."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def call(
        self,
        turn: StartedCollective,
        function: Callable[..., Any],
        *args: Any,
        partner: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function of torch.distributed; its errors name `partner`, or all other ranks of the axis."""
        with self._mesh.at(turn):
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                raise turn.line.missing(turn.op, error, partner) from error

    def _start(
        self, turn: StartedCollective, function: Callable[..., Any], out: Tensor, values: Tensor
    ) -> Callable[[], None]:
        host_waits = not self._mesh.asynchronous
        work = self.call(turn, function, out, values, group=turn.line.group, async_op=host_waits)
        return (lambda: self.call(turn, work.wait)) if host_waits else lambda: None

    def gather(self, turn: StartedCollective, out: Tensor, shard: Tensor) -> Callable[[], None]:
        """Gather every rank's slice into `out`."""
        # As bytes, since nothing is computed on the way and no backend knows every dtype.
        return self._start(turn, dist.all_gather_single, out.view(torch.uint8), shard.view(torch.uint8))

    def swap(
        self, turn: StartedCollective, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]
    ) -> Callable[[], None]:
        """Exchange rows between all ranks. On CUDA the current stream waits when the result is called."""
        function, data = dist.all_to_all_single, (out.view(torch.uint8), rows.view(torch.uint8))
        sizes = list(receive), list(send)
        work = self.call(turn, function, *data, *sizes, group=turn.line.group, async_op=True)
        return lambda: self.call(turn, work.wait)

    def sum(
        self, turn: StartedCollective, out: Tensor, full: Tensor, how: Sum, *, ahead: bool
    ) -> Callable[[], None]:
        """Sum this rank's slices of every rank's `full` into `out`, or all of it if `out` is as long.

        The backend forms sums of slices in the order `native`.
        """
        if out.numel() == full.numel():
            parts = full.new_empty(turn.line.size, full.numel())
            arrive = self.gather(turn, parts.view(-1), full)
        elif how.order == "native" and full.dtype is how.dtype:
            is_separate = out.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
            if is_separate and out.dtype is full.dtype and not how.add:
                return self._start(turn, dist.reduce_scatter_single, out, full)
            parts = torch.empty_like(out, dtype=full.dtype)[None]
            arrive = self._start(turn, dist.reduce_scatter_single, parts[0], full)
        else:
            received = torch.empty_like(full)
            parts = received.view(turn.line.size, -1)
            data = received.view(torch.uint8), full.view(torch.uint8)
            arrive = self._start(turn, dist.all_to_all_single, *data)

        def finish() -> None:
            arrive()
            fold(out, parts, how, scratch=True)

        return finish

    @torch.no_grad()
    def halve(self, turn: StartedCollective, out: Tensor, full: Tensor, how: Sum) -> Callable[[], None]:
        """Sum by recursive halving. All calls are issued here, and on a CPU are over on return."""
        line = turn.line
        for each in halving_exchanges(full, line.rank, line.size, torch.empty_like(full)):
            ends = line.group, each.partner, each.outgoing, each.incoming
            self.call(turn, exchange, *ends, partner=each.partner)
        fold(out, (each.incoming, each.kept), how, each.incoming)
        return lambda: None


def exchange(group: Any, partner: int, outgoing: Tensor, incoming: Tensor) -> None:
    """Send and receive at once, and wait for both: the current stream does, or on a CPU the host.

    The calls are those of `torch.distributed.batch_isend_irecv`, which makes 60 to 80 more of the host, and
    are private in torch (2.13 to 2.15).
    """
    device = outgoing.device
    is_one_call = group._get_backend(device).supports_coalescing
    if is_one_call:
        group._start_coalescing(device)
    # As bytes, since no backend knows every dtype.
    works = [
        group.send([outgoing.view(torch.uint8)], partner, 0),
        group.recv([incoming.view(torch.uint8)], partner, 0),
    ]
    if is_one_call:
        works = [group._end_coalescing(device)]
    for work in works:
        work.wait()


class CommunicationStream:
    """One stream beside that of the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream(device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream, after all work that the computation was given before."""
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            yield

    def wait_for_work(self, *buffers: Tensor) -> Callable[[], None]:
        """Return a function that makes the computation wait for all work in the stream now.

        It holds the buffers until then; see [Note: buffers on streams].
        """
        done, held = self._stream.record_event(), list(buffers)

        def wait() -> None:
            self._streams.current_stream(self._device).wait_event(done)
            held.clear()

        return wait
