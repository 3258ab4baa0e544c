"""What holds how many bytes on 8 to 16384 ranks: every room's objects, tensors, and a checkpoint's files.

    python bench/flat.py
    python bench/flat.py --ranks 8,4096

Rank 0 of so many over torch's fake process group, stage 3, a decoder of small blocks, after three steps.
Columns are KiB of Python objects that are still held, by the package whose code made them, as `tracemalloc`
counts; then the plan's KiB of this rank's storage, masters and moments, and of what is gathered for a step:
shares, and padding. `checkpoint` is what a save of all ranks writes beside the values, from the plan: entries
of DCP's metadata, of which rank 0 writes one for each run of elements of one tensor in one rank's file, and
the manifest's lines, two for each rank.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import host
import torch
import torch.distributed as dist
from result import Result, flags

from zerodrift import cost, initialize
from zerodrift.comm import collectives
from zerodrift.io.checkpoint.index import Chunk, write_index

ROOMS = ("plan", "comm", "engine", "optim", "io", "torch.distributed")
MOMENTS = 2
WRITTEN = 512
"""Ranks up to which the metadata is written; above, its entries are counted."""


def room_of(filename: str) -> str:
    """The package that a file is of."""
    for home, prefix in (("zerodrift", ""), ("torch/distributed", "torch.distributed")):
        _, found, inside = filename.rpartition(f"/{home}/")
        if found:
            return prefix or inside.partition("/")[0].removesuffix(".py")
    return "other"


def held() -> Counter[str]:
    """Bytes that are traced, by room."""
    gc.collect()
    bytes_of: Counter[str] = Counter()
    for statistic in tracemalloc.take_snapshot().statistics("filename"):
        bytes_of[room_of(statistic.traceback[0].filename)] += statistic.size
    return bytes_of


def tensors_of(engine: Any) -> tuple[int, int]:
    """Bytes at rest, and of what is gathered for a step."""
    bill = cost(engine.plan)
    return bill.rest.total, bill.peak.gathered


def chunks(plan: Any) -> Iterator[Chunk]:
    """Of a checkpoint: what each rank's file holds of each tensor."""
    for segment in plan.segments:
        ranks = plan.slices(segment)
        size = segment.padded // ranks
        for row in (plan.rows[index] for index in segment.rows):
            end = row.offset + max(row.numel, 1)
            for rank in range(row.offset // size, (end - 1) // size + 1):
                low, high = max(row.offset, rank * size), min(end, (rank + 1) * size)
                for number in range(1 + MOMENTS):
                    key, file, count = f"{row.name}.{number}", f"__{rank}_0.distcp", high - low
                    start = low - row.offset
                    yield Chunk(key, row.numel, start, count, torch.float32, file, 0, 4 * count)


def metadata(plan: Any, ranks: int) -> tuple[int, float | None]:
    """(Entries, KiB of DCP's metadata)."""
    if ranks > WRITTEN:
        return sum(1 for _ in chunks(plan)), None
    every = list(chunks(plan))
    with tempfile.TemporaryDirectory() as folder:
        return len(every), write_index(Path(folder), every).bytes / 1024


def like_gpus() -> None:
    """The carrier of GPUs, and ranks that all hold the same. Of this process, once."""
    made = collectives.Collectives.__init__
    carried = lambda self, mesh, _=None: made(self, mesh, "native")  # noqa: E731
    collectives.Collectives.__init__ = carried  # type: ignore[method-assign]
    dist.all_reduce = host.of_all(dist.all_reduce)  # type: ignore[assignment]


def first_measured(ranks: int, options: argparse.Namespace, queue: Any) -> None:
    like_gpus()
    measured(ranks, options, queue)


def measured(ranks: int, options: argparse.Namespace, queue: Any) -> None:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    config = {
        "precision": {"mode": "fp32"},
        "zero_optimization": {"stage": 3},
        "sharding": {"units": ["layers.*"]},  # however small: segments alike for any number of ranks
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    module, tokens = host.model(options), torch.randint(64, (1, 16))
    tracemalloc.start()
    engine = initialize(module, config=config, device="cpu", quiet=True)
    for _ in range(3):
        engine.backward(engine(tokens))
        engine.step()
    rooms = held()
    tracemalloc.stop()
    queue.put((dict(rooms), tensors_of(engine), metadata(engine.plan, ranks)))
    engine.destroy()
    dist.destroy_process_group()


def launch(ranks: int, options: argparse.Namespace) -> Any:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=first_measured, args=(ranks, options, queue))
    process.start()
    while queue.empty() and process.is_alive():
        process.join(0.1)
    found = None if queue.empty() else queue.get()
    process.join()
    if found is None:
        sys.exit(f"{ranks} ranks: the process ended without an answer")
    return found


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", default="8,64,512,4096,16384")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    title = f"{options.blocks} blocks of width {options.width}, fp32, stage 3; KiB on rank 0"
    result = Result.begin(title, options)
    columns = {name: ".0f" for name in (*ROOMS, "other")}
    table = result.table({"ranks": ",", **columns, "at rest": ".0f", "gathered": ".0f"}, "rooms and tensors")
    saved = []
    for ranks in map(int, options.ranks.split(",")):
        rooms, tensors, entries = launch(ranks, options)
        others = sum(rooms.values()) - sum(rooms.get(name, 0) for name in ROOMS)
        sizes = [*(rooms.get(name, 0) for name in ROOMS), others, *tensors]
        table.row(ranks, *(size / 1024 for size in sizes))
        saved.append((ranks, *entries, 2 * ranks))
    table = result.table({"ranks": ",", "entries": ",", "KiB": ".0f", "lines": ","}, "checkpoint")
    for cells in saved:
        table.row(*cells)
    result.save(options.save)


if __name__ == "__main__":
    main()
