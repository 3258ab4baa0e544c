"""Count messages, bytes, buffers and host time of one reduction in three orders, on 2 to 4096 ranks.

    python bench/order_at_scale.py
    python bench/order_at_scale.py --ranks 64,512 --numel 4194304

A reduce-scatter as on NCCL, over torch's fake process group: this is rank 0 of so many, every call is made,
and nothing arrives. So what is sent and to whom is counted, what is allocated is measured, and so is the time
in which the host issues the calls and the additions of one reduction; of the network there is no figure. What
`native` sends and needs is up to NCCL. Bytes are shares of the segment, which is as large on any number of
ranks; `afar` are those that leave a machine of 8 ranks.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

from zerodrift.comm import native
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import start
from zerodrift.mesh import MeshShape

ORDERS = ("rank", "tree", "native")
MACHINE = 8


class MessageLog:
    """A log of the messages that a rank sends: (to, bytes) of each."""

    def __init__(self, ranks: int) -> None:
        self.messages: list[tuple[int, int]] = []
        self._ranks = ranks

    def __enter__(self) -> Self:
        self._calls = dist.all_to_all_single, native.exchange
        dist.all_to_all_single = self._all_to_all  # type: ignore[assignment]
        native.exchange = self._exchange
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single, native.exchange = self._calls

    def _all_to_all(self, out: torch.Tensor, values: torch.Tensor, **rest: Any) -> Any:
        self.messages += [(rank, values.nbytes // self._ranks) for rank in range(1, self._ranks)]
        return self._calls[0](out, values, **rest)

    def _exchange(self, group: Any, partner: int, out: torch.Tensor, into: torch.Tensor) -> None:
        self.messages.append((partner, out.nbytes))
        self._calls[1](group, partner, out, into)


class AllocationPeak(TorchDispatchMode):
    """The most bytes that were allocated inside the mode at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if "empty" in func.name() and isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, storage.nbytes())
        return found

    def _free(self, size: int) -> None:
        self._now -= size


def timed(run: Callable[[], None], rounds: int) -> float:
    """Return the milliseconds of the fastest round."""
    times = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        run()
        if number:
            times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def measure(ranks: int, numel: int, order: Any, rounds: int) -> tuple[MessageLog, float, float]:
    """Return the messages, the share of the segment that is allocated, and milliseconds."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    comm = Collectives(start(MeshShape(shard=ranks), device="cpu"), "native")
    full, out = torch.zeros(numel), torch.zeros(numel // ranks)
    how = Sum(torch.float32, order=order)

    def reduce() -> None:
        comm.start_reduce_scatter(out, full, "shard", how).wait()

    with MessageLog(ranks) as sent:
        reduce()
    with AllocationPeak() as allocated:
        reduce()
    took = timed(reduce, rounds)
    comm.mesh.stop()
    dist.destroy_process_group()
    return sent, allocated.peak / full.nbytes, took


def row(ranks: int, numel: int, rounds: int) -> list[float]:
    found = {order: measure(ranks, numel, order, rounds) for order in ORDERS}
    cells: list[float] = [ranks]
    for order in ORDERS[:2]:
        sent, room, _ = found[order]
        total = sum(size for _, size in sent.messages)
        afar = sum(size for to, size in sent.messages if to >= MACHINE)
        cells += [len(sent.messages), total / (4 * numel), afar / (4 * numel), room]
    return [*cells, *(found[order][2] for order in ORDERS)]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", default=",".join(str(2**bits) for bits in range(1, 13)))
    parser.add_argument("--numel", type=int, default=1 << 18, help="elements of the segment, fp32")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    title = f"One reduction of {options.numel:,} fp32 elements, rank 0 of so many over the fake group"
    result = Result.begin(title, options)
    columns = {"ranks": ""}
    for order in ORDERS[:2]:
        columns[f"{order}: messages"] = ""
        columns |= {f"{order}: {share}": ".3f" for share in ("sent", "afar", "room")}
    table = result.table(columns | {f"{order}: ms": ".2f" for order in ORDERS})
    for ranks in map(int, options.ranks.split(",")):
        table.row(*row(ranks, options.numel, options.rounds))
    result.save(options.save)


if __name__ == "__main__":
    main()
