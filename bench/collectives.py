"""Our collectives beside gloo's own, a bare exchange of slices and a memory copy, on ranks of this machine.

    python bench/collectives.py --ranks 2

Every size runs all candidates in turn, round after round, so that a busy machine disturbs them alike. The
figure is the median over rounds of the slowest rank; `x` is the gain over gloo's operation of that name.
Ours adds in rank order in fp32, whatever travels; gloo's adds in the dtype that travels.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from result import Result, flags

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import start
from zerodrift.mesh import MeshShape

MEGABYTES = (0.5, 7.0, 70.0)
DTYPES = (torch.float32, torch.bfloat16)
PEERS = {
    "all_gather": "gloo all_gather",
    "reduce_scatter": "gloo reduce_scatter",
    "reduce_scatter, started": "gloo reduce_scatter",
    "all_reduce": "gloo all_reduce",
}
"""Ours -> the gloo operation that it replaces."""

Candidates = dict[str, Callable[[], object]]


def candidates(comm: Collectives, numel: int, dtype: torch.dtype) -> Candidates:
    """Return one run on this rank by name."""
    line = comm.mesh.axis("shard")
    full, out = torch.randn(numel).to(dtype), torch.zeros(numel, dtype=dtype)
    shard, total = line.slice(full, line.rank).clone(), torch.zeros(numel // line.size)
    reduced, everywhere = torch.zeros_like(shard), torch.zeros(numel)
    how, group = Sum(torch.float32), line.group

    def exchange() -> None:
        """Exchange the slices that any all-to-all must move, without a sum."""
        works = []
        for step in range(1, line.size):
            to, source = (line.rank + step) % line.size, (line.rank - step) % line.size
            works.append(dist.irecv(line.slice(out, source), group=group, group_src=source))
            works.append(dist.isend(line.slice(full, to), group=group, group_dst=to))
        for work in works:
            if work is not None:
                work.wait()

    return {
        "memory copy": lambda: out.copy_(full),
        "bare exchange": exchange,
        "gloo all_gather": lambda: dist.all_gather_into_tensor(out, shard, group=group),
        "all_gather": lambda: comm.all_gather(out, shard, "shard"),
        "gloo reduce_scatter": lambda: dist.reduce_scatter_tensor(reduced, full, group=group),
        "reduce_scatter": lambda: comm.start_reduce_scatter(total, full, "shard", how, ahead=False).wait(),
        "reduce_scatter, started": lambda: comm.start_reduce_scatter(total, full, "shard", how).wait(),
        "gloo all_reduce": lambda: dist.all_reduce(out, group=group),
        "all_reduce": lambda: comm.all_reduce(everywhere, full, "shard", how),
    }


def measure(comm: Collectives, runs: Candidates, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            comm.barrier()
            began = time.perf_counter()
            run()
            if number:  # the first round touches fresh memory
                times[name].append(1e3 * (time.perf_counter() - began))
    everybody = comm.all_gather_object(times)
    slowest = {name: [max(t) for t in zip(*(rank[name] for rank in everybody), strict=True)] for name in runs}
    return {name: statistics.median(values) for name, values in slowest.items()}


def show(result: Result, title: str, found: dict[str, float]) -> None:
    table = result.table({"": "<26", "ms": ".2f", "copies": ".1f", "x": ".1f"}, title)
    for name, milliseconds in found.items():
        gain = found[PEERS[name]] / milliseconds if name in PEERS else None
        table.row(name, milliseconds, milliseconds / found["memory copy"], gain)


def rank_main(rank: int, ranks: int, rounds: int, folder: str, queue: Any) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the peers' functions
    torch.set_num_threads(1)
    store = (Path(folder) / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    comm = Collectives(start(MeshShape(shard=ranks), device="cpu", timeout=60))
    for dtype in DTYPES:
        for size in MEGABYTES:
            numel = int(size * 1e6) // dtype.itemsize // (256 * ranks) * 256 * ranks
            found = measure(comm, candidates(comm, numel, dtype), rounds if size > 10 else 5 * rounds)
            comm.release()
            if rank == 0:
                queue.put((f"{size:g} MB {str(dtype).removeprefix('torch.')}", found))
    comm.mesh.stop()
    dist.destroy_process_group()


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9, help="of 70 MB; smaller sizes run five times more")
    asked = parser.parse_args()
    result = Result.begin(f"{asked.ranks} ranks of one thread", asked)
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            rank_main, (asked.ranks, asked.rounds, folder, queue), nprocs=asked.ranks
        )
    while not queue.empty():
        show(result, *queue.get())
    result.save(asked.save)


if __name__ == "__main__":
    main()
