"""Measure the bytes of objects, tensors and checkpoint files on 8 to 16384 ranks.

    python bench/flat.py
    python bench/flat.py --ranks 8,4096

Rank 0 of so many over torch's fake process group, stage 3, a decoder of small blocks, after three steps.
Columns are KiB of Python objects that are still held, by the package whose code made them, as `tracemalloc`
counts; then the plan's KiB of this rank's storage, masters and moments, and of what is gathered for a step:
shares, and padding.

A checkpoint is written from its plan, with everything but the values: `for all` is KiB of the files that are
there once, and `description` of what rank 0 writes beside its own. Rank 0 then looks up all that it reads, on
as many ranks and on half of them: the descriptions that it opens, seconds of one core, and the most MiB that
Python held. `entries` is what DCP's metadata would have, one for each run of elements of one tensor in one
rank's file. The second table is of DeepSeek-V3, planned from its shapes.
"""

from __future__ import annotations

import argparse
import bisect
import gc
import multiprocessing
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepseek_v3_layout
import host
import torch
import torch.distributed as dist
from result import Result, flags

from zerodrift import cost, initialize, make_plan
from zerodrift.checkpoint.manifest import (
    NO_SUMS,
    Chunk,
    Description,
    File,
    Manifest,
    SavedParameter,
    description_file,
    rank_files,
    state_file,
    tensors_file,
    write_description,
    write_entries,
    write_manifest,
    write_plan,
)
from zerodrift.checkpoint.tensors import CheckpointReader, holders, moment_key, weight_key
from zerodrift.comm import collectives

ROOMS = ("plan", "comm", "engine", "optim", "io", "torch.distributed")
CONFIG = {
    "precision": {"mode": "fp32"},
    "zero_optimization": {"stage": 3},
    "sharding": {"units": ["layers.*"]},  # however small: segments alike for any number of ranks
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
}
MOMENTS = ("exp_avg", "exp_avg_sq")
SAVE = "step-00000001@01234567"


def room_of(filename: str) -> str:
    """Return the package of a file."""
    for home, prefix in (("zerodrift", ""), ("torch/distributed", "torch.distributed")):
        _, found, inside = filename.rpartition(f"/{home}/")
        if found:
            return prefix or inside.partition("/")[0].removesuffix(".py")
    return "other"


def bytes_by_room() -> Counter[str]:
    """Return the bytes that are traced, by room."""
    gc.collect()
    bytes_of: Counter[str] = Counter()
    for statistic in tracemalloc.take_snapshot().statistics("filename"):
        bytes_of[room_of(statistic.traceback[0].filename)] += statistic.size
    return bytes_of


def tensors_of(engine: Any) -> tuple[int, int]:
    """Return the bytes at rest, and of what is gathered for a step."""
    bill = cost(engine.plan)
    return bill.rest.total, bill.peak.gathered


# --- a checkpoint -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metadata:
    """Bytes of a checkpoint beside its values, and the cost of a lookup."""

    for_all: int
    description: int
    opened: int
    seconds: float
    peak: int
    opened_on_half: int
    entries: int


def runs(plan: Any, rank: int, ranks: int) -> Iterator[tuple[Any, int, int]]:
    """Yield (row, first element, last) of each parameter of which this rank has a part."""
    for segment in plan.segments:
        size = segment.padded // plan.slices(segment)
        low, high = (
            size * plan.slices(segment) * rank // ranks,
            size * plan.slices(segment) * (rank + 1) // ranks,
        )
        rows = segment.rows
        first = bisect.bisect_right(rows, low, key=lambda index: plan.rows[index].offset) - 1
        last = bisect.bisect_left(rows, high, key=lambda index: plan.rows[index].offset)
        for row in (plan.rows[index] for index in rows[max(first, 0) : last]):
            start, stop = max(low - row.offset, 0), min(high - row.offset, row.numel)
            if start < stop:
                yield row, start, stop


def describe(folder: Path, plan: Any, rank: int) -> None:
    """Write the description of a rank's file, without the file."""
    chunks, offset = [], 0
    for row, start, stop in runs(plan, rank, plan.mesh.world):
        for key in (weight_key(row.name), *(moment_key(moment, row.name) for moment in MOMENTS)):
            length = 4 * (stop - start) + 1200  # and what torch writes around it
            place = (key, row.numel, start, stop - start, "float32", tensors_file(rank), offset, length)
            chunks.append(Chunk(*place))
            offset += length
    tensors, state = (File(name(rank), offset, "0" * 64) for name in (tensors_file, state_file))
    write_description(folder, Description(SAVE, rank, tensors, state, tuple(chunks)))


def head(plan: Any, files: tuple[File, ...]) -> Manifest:
    world, numel = plan.mesh.world, sum(row.numel for row in plan.rows)
    return Manifest(
        run="0" * 32,
        tag=SAVE.partition("@")[0],
        step=1,
        skipped=0,
        saved="2030-01-02T03:04:05+00:00",
        versions=(),
        source=plan.source,
        mode=plan.policy.mode.value,
        stage=3,
        mesh=plan.mesh,
        digest=plan.digest,
        optimizer="adamw",
        schedule="",
        loss_scale=1.0,
        lr=(1e-4,),
        ranks=world,
        parameters=len(plan.rows),
        elements=numel,
        files=files,
        of_ranks=rank_files(SAVE, world, NO_SUMS),
    )


