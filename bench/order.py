"""Time a step in each order of sums: the default, the order of ranks, a requested tree, and the carrier's.

    python bench/order.py                    # 2 and 4 gloo ranks, all stages, 1 and 4 micro-batches
    python bench/order.py --rounds 9 --ranks 2 --modes fp32 --micro-batches 2

All orders have an engine in the same processes, and take turns in rounds. Beside the milliseconds of the
order of ranks stand the medians of the ratios to that within a round, and the ratios of the least
processor time on rank 0, in which no other work on the machine is. `auto is` says which order the default
is. torch's deterministic operations are on in turns too: only a requested tree needs them. One thread
each, fused AdamW.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT
from result import Result, flags
from step import join, launch

ORDERS = ("rank", "auto", "tree", "native")


def engine(options: argparse.Namespace, stage: int, mode: str, micro_batches: int, order: str) -> Any:
    from zerodrift import initialize

    reduce = {"order": order, **({"when": options.when} if options.when else {})}
    config = {
        "precision": {"mode": mode, "reduce": reduce},
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    model = GPT(options.width, options.layers, options.vocabulary)
    return initialize(model, config=config, device="cpu", quiet=True)


Cell = tuple[int, str, int]
"""Stage, mode, micro-batches."""


def timed(
    rank: int, folder: str, options: argparse.Namespace, ranks: int, cells: list[Cell], queue: Any
) -> None:
    join(rank, folder, ranks)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), generator=generator)
    found = [measured(options, cell, tokens) for cell in cells]
    if rank == 0:
        queue.put(found)
    dist.barrier()


def measured(options: argparse.Namespace, cell: Cell, tokens: torch.Tensor) -> dict[str, Any]:
    engines = {order: engine(options, *cell, order) for order in ORDERS}

    def step(order: str) -> None:
        torch.use_deterministic_algorithms(order == "tree")
        for _ in range(cell[-1]):
            engines[order].backward(engines[order](tokens))
            engines[order].step()

    for order in ORDERS:
        step(order), step(order)
    times: dict[str, list[float]] = {order: [] for order in ORDERS}
    spent: dict[str, list[float]] = {order: [] for order in ORDERS}
    for turn in range(options.rounds):
        first = turn % len(ORDERS)
        for order in ORDERS[first:] + ORDERS[:first]:
            dist.barrier()
            start, own = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step(order)
            spent[order].append(time.process_time() - own)
            dist.barrier()
            times[order].append((time.perf_counter() - start) / options.steps)
    default = "tree" if engines["auto"].plan.policy.tree else "rank"
    for each in engines.values():
        each.destroy()
    return {"auto": default, "times": times, "spent": spent}


def _ratios(of: dict[str, list[float]], order: str) -> list[float]:
    return [one / rank for one, rank in zip(of[order], of["rank"], strict=True)]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--modes", default="fp32,bf16")
    parser.add_argument("--when", choices=["last", "every"], help="instead of the stage's")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = f"width {options.width}, {options.layers} layers, {options.batch} x {options.length}"
    result = Result.begin(f"{size}, 1 thread a rank, reduce.when {options.when or 'of the stage'}", options)
    columns = {"ranks": "", "mode": "", "stage": "", "micro-batches": "", "auto is": "", "rank ms": ".1f"}
    columns |= {f"{order} / rank": ".2f" for order in ORDERS[1:]}
    columns |= {f"{order}: processor": ".3f" for order in ORDERS[1:]}
    table = result.table(columns)
    stages, counts = (map(int, text.split(",")) for text in (options.stages, options.micro_batches))
    cells = [
        (stage, mode, count)
        for mode, stage, count in itertools.product(options.modes.split(","), [*stages], [*counts])
    ]
    for ranks in map(int, options.ranks.split(",")):
        for cell, found in zip(cells, launch(timed, options, ranks, cells, ranks=ranks), strict=True):
            _row(table, ranks, cell, found)
    result.save(options.save)


def _row(table: Any, ranks: int, cell: Cell, found: dict[str, Any]) -> None:
    stage, mode, count = cell
    taken = statistics.median(found["times"]["rank"]) * 1e3
    medians = (statistics.median(_ratios(found["times"], order)) for order in ORDERS[1:])
    own = (min(found["spent"][order]) / min(found["spent"]["rank"]) for order in ORDERS[1:])
    table.row(ranks, mode, stage, count, found["auto"], taken, *medians, *own)


if __name__ == "__main__":
    main()
