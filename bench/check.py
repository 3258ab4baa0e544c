"""Measure the cost of `zerodrift.observe`: steps of a decoder with and without it, in turns.

    python bench/check.py [--width 384] [--layers 8] [--length 128] [--steps 4] [--rounds 6]
    torchrun --nproc-per-node 2 bench/check.py ...        the same under DistributedDataParallel

Times are processor time of one thread. A round is some steps alone, one that is watched first, as many
more that are watched, and as many alone again, on the same model in one process; the ratio is of a watched
step to the mean of its neighbours, so a busy machine changes both. `ended` is the second unwatched turn
beside the first: nothing may be left behind. The weights after it all are compared with those of a run
that was never watched, bit for bit. `mode` is the cost of an empty `TorchDispatchMode`, in microseconds
per operation of a forward: the least that any observer of operations can cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from gpt import GPT
from result import Result, flags
from torch.nn.parallel import DistributedDataParallel

import zerodrift
from zerodrift.inspect.trace.operations import every_operation

KINDS = ("fp32", "autocast bf16")


@dataclass(frozen=True)
class Measured:
    kind: str
    step: float
    """Seconds of an unwatched step, the median of rounds."""
    watched: tuple[float, float, float]
    """Least, median and greatest ratio of a watched step after the first."""
    first: float
    """Median ratio of the first watched step."""
    added: tuple[float, float]
    """Seconds that watching adds to the first step, and to each other: medians."""
    mode: float
    """Seconds that an empty `TorchDispatchMode` adds to an operation."""
    ended: float
    """Median ratio of steps after to steps before."""
    same: bool
    """Whether the weights equal those of an unwatched run."""


class Run:
    """A model that trains, a step at a time."""

    def __init__(self, arguments: argparse.Namespace, autocast: bool) -> None:
        self.model: torch.nn.Module = GPT(arguments.width, arguments.layers, length=arguments.length)
        if torch.distributed.is_initialized():
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._autocast, self._length, self._step = autocast, arguments.length, 0

    def step(self) -> None:
        self._step += 1
        seed = torch.Generator().manual_seed(self._step)
        tokens = torch.randint(0, 4096, (1, self._length), generator=seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self.model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> float:
        """Return the seconds per step over `count` steps."""
        begin = time.process_time()
        for _ in range(count):
            self.step()
        return (time.process_time() - begin) / count

    def forward(self) -> float:
        """Return the seconds of one forward."""
        tokens = torch.zeros(1, self._length, dtype=torch.long)
        begin = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast), torch.no_grad():
            self.model(tokens)
        return time.process_time() - begin


def cost_of_a_mode(run: Run, rounds: int) -> float:
    """Return the seconds that an empty mode adds to an operation, the median of rounds."""
    operations, more = 0, []

    def count(*_: object) -> None:
        nonlocal operations
        operations += 1

    with every_operation(count):
        run.forward()
    for _ in range(4 * rounds):
        alone = run.forward()
        with every_operation(lambda *_: None):
            more.append(run.forward() - alone)
    return statistics.median(more) / operations


def measured(kind: str, arguments: argparse.Namespace) -> Measured:
    run = Run(arguments, kind != "fp32")
    alone, watched, ended, first, added = [], [], [], [], []
    run.steps(2)
    for _ in range(arguments.rounds):
        before = run.steps(arguments.steps)
        with zerodrift.observe(run.model):
            once = run.steps(1)
            during = run.steps(arguments.steps)
        after = run.steps(arguments.steps)
        alone.append(min(before, after))
        watched.append(2 * during / (before + after))
        ended.append(after / before)
        first.append(2 * once / (before + after))
        added.append((once - (before + after) / 2, during - (before + after) / 2))
    never = Run(arguments, kind != "fp32")
    never.steps(2 + arguments.rounds * (3 * arguments.steps + 1))
    pairs = zip(run.model.parameters(), never.model.parameters(), strict=True)
    return Measured(
        kind,
        statistics.median(alone),
        (min(watched), statistics.median(watched), max(watched)),
        statistics.median(first),
        (statistics.median(a for a, _ in added), statistics.median(b for _, b in added)),
        cost_of_a_mode(run, arguments.rounds),
        statistics.median(ended),
        all(torch.equal(a, b) for a, b in pairs),
    )


def main() -> None:
    parser = flags(__doc__)
    for name, value in (("width", 384), ("layers", 8), ("length", 128), ("steps", 4), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    rows = (measured(kind, arguments) for kind in KINDS)
    if os.environ.get("RANK", "0") == "0":
        show(rows, ranks, arguments)
    else:
        list(rows)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def show(rows: Iterable[Measured], ranks: int, arguments: argparse.Namespace) -> None:
    size = f"width {arguments.width}, {arguments.layers} layers, 1 x {arguments.length}"
    result = Result.begin(f"A step under `zerodrift.observe`, {size}, ranks: {ranks}", arguments)
    columns = {"": "<13", "step ms": ".0f", "watched": ".3f", "range": "", "more ms": ".1f"}
    table = result.table({**columns, "first": ".2f", "ended": ".3f", "mode us": ".1f", "bits": ""})
    for row in rows:
        low, middle, high = row.watched
        spread = f"{low:.2f} to {high:.2f}"
        bits = "the same" if row.same else "OTHERS"
        more, mode = row.added[1] * 1e3, row.mode * 1e6
        table.row(row.kind, row.step * 1e3, middle, spread, more, row.first, row.ended, mode, bits)
    result.save(arguments.save)


if __name__ == "__main__":
    main()
