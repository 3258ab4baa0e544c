"""A step whose sums go by the tree over micro-batches, beside one in the order of ranks: time and bytes.

    python bench/order.py                    # two gloo ranks, stages 0 and 3, 1 and 4 micro-batches
    python bench/order.py --rounds 9 --micro-batches 8

Both orders have an engine in the same two processes, and take turns in rounds; what is printed is the median
of the ratios within a round, and the middle half of them; and the same median of processor time on rank 0,
in which no other work on the machine is. torch's deterministic operations are on in turns too: only the tree
asks for them. One thread each, fused AdamW, fp32. Bytes are counted by the loopback device, both ranks
together. Needs Linux.
"""

from __future__ import annotations

import argparse
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
from step import join, launch, sent_bytes

ORDERS = ("rank", "tree")


def engine(options: argparse.Namespace, stage: int, micro_batches: int, order: str) -> Any:
    from zerodrift import initialize

    config = {
        "precision": {"mode": "fp32", "reduce": {"order": order, "when": options.when}},
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    model = GPT(options.width, options.layers, options.vocabulary)
    return initialize(model, config=config, device="cpu", quiet=True)


def timed(rank: int, folder: str, options: argparse.Namespace, stage: int, count: int, queue: Any) -> None:
    join(rank, folder)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), generator=generator)
    engines = {order: engine(options, stage, count, order) for order in ORDERS}

    def step(order: str) -> None:
        torch.use_deterministic_algorithms(order == "tree")
        for _ in range(count):
            engines[order].backward(engines[order](tokens))
            engines[order].step()

    for order in ORDERS:
        step(order), step(order)
    times: dict[str, list[float]] = {order: [] for order in ORDERS}
    spent: dict[str, list[float]] = {order: [] for order in ORDERS}
    wires: dict[str, list[int]] = {order: [] for order in ORDERS}
    for turn in range(options.rounds):
        for order in ORDERS if turn % 2 else reversed(ORDERS):
            dist.barrier()
            wire, start, own = sent_bytes(), time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step(order)
            spent[order].append(time.process_time() - own)
            dist.barrier()
            times[order].append((time.perf_counter() - start) / options.steps)
            wires[order].append((sent_bytes() - wire) // options.steps)
    if rank == 0:
        queue.put({"times": times, "spent": spent, "wires": wires})
    dist.barrier()


def _ratios(of: dict[str, list[float]]) -> list[float]:
    return [tree / rank for rank, tree in zip(of["rank"], of["tree"], strict=True)]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--stages", default="0,3")
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--when", choices=["last", "every"], default="last")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = f"width {options.width}, {options.layers} layers, {options.batch} x {options.length}"
    result = Result.begin(f"{size}, fp32, 2 ranks x 1 thread, reduce.when {options.when}", options)
    columns = {"stage": "", "micro-batches": "", "rank ms": ".1f", "tree ms": ".1f", "tree / rank": ".3f"}
    columns |= {"half": "", "processor": ".3f", "rank MB": ".1f", "tree MB": ".1f"}
    table = result.table(columns)
    for stage in map(int, options.stages.split(",")):
        for count in map(int, options.micro_batches.split(",")):
            found = launch(timed, options, stage, count)
            times, wires = found["times"], found["wires"]
            ratios, own = (_ratios(found[key]) for key in ("times", "spent"))
            low, _, high = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
            taken = (statistics.median(times[order]) * 1e3 for order in ORDERS)
            sent = (statistics.median(wires[order]) / 1e6 for order in ORDERS)
            spread = f"{low:.3f}-{high:.3f}"
            table.row(stage, count, *taken, statistics.median(ratios), spread, statistics.median(own), *sent)
    result.save(options.save)


if __name__ == "__main__":
    main()
