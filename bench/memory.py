"""Compare the memory of a Llama-3-8B step, by the engine's own allocations, with the promise of its plan.

    python bench/memory.py [--ranks 1,8] [--stages 0,1,2,3] [--size 8B] [--tokens 16]
    python bench/memory.py --size 3B --on cuda      # on a machine with a GPU: what its allocator says

Without `--on` there is no GPU in this: the engine runs its steps on the stand-in device of the tests, dry, as
rank 0 of so many ranks. Its host code, its collectives and the sizes of all tensors are those of a real run,
while memory is addresses and no kernel runs. Every allocation and free is played through a model of CUDA's
caching allocator, which tells what would be in use, what would be reserved, and whether it would fit.

A plan leaves activations out. So here the batch is one sequence of a few tokens, with activation
checkpointing, whose activations are a few MB: what is compared is the engine's part. The libraries of a real
device (CUDA's context, NCCL's buffers, the workspace of cuBLAS) are in neither. Prints and exits with 1 when
a plan is further off than the limit. Needs Linux and a C++ compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from llama import SHAPES, Llama
from result import Result, flags

import zerodrift
from tests.device.caching import CachingAllocator, OutOfMemory

if TYPE_CHECKING:
    from tests.device.dry import Entry

LIMIT = 0.05
"""The largest relative error of a plan's peak."""
GIB = 1 << 30
DEVICES = {"80 GB": 79 * GIB, "141 GB": 139 * GIB}
"""Device -> bytes that torch can use, without CUDA's context."""
STEPS = 3


def steps(size: str, stage: int, tokens: int, device: torch.device) -> Any:
    """Run an engine to its third step and return its bill."""
    shape = dataclasses.replace(SHAPES[size], micro_batch=1, length=tokens, checkpoints=True)
    config = {
        "precision": {"mode": "bf16"},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    with zerodrift.empty():
        model = Llama(shape).bfloat16()
    engine = zerodrift.initialize(model, config=config, device=device.type, quiet=True)
    batch = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    for _ in range(STEPS):
        engine.backward(engine(batch))
        engine.step()
    bill = zerodrift.cost(engine.plan)
    engine.destroy()
    return bill


def run(size: str, ranks: int, stage: int, tokens: int) -> tuple[list[Entry], Any]:
    """Return the allocations of those steps on rank 0 of so many, and the bill."""
    from tests.device.dry import dry_world, recorded

    with dry_world(ranks) as device, recorded() as recording:
        bill = steps(size, stage, tokens, device)
    return recording.entries, bill


def measure_on_device(options: argparse.Namespace) -> int:
    """Run the steps on a real device, alone, and print what its allocator has counted."""
    device = torch.device(options.on)
    title = f"Llama-3 {options.size} on a real device: GiB"
    result = Result.begin(title, options, "triton")
    table = result.table({"ranks": "", "planned": ".2f", "measured": ".2f", "off": "+.1%", "reserved": ".2f"})
    bill = steps(options.size, 3, options.tokens, device)
    allocated = torch.accelerator.max_memory_allocated(device)
    off = bill.peak.total / allocated - 1
    reserved = torch.accelerator.max_memory_reserved(device)
    table.row("1", bill.peak.total / GIB, allocated / GIB, off, reserved / GIB)
    result.save(options.save)
    return int(abs(off) > LIMIT)


def fits(entries: list[Entry], capacity: int) -> str:
    """Tell if a device has the memory, and if only after cached segments were returned to it."""
    memory = CachingAllocator(capacity)
    try:
        memory.play(entries)
    except OutOfMemory:
        return "no"
    return f"after {memory.flushes} flushes" if memory.flushes else "yes"


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--ranks", default="1,8")
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--size", default="8B", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--on", metavar="DEVICE", help="run on this device, with one rank: cuda")
    options = parser.parse_args()
    if options.on:
        return measure_on_device(options)
    title = f"Llama-3 {options.size} in bf16, split master, AdamW, one sequence of {options.tokens} tokens"
    result = Result.begin(f"{title}: GiB of rank 0", options)
    columns = {
        "ranks": "",
        "stage": "",
        "planned": ".2f",
        "predicted": ".2f",
        "off": "+.1%",
        "reserved": ".2f",
    }
    columns |= {"fragments": ".1%", "used again": ".1%", **{f"fits {name}": "<18" for name in DEVICES}}
    table = result.table(columns)
    parts = result.table(
        {
            "ranks, stage": "",
            **{name: ".2f" for name in ("rest", "gathered", "accumulate", "gradient", "wire")},
        },
        "What the planned peak is made of, GiB",
    )
    worst, lines = 0.0, []
    for ranks, stage in cases(options):
        entries, bill = run(options.size, ranks, stage, options.tokens)
        memory = CachingAllocator()
        memory.play(entries)
        usage, peak = memory.usage, bill.peak
        off = peak.total / usage.allocated - 1
        worst = max(worst, abs(off))
        shown = (peak.total / GIB, usage.allocated / GIB, off, usage.reserved / GIB)
        where = (fits(entries, capacity) for capacity in DEVICES.values())
        table.row(str(ranks), str(stage), *shown, usage.fragmentation, usage.reuse, *where)
        each = (peak.rest, peak.gathered, peak.accumulate, peak.gradient, peak.wire)
        lines.append((f"{ranks}, {stage}", *(part / GIB for part in each)))
    for line in lines:
        parts.row(*line)
    result.save(options.save)
    return int(worst > LIMIT)


def cases(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return pairs of ranks and stage. A single rank does the same at every stage."""
    stages = [int(stage) for stage in options.stages.split(",")]
    worlds = [int(ranks) for ranks in options.ranks.split(",")]
    return [(ranks, stage) for ranks in worlds for stage in (stages if ranks > 1 else stages[-1:])]


if __name__ == "__main__":
    sys.exit(main())
