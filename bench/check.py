"""What watching costs: steps of a decoder with and without `zerodrift.observe` around them, in turns.

    python bench/check.py [--width 384] [--layers 8] [--length 128] [--steps 4] [--rounds 6] [--json FILE]

A round is some steps alone, as many watched, and as many alone again, on the same model in one process; the
ratio is of the watched to the mean of its neighbours, so a busy machine changes both. `ended` is the second
unwatched turn beside the first: nothing may be left behind. The weights after it all are compared with those
of a run that was never watched, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from about import about
from gpt import GPT

import zerodrift

KINDS = ("fp32", "autocast bf16")


@dataclass(frozen=True)
class Measured:
    kind: str
    step: float
    """Seconds of a step alone, the median of rounds."""
    watched: tuple[float, float, float]
    """Least, median and greatest ratio of a watched step."""
    ended: float
    """Median ratio of steps after to steps before."""
    same: bool
    """Whether the weights are those of a run that was never watched."""


class Run:
    """A model that trains, a step at a time."""

    def __init__(self, arguments: argparse.Namespace, autocast: bool) -> None:
        self.model = GPT(arguments.width, arguments.layers, length=arguments.length)
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
        """Seconds of one, of so many."""
        begin = time.perf_counter()
        for _ in range(count):
            self.step()
        return (time.perf_counter() - begin) / count


def measured(kind: str, arguments: argparse.Namespace) -> Measured:
    run = Run(arguments, kind != "fp32")
    alone, watched, ended = [], [], []
    run.steps(2)
    for _ in range(arguments.rounds):
        before = run.steps(arguments.steps)
        with zerodrift.observe(run.model):
            run.step()  # the first one asks each cell for the line of the script
            during = run.steps(arguments.steps)
        after = run.steps(arguments.steps)
        alone.append(min(before, after))
        watched.append(2 * during / (before + after))
        ended.append(after / before)
    never = Run(arguments, kind != "fp32")
    never.steps(2 + arguments.rounds * (3 * arguments.steps + 1))
    pairs = zip(run.model.parameters(), never.model.parameters(), strict=True)
    return Measured(
        kind,
        statistics.median(alone),
        (min(watched), statistics.median(watched), max(watched)),
        statistics.median(ended),
        all(torch.equal(a, b) for a, b in pairs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("width", 384), ("layers", 8), ("length", 128), ("steps", 4), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(about())
    print(f"{'':16}{'step':>9}{'watched':>10}{'range':>16}{'ended':>8}  bits")
    rows = []
    for kind in KINDS:
        row = measured(kind, arguments)
        rows.append(row)
        low, middle, high = row.watched
        bits = "the same" if row.same else "OTHERS"
        spread = f"{low:.2f} to {high:.2f}"
        print(
            f"{kind:16}{row.step * 1000:7.0f}ms{middle:10.3f}{spread:>16}{row.ended:8.3f}  {bits}", flush=True
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
