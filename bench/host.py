"""The host's time for one step on 8 to 16384 ranks, beside FSDP2: what is left where nothing travels.

    python bench/host.py
    python bench/host.py --ranks 8,512 --only zd-3-native,fsdp2 --profile zd-3-native

Rank 0 of so many over torch's fake process group, fp32 on one thread, a decoder of many small blocks, so that
what a step costs beside its arithmetic is most of it. Each cell is a process of its own. `ms` is processor
time, the least of all rounds, without what is spent in the calls of the carrier: there the fake group copies
a slice into every other's place, one after the other, which no network does. `calls` are those of Python and
from Python in one step. `s` is the processor's time until there is an engine, and `MiB` what the process has
grown by. `zd-3-rank` is zerodrift at stage 3, sums in the order of ranks, on the carrier of GPUs; `pairs` is
that of gloo.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import multiprocessing
import pstats
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT
from result import Result, flags

from tests.host_calls import calls

CARRIED = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
CARRIED += ("all_to_all_single",)
CASES = ("alone", "fsdp2", "zd-3-native", "zd-3-tree", "zd-3-rank", "zd-3-rank-pairs", "zd-3-tree-pairs")
CASES += ("zd-0-rank", "zd-1-rank", "zd-2-rank")
Step = Callable[[], object]


@dataclass(frozen=True)
class Cell:
    """The host's time and memory for one case on so many ranks."""

    made: float
    """Seconds until there is an engine."""
    ms: float
    calls: int
    peak: int
    """MiB that the process has grown by."""


class Carrier:
    """Seconds spent inside the carrier's calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def watch(self) -> None:
        """Time all later calls; modules that import the calls must do so afterwards."""
        for name in CARRIED:
            if hasattr(dist, name):
                setattr(dist, name, self._timed(getattr(dist, name)))
        dist.all_reduce = self._timed(of_all(dist.all_reduce))  # type: ignore[assignment]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside, began = True, time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - began
                self._inside = False

        return timed


def of_all(all_reduce: Any) -> Any:
    """Sum over ranks that all hold the same, which the fake group leaves out."""

    def summed(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(values, *args, **kwargs)
        values.mul_(dist.get_world_size() if "op" not in kwargs else 1)
        return work

    return summed


def zeros_arrive() -> None:
    """Zero the messages of the fake group, whose unwritten memory may hold NaN."""
    from zerodrift.comm import pairs

    gather, take = pairs.Pairs.gather, pairs.HostBuffers.take  # type: ignore[attr-defined]

    def gathered(self: Any, turn: Any, out: torch.Tensor, shard: torch.Tensor) -> Any:
        return gather(self, turn, out.zero_(), shard)

    def taken(self: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return take(self, numel, dtype).zero_()

    pairs.Pairs.gather = gathered  # type: ignore[method-assign]
    pairs.HostBuffers.take = taken  # type: ignore[attr-defined, method-assign]


def model(options: argparse.Namespace) -> GPT:
    return GPT(options.width, options.blocks, 64, 64)


def torch_step(module: nn.Module, tokens: torch.Tensor) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        module(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(options: argparse.Namespace, tokens: torch.Tensor) -> Step:
    from torch.distributed.fsdp import fully_shard

    module = model(options)
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    return torch_step(module, tokens)


def zerodrift(case: str, options: argparse.Namespace, tokens: torch.Tensor) -> Step:
    from zerodrift import initialize
    from zerodrift.comm import collectives

    _, stage, order, *carrier = case.split("-")
    carry = carrier[0] if carrier else "native"
    if carry == "pairs":
        zeros_arrive()
    made = collectives.Collectives.__init__
    carried = lambda self, mesh, _=None: made(self, mesh, carry)  # noqa: E731
    collectives.Collectives.__init__ = carried  # type: ignore[method-assign]
    config = {
        "precision": {"mode": "fp32", "reduce": {"order": order}},
        "zero_optimization": {"stage": int(stage)},
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine = initialize(model(options), config=config, device="cpu", quiet=True)

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    return step


def build_case(case: str, options: argparse.Namespace) -> Step:
    torch.manual_seed(0)
    tokens = torch.randint(64, (1, 16))
    if case == "alone":
        return torch_step(model(options), tokens)
    return fsdp2(options, tokens) if case == "fsdp2" else zerodrift(case, options, tokens)


def resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measured(case: str, ranks: int, options: argparse.Namespace, queue: Any) -> None:
    carrier = Carrier()
    carrier.watch()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    base, began = resident(), time.process_time()
    step = build_case(case, options)
    took = time.process_time() - began
    step(), step()
    times = []
    for _ in range(options.rounds):
        carrier.seconds, began = 0.0, time.process_time()
        step()
        times.append(1e3 * (time.process_time() - began - carrier.seconds))
    peak = resident() - base
    count = min(calls(step) for _ in range(3))  # some things are looked at now and then
    if options.profile == case:
        print_profile(step)
    queue.put(Cell(took, min(times), count, peak))


def print_profile(step: Step) -> None:
    profile = cProfile.Profile()
    profile.runcall(step)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def launch(case: str, ranks: int, options: argparse.Namespace) -> Cell | None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=measured, args=(case, ranks, options, queue))
    process.start()
    while queue.empty() and process.is_alive():
        process.join(0.1)
    found: Cell | None = None if queue.empty() else queue.get()
    process.join()
    return found


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--ranks", default="8,64,512,4096,16384")
    parser.add_argument("--only", default=",".join(CASES), help="comma-separated cases")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", default="", help="a case whose step is profiled on each number of ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.fsdp")
    count = sum(parameter.numel() for parameter in model(options).parameters())
    title = f"{count / 1e6:.2f}M parameters, {options.blocks} blocks of width {options.width}, fp32"
    result = Result.begin(title, options)
    columns = {"engine": "<16", "ranks": "", "ms": ".1f", "calls": "", "s": ".1f", "MiB": ""}
    table = result.table(columns)
    for case in options.only.split(","):
        for number in map(int, options.ranks.split(",")):
            cell = launch(case, number, options)
            found = (cell.ms, cell.calls, cell.made, cell.peak) if cell else (None,) * 4
            table.row(case, number, *found)
    result.save(options.save)


if __name__ == "__main__":
    main()