def measure_lookup(folder: Path, plan: Any, ranks: int) -> tuple[int, float, int]:
    """Return (descriptions opened, seconds, bytes) of rank 0's lookup of all that it reads."""
    mine = list(runs(plan, 0, ranks))
    for rank in {rank for row, start, stop in mine for rank in holders(plan, row.name, start, stop)}:
        if not (folder / description_file(rank)).exists():
            describe(folder, plan, rank)
    entry_of = {row.name: SavedParameter(row.names, row.shape, "fp32", 0, MOMENTS) for row, *_ in mine}
    opened = Counter[str]()
    sys.addaudithook(lambda event, of: opened.update([str(of[0])]) if event == "open" and of else None)

    def look_up() -> None:
        reader = CheckpointReader(folder)
        for row, start, stop in mine:
            reader.check(entry_of[row.name], start, stop)

    began = time.process_time()
    look_up()
    taken = time.process_time() - began
    opened.clear()
    gc.collect()
    tracemalloc.start()
    look_up()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    names = [Path(path).name for path in opened if path.startswith(str(folder))]
    return sum(name.startswith("rank-") for name in names), taken, peak


def metadata(plan: Any) -> Metadata:
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), plan.mesh.world
        table = [SavedParameter(row.names, row.shape, "fp32", 0, MOMENTS) for row in plan.rows]
        files = (write_entries(folder, table), write_plan(folder, plan.to_json()))
        write_manifest(folder, head(plan, files))
        for_all = sum(path.stat().st_size for path in folder.iterdir())
        opened, seconds, peak = measure_lookup(folder, plan, ranks)
        on_half, *_ = measure_lookup(folder, plan, ranks // 2)
        longest = (folder / description_file(0)).stat().st_size
        cuts = sum(1 for row in plan.rows for _ in holders(plan, row.name, 0, row.numel))
        return Metadata(for_all, longest, opened, seconds, peak, on_half, (1 + len(MOMENTS)) * cuts)


def of_decoder(sizes: list[int], options: argparse.Namespace, queue: Any) -> None:
    for ranks in sizes:
        queue.put(metadata(make_plan(CONFIG, host.model(options), ranks)))


def of_deepseek(sizes: list[int], queue: Any) -> None:
    config = {"precision": {"mode": "bf16"}, "zero_optimization": {"stage": 3}}
    with tempfile.TemporaryDirectory() as folder:
        deepseek_v3_layout.write(folder)
        for ranks in sizes:
            queue.put(metadata(make_plan(config, folder, ranks)))


# --- an engine ----------------------------------------------------------------------------------------------


def like_gpus() -> None:
    """Use the carrier of GPUs, and ranks that all hold the same, for the rest of this process."""
    made = collectives.Collectives.__init__
    carried = lambda self, mesh, _=None: made(self, mesh, "native")  # noqa: E731
    collectives.Collectives.__init__ = carried  # type: ignore[method-assign]
    dist.all_reduce = host.of_all(dist.all_reduce)  # type: ignore[assignment]


def first_measured(ranks: int, options: argparse.Namespace, queue: Any) -> None:
    like_gpus()
    measured(ranks, options, queue)


def measured(ranks: int, options: argparse.Namespace, queue: Any) -> None:
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    module, tokens = host.model(options), torch.randint(64, (1, 16))
    tracemalloc.start()
    engine = initialize(module, config=CONFIG, device="cpu", quiet=True)
    for _ in range(3):
        engine.backward(engine(tokens))
        engine.step()
    rooms = bytes_by_room()
    tracemalloc.stop()
    queue.put((dict(rooms), tensors_of(engine)))
    engine.destroy()
    dist.destroy_process_group()


def launch(target: Any, *arguments: Any, answers: int = 1) -> Iterator[Any]:
    """Run a function in a process of its own and yield its answers."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, queue))
    process.start()
    for _ in range(answers):
        while queue.empty() and process.is_alive():
            process.join(0.1)
        if queue.empty():
            sys.exit(f"{target.__name__}{arguments}: the process ended without an answer")
        yield queue.get()
    process.join()


def show(result: Result, title: str, sizes: list[int], found: Iterable[Metadata]) -> None:
    columns = {
        "ranks": ",",
        "for all": ",.0f",
        "description": ",.1f",
        "opened": ",",
        "s": ".2f",
        "MiB": ".1f",
    }
    table = result.table({**columns, "opened on half": ",", "entries": ","}, title)
    for ranks, of in zip(sizes, found, strict=True):
        kib = of.for_all / 1024, of.description / 1024
        table.row(ranks, *kib, of.opened, of.seconds, of.peak / 2**20, of.opened_on_half, of.entries)


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
    sizes = [int(ranks) for ranks in options.ranks.split(",")]
    for ranks in sizes:
        ((rooms, tensors),) = launch(first_measured, ranks, options)
        others = sum(rooms.values()) - sum(rooms.get(name, 0) for name in ROOMS)
        held = [*(rooms.get(name, 0) for name in ROOMS), others, *tensors]
        table.row(ranks, *(size / 1024 for size in held))
    found = launch(of_decoder, sizes, options, answers=len(sizes))
    show(result, "checkpoint", sizes, found)
    found = launch(of_deepseek, sizes, answers=len(sizes))
    show(result, "checkpoint of DeepSeek-V3, 671B", sizes, found)
    result.save(options.save)


if __name__ == "__main__":
    main()
