"""Steps of one, two and four gloo ranks, measured and simulated from what this machine was measured to do.

    python bench/simulate.py                        # measures the machine, and steps that it simulates
    python bench/simulate.py --write machine.yaml   # and keeps what the machine does, for `--simulate`
    python bench/simulate.py --scale                # simulates large models on many GPUs, measures nothing

What a machine does is measured while two ranks, with a core each, do the same: products of the model's sizes,
a copy in memory, new memory, three usual operations in the cache, a small one, a gather by the engine's own
messages, products beside one. Any number of ranks is simulated from that and the number of cores: nothing is
fitted to a step. Machine and steps are measured in turns, because what a machine does drifts, and of both the
median counts; the first two steps of an engine are left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT
from result import Result, flags

import zerodrift
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import start
from zerodrift.inspect.simulate.cluster import Cluster, read_cluster
from zerodrift.inspect.simulate.simulation import simulate
from zerodrift.inspect.simulate.work import count_work, sized_inputs
from zerodrift.mesh import MeshShape
from zerodrift.model.inputs import Inputs
from zerodrift.model.sources import build_runnable


@dataclass(frozen=True)
class Size:
    """A model of `bench/gpt.py` with its batch."""

    width: int
    layers: int
    batch: int
    length: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, {self.batch} x {self.length}"

    def model(self) -> GPT:
        return GPT(self.width, self.layers, 4096)


SIZES = (Size(384, 8, 1, 128), Size(512, 4, 2, 256))
WORLDS = (1, 2, 4)
MEASURED = 2
"""Ranks on which the machine is measured."""
BLOCK = 1 << 21
"""Elements of the measured all-gather: about a block of the models."""


def config(stage: int, micro_batches: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_accumulation_steps": micro_batches,
    }


# --- what the machine does ------------------------------------------------------------------------------


def mean_of(call: Callable[[], object], least: float = 0.4) -> float:
    """Return the mean seconds of one call while all ranks do the same. With more ranks than cores a rank
    waits between calls and not in them, which a median would miss."""
    call()
    dist.barrier()
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < least:
        call()
        count += 1
    seconds = (time.perf_counter() - begun) / count
    dist.barrier()
    return seconds


def together(call: Callable[[], object], rounds: int = 25) -> float:
    """Return the median seconds of a call in which all ranks take part."""
    times: list[float] = []
    for _ in range(rounds):
        dist.barrier()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def products(tokens: int, width: int) -> float:
    """Return the TFLOP/s of a block's products, forward and backward."""
    x, w = torch.randn(tokens, width), torch.randn(4 * width, width)
    y = torch.randn(tokens, 4 * width)

    def call() -> None:
        torch.mm(x, w.t())
        torch.mm(y, w)
        torch.mm(y.t(), x)

    return 3 * 2 * tokens * width * 4 * width / mean_of(call) / 1e12


