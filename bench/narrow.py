"""Narrow columns beside bf16: losses on real text, distance from fp32, bytes on the wire, and time of a step.

    python bench/narrow.py                            # dense and MoE, 500 steps, two gloo ranks, stage 3
    python bench/narrow.py --only bf16,"gather fp8"   # some of the recipes

Two byte-level decoders learn the sources of Python's standard library (`convergence.py`). The one with
experts has its router pinned, as the audit says, and once not. Every recipe sees the same batches from
the same weights. `final` is the mean loss of the last 50 steps, `held out` that of files that were not
trained on. `nats` is the mean distance between the log probability of a held-out token as the trained
model computes it and as its masters give it in fp32.

Engines of all recipes then take steps in turns, and `ratio` is the median of step time over that of bf16 in
the same round. A CPU pays for encoding and decoding what a network would save. Bytes are counted by the
loopback device and in the memory that ranks share, both ranks together, beside what the plan says. Needs
Linux.
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
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from convergence import corpus
from gpt import GPT
from result import Result, flags
from step import join, launch, sent_bytes

RECIPES: dict[str, dict[str, Any]] = {
    "fp32": {"mode": "fp32"},
    "bf16": {},
    "gather fp8": {"gather": "fp8"},
    "gather mxfp8": {"gather": "mxfp8"},
    "gather int8": {"gather": "int8"},
    "wire fp8": {"reduce": {"wire": "fp8"}},
    "wire int8": {"reduce": {"wire": "int8"}},
    "wire int4": {"reduce": {"wire": "int4"}},
    "compute fp8": {"compute": "fp8"},
    "all three": {"gather": "fp8", "reduce": {"wire": "int8"}, "compute": "fp8"},
}
BASE = "bf16"
LAST = 50


class Experts(nn.Module):
    """A mixture of experts instead of an MLP; every token goes to its best two."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share.to(x.dtype) * expert(x)
        return out


class Mixture(GPT):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        for layer in self.layers:
            width = layer.up.in_features
            layer.up, layer.down = Experts(width), nn.Identity()


MODELS = {"dense": GPT, "MoE": Mixture, "MoE without pins": Mixture}


def engine(model: str, recipe: str, options: argparse.Namespace) -> Any:
    from zerodrift import initialize

    rules = [{"match": "*.router.*", "pin": "fp32"}] if model == "MoE" else []
    config = {
        "precision": {"mode": "bf16", "rules": rules, **RECIPES[recipe]},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "weight_decay": 0.1}},
    }
    torch.manual_seed(0)
    made = MODELS[model](options.width, options.layers, 256, options.length)
    return initialize(made, config=config, device="cpu", quiet=True)


def sample(text: torch.Tensor, options: argparse.Namespace, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
    return text[starts + torch.arange(options.length)].long()


def take_step(made: Any, tokens: torch.Tensor) -> float:
    loss = made(tokens)
    made.backward(loss)
    made.step()
    return loss.item()


def all_sent_bytes(made: Any) -> int:
    """Return the bytes sent by the loopback device, and written to shared memory by both ranks."""
    shared = made.comm.mesh.shared
    written = torch.tensor(0 if shared is None else shared.own.written)
    dist.all_reduce(written)
    return sent_bytes() + int(written)


# --- losses ---------------------------------------------------------------------------------------------


def fit(rank: int, folder: str, options: argparse.Namespace, model: str, recipe: str, queue: Any) -> None:
    join(rank, folder)
    text, other = corpus()
    made = engine(model, recipe, options)
    losses = [take_step(made, sample(text, options, 2 * step + rank)) for step in range(options.steps)]
    mean = torch.tensor(losses[-LAST:]).mean()
    dist.all_reduce(mean)
    batches = [sample(other, options, 10**6 + number) for number in range(20)]
    with torch.no_grad():
        held_out = [float(made(tokens)) for tokens in batches]
        masters = {row.name: made.parameter(row.name).master for row in made.plan.rows}
    computed = [_log_probabilities(made, tokens) for tokens in batches]
    exact = MODELS[model](options.width, options.layers, 256, options.length)
    exact.load_state_dict(masters)
    nats = [
        (one - _log_probabilities(exact, tokens)).abs().mean().item()
        for one, tokens in zip(computed, batches, strict=True)
    ]
    if rank == 0:
        found = float(mean) / 2, statistics.fmean(held_out), statistics.fmean(nats)
        queue.put({"figures": found})
    dist.barrier()


@torch.no_grad()
def _log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return log probabilities, one sequence at a time because the models return a mean loss."""
    return torch.stack([-model(row[None].clone()).float() for row in tokens])


# --- steps ----------------------------------------------------------------------------------------------


def timed(
    rank: int, folder: str, options: argparse.Namespace, model: str, names: list[str], queue: Any
) -> None:
    join(rank, folder)
    from zerodrift import cost

    text, _ = corpus()
    tokens = sample(text, options, rank)
    engines = {name: engine(model, name, options) for name in names}
    for made in engines.values():
        take_step(made, tokens), take_step(made, tokens)
    times: dict[str, list[float]] = {name: [] for name in names}
    wires: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(options.rounds):
        for name in names if turn % 2 else reversed(names):
            dist.barrier()
            wire, start = all_sent_bytes(engines[name]), time.perf_counter()
            take_step(engines[name], tokens)
            dist.barrier()
            times[name].append(time.perf_counter() - start)
            wires[name].append(all_sent_bytes(engines[name]) - wire)
    planned = {name: 2 * cost(made.plan).wire for name, made in engines.items()}
    if rank == 0:
        queue.put({"times": times, "wires": wires, "planned": planned})
    dist.barrier()


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes")
    parser.add_argument("--models", default="dense,MoE,MoE without pins")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = options.only.split(",")
    size = f"width {options.width}, {options.layers} layers, {options.batch} x {options.length} bytes a rank"
    result = Result.begin(f"narrow columns: {size}, 2 ranks x 1 thread, stage {options.stage}", options)
    columns = {"recipe": "<22", "final": ".4f", "held out": ".4f", "nats": ".2e"}
    columns |= {"ratio": ".2f", "sent MB": ".2f", "planned MB": ".2f"}
    for model in options.models.split(","):
        table = result.table(columns, model)
        steps = launch(timed, options, model, names)
        for name in names:
            figures = launch(fit, options, model, name)["figures"] if options.steps else [None] * 3
            pairs = zip(steps["times"][name], steps["times"].get(BASE, steps["times"][name]), strict=True)
            ratio = statistics.median(one / base for one, base in pairs)
            sent, planned = statistics.median(steps["wires"][name]) / 1e6, steps["planned"][name] / 1e6
            table.row(name, *figures, ratio, sent, planned)
    result.save(options.save)


if __name__ == "__main__":
    main()
