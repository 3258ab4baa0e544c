"""One step of DualPipeV with experts on several ranks: pairs in turns, and one after the other, in one run.

    python bench/overlap.py                       # two stages of two expert ranks each, gloo
    python bench/overlap.py --delays 0,5,20       # what a network would take, played by waiting: ms
    python bench/overlap.py --trace traces        # a Chrome trace of a step in turns for each rank

One thread per rank. Ranks of one host have no network: sending is copying, by a CPU that would compute. So an
exchange of rows is also made to arrive no sooner than so many milliseconds after it began, and nothing is
computed by whoever waits for it. Both ways take turns in rounds; printed are the median step, the median of
ratios within a round, and what part of the delays of a step is left to wait for. Losses are printed because
a step that is fast and wrong is not a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT, Block
from pipeline import after, before
from result import Result, flags

from zerodrift import Parts, initialize
from zerodrift.comm.collectives import Collectives, Handle
from zerodrift.engine.engine import Engine
from zerodrift.experts.turns import Computation, Turns

STAGES, RANKS, CHOSEN = 2, 2, 2
WAYS = ("in turns", "one after the other")


class Experts(nn.Module):
    """A stack of MLPs, each run on the tokens routed to it."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / (2 * width) ** 0.5)

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.up.shape[0]):
            row, place = (chosen == number).nonzero(as_tuple=True)
            made = F.linear(F.gelu(F.linear(tokens[row], self.up[number])), self.down[number])
            out = out.index_add(0, row, made * weights[row, place, None])
        return out


class Mixture(nn.Module):
    """A router with experts instead of an MLP."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, experts), Experts(experts, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, -1)
        out: torch.Tensor = self.experts(tokens, chosen, weights)
        return out.view(x.shape)


def model_of(options: argparse.Namespace) -> GPT:
    model = GPT(options.width, options.layers, options.vocabulary)
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.up, layer.down = Mixture(options.experts, options.width), nn.Identity()
    return model


def engine_of(options: argparse.Namespace) -> Engine:
    config = {
        "gradient_clipping": 0,
        "sharding": {"accumulator": "keep"},
        "experts": {"ranks": RANKS},
        "pipeline": {"stages": STAGES, "schedule": "dualpipev", "micro_batches": options.micro_batches},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    parts = Parts("layers", before, after)
    return initialize(model_of(options), config=config, parts=parts, device="cpu", quiet=True)


# --- both ways, and a network -------------------------------------------------------------------------------


class Network:
    """A simulated network: rows arrive no sooner than `delay` seconds after they have left."""

    def __init__(self) -> None:
        self.delay, self.count, self.waited = 0.0, 0, 0.0
        self._start = Collectives.start_all_to_all

    def start_all_to_all(
        self, comm: Collectives, rows: torch.Tensor, *where: Any
    ) -> tuple[torch.Tensor, Handle]:
        arrived, under_way = self._start(comm, rows, *where)
        if not rows.is_floating_point():  # counts
            return arrived, under_way
        due = time.perf_counter() + self.delay
        self.count += 1

        def wait() -> None:
            under_way.wait()
            left = due - time.perf_counter()
            if left > 0:
                self.waited += left
                time.sleep(left)

        return arrived, Handle(wait)


def one_after_the_other(turns: Turns, first: Computation, second: Computation) -> None:
    first()
    second()


def measured(rank: int, folder: str, options: argparse.Namespace, queue: Any) -> None:
    torch.set_num_threads(1)
    world = STAGES * RANKS
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(rank % RANKS)
    shape = (options.micro_batches, options.length)
    tokens = torch.randint(options.vocabulary, shape, generator=generator).split(1)
    network, run = Network(), {"in turns": Turns.run, "one after the other": one_after_the_other}
    Collectives.start_all_to_all = lambda comm, *given: network.start_all_to_all(comm, *given)  # type: ignore
    found: dict[float, dict[str, Any]] = {}
    for delay in options.delays:
        network.delay = delay * 1e-3
        steps: dict[str, Callable[[], float]] = {}
        seen: dict[str, Any] = {way: {"times": [], "left": [], "losses": []} for way in WAYS}
        for way in WAYS:
            # A schedule keeps the way in which it was made.
            Turns.run = run[way]  # type: ignore[method-assign]
            engine = engine_of(options)
            steps[way] = lambda engine=engine: engine.train_batch(tokens).loss  # type: ignore[misc]
            seen[way]["losses"] = [steps[way]() for _ in range(2)]
        for _ in range(options.rounds):
            for way, step in steps.items():
                dist.barrier()
                network.count, network.waited = 0, 0.0
                begun = time.perf_counter()
                seen[way]["losses"] += [step() for _ in range(options.steps)]
                dist.barrier()
                seen[way]["times"].append((time.perf_counter() - begun) / options.steps)
                seen[way]["left"].append(network.waited / max(network.count * network.delay, 1e-9))
        if options.trace and delay == options.delays[-1]:
            trace(steps["in turns"], options.trace / f"rank-{rank}.json.gz")
        found[delay] = seen
    if rank == 0:
        queue.put(found)
    dist.barrier()


def trace(step: Callable[[], float], path: Path) -> None:
    """Write a trace of both threads, in which `exchange of ...` spans a whole exchange."""
    from torch._C._profiler import _ExperimentalConfig

    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    threads = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=kinds, experimental_config=threads) as profiler:
        step()
    profiler.export_chrome_trace(str(path))


def launch(options: argparse.Namespace) -> dict[float, dict[str, Any]]:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(measured, args=(folder, options, queue), nprocs=STAGES * RANKS, join=False)
        while not ranks.join(timeout=1):
            pass
    found: dict[float, dict[str, Any]] = queue.get()
    return found


def numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--delays", type=numbers, default=[0.0, 5.0, 20.0])
    parser.add_argument("--trace", type=Path, help="a folder for the traces of a step, with the last delay")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    size = sum(p.numel() for p in model_of(options).parameters())
    result = Result.begin(
        f"{size / 1e6:.1f}M parameters, width {options.width}, {options.layers} layers of {options.experts} "
        f"experts, {options.micro_batches} micro-batches of 1 x {options.length}, fp32, {STAGES} stages x "
        f"{RANKS} expert ranks x 1 thread",
        options,
    )
    columns = {"exchange takes": "<15", "pairs": "<20", "ms/step": ".1f", "to the other": ".2f", "range": ""}
    table = result.table({**columns, "of delays waited": ".0%", "loss": ".4f"})
    found = launch(options)
    for delay, seen in found.items():
        for way in WAYS:
            mine = seen[way]
            other = seen[WAYS[1]]["times"]
            ratios = [a / b for a, b in zip(mine["times"], other, strict=True)]
            left = statistics.median(mine["left"]) if delay else None
            named = f"+ {delay:g} ms" if delay else "as it is"
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            step = statistics.median(mine["times"]) * 1e3
            table.row(named, way, step, statistics.median(ratios), spread, left, mine["losses"][-1])
        if seen[WAYS[0]]["losses"] != seen[WAYS[1]]["losses"]:
            raise SystemExit("losses differ")
    result.save(options.save)


if __name__ == "__main__":
    main()