def measure_machine(comm: Collectives, size: Size) -> dict[str, Any]:
    """Return a cluster in the form of its file, measured on this rank with products of a model's sizes."""
    world = dist.get_world_size()
    large, copy = torch.zeros(16 << 20), torch.zeros(16 << 20)
    small, other = torch.zeros(128 * 1024), torch.zeros(128 * 1024)
    least = torch.zeros(16, requires_grad=True)
    mine, few = torch.zeros(BLOCK // world), torch.zeros(64)

    def usual() -> None:
        torch.add(small, other)
        torch.nn.functional.gelu(small)
        torch.nn.functional.layer_norm(small.view(-1, 512), (512,))

    def gather(shard: torch.Tensor) -> Callable[[], object]:
        """Gather into new memory, as the engine does."""
        return lambda: comm.all_gather(torch.empty(shard.numel() * world), shard, "shard")

    latency, seconds = together(gather(few)), together(gather(mine))
    alone = mean_of(lambda: torch.mm(x, y))
    times = max(1, round(seconds / alone))

    def beside() -> None:
        handle = comm.start_all_gather(torch.empty(mine.numel() * world), mine, "shard")
        for _ in range(times):
            torch.mm(x, y)
        handle.wait()

    both = together(beside)
    # Beside a gather of `seconds`, products of `times * alone` take so much of their own time.
    pace = (times * alone - max(0.0, both - seconds)) / min(both, seconds)
    sent = mine.nbytes * (world - 1)
    return {
        "device": {
            "tflops": {"fp32": products(size.batch * size.length, size.width)},
            "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / max(WORLDS) / 1e9,
            "memory_gb_per_s": 2 * large.nbytes / mean_of(lambda: copy.copy_(large)) / 1e9,
            "new_gb_per_s": NEW.nbytes / mean_of(lambda: torch.empty_like(NEW).zero_()) / 1e9,
            "cache_mb": 4.0,
            "cache_gb_per_s": 7 * small.nbytes / mean_of(usual) / 1e9,
            "operation_us": mean_of(lambda: [least + 1.0 for _ in range(100)]) / 100 * 1e6,
        },
        "devices_per_host": 64,
        "cores": len(os.sched_getaffinity(0)),
        "host": {"gb_per_s": sent / max(seconds - latency, seconds / 2) / 1e9, "latency_us": latency * 1e6},
        "carrier": "pairs",
        "compute_beside_link": min(1.0, max(0.05, pace)),
        "source": f"bench/simulate.py, {world} gloo ranks",
    }


x, y = torch.randn(256, 512), torch.randn(512, 2048)
NEW = torch.empty(16 << 20)
"""A tensor so large that its memory goes back to the system when it is freed."""


# --- steps ----------------------------------------------------------------------------------------------


def run(rank: int, folder: str, world: int, options: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    comm = Collectives(start(MeshShape(shard=world), device="cpu"))
    found = {}
    for size in SIZES:
        machines, times = [], {stage: list[float]() for stage in options.stages}
        for _ in range(options.turns):
            if world == MEASURED:
                machines.append(measure_machine(comm, size))
            for stage in options.stages:
                times[stage] += step_times(size, stage, rank, options)
        steps = {stage: statistics.median(seconds) for stage, seconds in times.items()}
        found[size] = middle(machines) if machines else {}, steps
    if rank == 0:
        queue.put(found)
    dist.barrier()


def middle(machines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure, because a machine drifts between its measurements."""
    whole: dict[str, Any] = {}
    for key, first in machines[0].items():
        figures = [machine[key] for machine in machines]
        if isinstance(first, dict):
            whole[key] = middle(figures)
        else:
            whole[key] = statistics.median(figures) if isinstance(first, float) else first
    return whole


def step_times(size: Size, stage: int, rank: int, options: argparse.Namespace) -> list[float]:
    """Return the seconds of whole steps."""
    engine = zerodrift.initialize(
        size.model(), config=config(stage, options.micro_batches), device="cpu", quiet=True
    )
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(4096, (size.batch, size.length), generator=generator)
    times: list[float] = []
    for _ in range(options.rounds + 2):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(options.micro_batches):
            engine.backward(engine(tokens))
            engine.step()
        times.append(time.perf_counter() - begun)
    engine.destroy()
    return times[2:]


def launched(world: int, options: argparse.Namespace) -> dict[Size, Any]:
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            run, args=(folder, world, options, queue), nprocs=world, join=False, start_method="spawn"
        )
        found: dict[Size, Any] = queue.get()
        while not ranks.join(timeout=1):
            pass
    return found


def compare(options: argparse.Namespace) -> None:
    result = Result.begin(
        f"Steps of gloo ranks in fp32, measured and simulated, micro-batches: {options.micro_batches}",
        options,
    )
    columns = {"ranks": "<7", "model": "<22", "stage": "", "measured ms": ".1f", "simulated ms": ".1f"}
    columns |= {"simulated / measured": ".2f", "computing": ".0%", "waiting": ".0%"}
    found = {world: launched(world, options) for world in sorted({MEASURED, *options.worlds})}
    clusters = {size: machine for size, (machine, _) in found[MEASURED].items()}
    machines = {f"{MEASURED} ranks, {size.width}": machine for size, machine in clusters.items()}
    rows = []
    for world in options.worlds:
        for size, (_, steps) in found[world].items():
            for stage, seconds in steps.items():
                simulated = simulation_of(size, stage, world, Cluster(**clusters[size]), options)
                share = simulated.exposed / simulated.seconds
                ratio = simulated.seconds / seconds
                times = seconds * 1e3, simulated.seconds * 1e3
                name = f"{world} rank{'s'[: world - 1]}"
                rows.append((name, str(size), stage, *times, ratio, 1 - share, share))
    table = result.table({"what": "<24", **dict.fromkeys(machines, ".3g")}, "What the machine does")
    for name, path in FIGURES.items():
        table.row(name, *(value(machine, path) for machine in machines.values()))
    table = result.table(columns, "A step")
    for row in rows:
        table.row(*row)
    result.save(options.save)
    if options.write:
        Path(options.write).write_text(
            yaml.safe_dump(next(iter(machines.values())), sort_keys=False), encoding="utf-8"
        )


FIGURES = {
    "cores": ("cores",),
    "fp32 TFLOP/s": ("device", "tflops", "fp32"),
    "memory GB/s": ("device", "memory_gb_per_s"),
    "new memory GB/s": ("device", "new_gb_per_s"),
    "cache GB/s": ("device", "cache_gb_per_s"),
    "an operation, us": ("device", "operation_us"),
    "link GB/s": ("host", "gb_per_s"),
    "link latency, us": ("host", "latency_us"),
    "computing beside the link": ("compute_beside_link",),
}


def value(machine: dict[str, Any], path: Sequence[str]) -> float:
    for key in path:
        machine = machine[key]
    return float(machine)  # type: ignore[arg-type]


def simulation_of(size: Size, stage: int, world: int, cluster: Cluster, options: argparse.Namespace) -> Any:
    with zerodrift.empty():
        model = size.model()
    plan = zerodrift.make_plan(config(stage, options.micro_batches), model, world)
    tokens = torch.zeros(size.batch, size.length, dtype=torch.int64)
    return simulate(plan, count_work(plan, model, Inputs((), {"tokens": tokens}, str(size))), cluster)


# --- large models -----------------------------------------------------------------------------------------


def llama(width: int, inner: int, layers: int, heads: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
    )


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"])


@dataclass(frozen=True)
class Large:
    name: str
    make: Callable[[], Any]
    """Function that makes the model's config of `transformers`."""
    ranks: tuple[int, ...]
    keys: dict[str, Any]
    orders: tuple[str, ...] = ("rank", "tree", "native")


LARGE = (
    Large("Llama-3-8B", lambda: llama(4096, 14336, 32, 32), (64, 512, 4096), {}),
    Large("Llama-3-70B", lambda: llama(8192, 28672, 80, 64), (512, 4096, 16384), {}),
    Large("DeepSeek-V3", deepseek_v3, (1024, 4096, 16384), {"experts": {"ranks": 64}}, ("rank", "native")),
)
LENGTH = 4096


def at_scale(options: argparse.Namespace) -> None:
    """Simulate large models on many GPUs, without measuring."""
    cluster, path = read_cluster(options.cluster)
    title = f"Simulated, not measured: steps at stage 3, bf16, {LENGTH} tokens a rank, on {path.stem}"
    result = Result.begin(title, options, "transformers")
    columns = {"model": "<12", "GPUs": "", "replicas": "", "order": "<6", "recompute": "<9", "ms/step": ".0f"}
    columns |= {"tokens/s": ",.0f", "MFU": ".1%", "waiting": ".0%", "GB a GPU": ".0f", "fits": "<4"}
    table = result.table(columns)
    for large in LARGE:
        if options.only and large.name not in options.only:
            continue
        written = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **large.keys}
        written["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}
        with tempfile.TemporaryDirectory() as folder:
            large.make().save_pretrained(folder)
            spec, model = zerodrift.describe(folder), build_runnable(folder)
        work = count_work(
            zerodrift.make_plan(written, spec, large.ranks[0]), model, sized_inputs(model, 1, LENGTH)
        )
        for ranks in large.ranks:
            for replicas in (1, ranks // 64) if ranks > 64 else (1,):
                for order in large.orders:
                    more = {"precision": {"reduce": {"order": order}}, "sharding": {"replicate": replicas}}
                    plan = zerodrift.make_plan({**written, **more}, spec, ranks)
                    found = simulate(plan, work, cluster, recompute=True)
                    table.row(
                        large.name,
                        ranks,
                        replicas,
                        order,
                        "yes",
                        found.seconds * 1e3,
                        found.tokens_per_second,
                        found.mfu,
                        found.exposed / found.seconds,
                        found.memory.total / 1e9,
                        "yes" if found.memory.fits else "no",
                    )
    result.save(options.save)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3])
    parser.add_argument("--worlds", type=numbers, default=list(WORLDS))
    parser.add_argument("--turns", type=int, default=4, help="of measuring the machine, then steps")
    parser.add_argument("--rounds", type=int, default=3, help="steps of a turn")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--write", metavar="FILE", help="keep what the machine does, for `zerodrift plan --simulate`"
    )
    parser.add_argument("--scale", action="store_true", help="simulate large models, measure nothing")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--only", default="", help="of the large models")
    options = parser.parse_args()
    if options.scale:
        at_scale(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
