"""One step of a pipeline by schedule: zerodrift beside torch's own schedules over FSDP2 stages, in one run.

    python bench/pipeline.py                        # two stages
    python bench/pipeline.py --data 2 --dtype bf16  # two stages of two data ranks each, stage 3

gloo, one thread per rank, fused AdamW, no clipping. Both run the same classes of torch's schedules over the
same pieces; torch's are `fully_shard` with `reshard_after_forward=False`, without which it loses weight
gradients of the schedules that put them off. zerodrift is measured with its queue of late gradients and
with torch's second pass. They take turns in rounds; what is printed is the median step, and the median of
the ratios to torch within a round. The bubble is that of the schedule alone. Losses are printed because a
step that is fast and wrong is not a step.
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
from gpt import GPT
from result import Result, flags

LR, STAGES = 1e-4, 2
Step = Callable[[torch.Tensor], float]
"""Tokens of all micro-batches, `[micro-batches x samples, length]` -> mean loss (on every rank, or NaN)."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")
SPLIT = ("interleaved-zero-bubble", "zbv", "dualpipev")


def before(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model.tokens(tokens) + model.places(torch.arange(tokens.shape[1]))
    return hidden


def after(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.norm(hidden))[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Part(nn.Module):
    """A piece for torch's own stages."""

    def __init__(self, model: GPT, layers: list[int], first: bool, last: bool) -> None:
        super().__init__()
        self.tokens, self.places = (model.tokens, model.places) if first else (None, None)
        self.layers = nn.ModuleList(model.layers[number] for number in layers)
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tokens is not None:
            x = before(self, x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def torch_step(options: argparse.Namespace, schedule: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules

    from zerodrift.mesh import MeshShape
    from zerodrift.pipeline.schedules import CLASSES
    from zerodrift.plan.stages import rank_of
    from zerodrift.policy.decisions import Pipelining

    mesh = init_device_mesh("cpu", (STAGES, options.data), mesh_dim_names=("pipeline", "data"))
    rank, count = mesh.get_local_rank("pipeline"), STAGES * (1 if schedule in ("gpipe", "1f1b") else 2)
    model = make_model(options)
    policy = MixedPrecisionPolicy()
    if options.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pipeline = Pipelining(schedule, count // STAGES, "layers", "autograd")  # type: ignore[arg-type]
    stages, parts = [], []
    for piece in range(count):
        if rank_of(pipeline, MeshShape(pipeline=STAGES), piece) != rank:
            continue
        mine = [n for n in range(options.layers) if n * count // options.layers == piece]
        part = Part(model, mine, piece == 0, piece == count - 1)
        for layer in part.layers:
            fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False, mp_policy=policy)
        fully_shard(part, mesh=mesh["data"], reshard_after_forward=False, mp_policy=policy)
        parts.append(part)
        group = mesh.get_group("pipeline")
        stages.append(PipelineStage(part, piece, count, torch.device("cpu"), group=group))

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    given = stages[0] if count == STAGES else stages
    kind = getattr(schedules, CLASSES[schedule])  # type: ignore[index]
    made = kind(given, options.micro_batches, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=LR, fused=True)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)

    def step(tokens: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        given = (tokens,) if first else ()
        made.step(*given, target=tokens if last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach().mean().item() if losses else float("nan")

    return step


def zerodrift_step(options: argparse.Namespace, schedule: str, weights: str) -> Step:
    from zerodrift import Parts, initialize

    block = {"stages": STAGES, "schedule": schedule, "micro_batches": options.micro_batches}
    if weights:
        block["weight_grads"] = weights
    # Reduced once per step, as FSDP2 does under a schedule.
    config = {
        "precision": {"mode": options.dtype, "reduce": {"when": "last"}},
        "zero_optimization": {"stage": 3 if options.data > 1 else 0},
        "gradient_clipping": 0,
        "sharding": {"accumulator": "keep"},
        "pipeline": block,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},  # as torch does unasked
    }
    engine = initialize(
        make_model(options), config=config, parts=Parts("layers", before, after), device="cpu", quiet=True
    )

    def step(tokens: torch.Tensor) -> float:
        return engine.train_batch(tokens.chunk(options.micro_batches)).loss

    step.digest = engine.plan.digest  # type: ignore[attr-defined]
    return step


def make_model(options: argparse.Namespace) -> GPT:
    return GPT(options.width, options.layers, options.vocabulary)


def steps_of(options: argparse.Namespace, schedule: str) -> dict[str, Step]:
    found = {"torch": torch_step(options, schedule)}
    for weights in ("queue", "autograd") if schedule in SPLIT else ("",):
        found[f"zerodrift {weights}".strip()] = zerodrift_step(options, schedule, weights)
    return found


def timed(rank: int, folder: str, options: argparse.Namespace, names: list[str], queue: Any) -> None:
    torch.set_num_threads(1)
    world = STAGES * options.data
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(rank % options.data)
    shape = (options.micro_batches * options.batch, options.length)
    tokens = torch.randint(options.vocabulary, shape, generator=generator)
    found: dict[str, Any] = {}
    for schedule in names:
        steps = steps_of(options, schedule)
        times: dict[str, list[float]] = {name: [] for name in steps}
        losses: dict[str, float] = {}
        for name, step in steps.items():
            for _ in range(2):
                losses[name] = step(tokens)
        for _ in range(options.rounds):
            for name, step in steps.items():
                dist.barrier()
                start = time.perf_counter()
                for _ in range(options.steps):
                    losses[name] = step(tokens)
                dist.barrier()
                times[name].append((time.perf_counter() - start) / options.steps)
        told: list[Any] = [None] * world
        dist.all_gather_object(told, losses)
        shown = {name: next(each[name] for each in told if each[name] == each[name]) for name in losses}
        digests = {name: step.digest for name, step in steps.items() if hasattr(step, "digest")}
        found[schedule] = {"times": times, "losses": shown, "digests": digests}
    if rank == 0:
        queue.put(found)
    dist.barrier()


def launch(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        given = (folder, options, names, queue)
        ranks = mp.start_processes(timed, args=given, nprocs=STAGES * options.data, join=False)
        while not ranks.join(timeout=1):
            pass
    found: dict[str, Any] = queue.get()
    return found


def bubble(options: argparse.Namespace, schedule: str) -> float:
    """Return the idle part of the ranks' time in the schedule itself."""
    from zerodrift import MeshShape, build, describe, load, resolve
    from zerodrift.pipeline.schedules import timeline

    block = {"stages": STAGES, "schedule": schedule, "micro_batches": options.micro_batches}
    mesh = MeshShape(pipeline=STAGES)
    made = timeline(build(resolve(load({"pipeline": block}), mesh), describe(make_model(options)), mesh))
    return made.bubble if made is not None else 0.0


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--only", default="", help="comma-separated schedules")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--data", type=int, default=1, help="data ranks per stage")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(SCHEDULES)
    size = sum(p.numel() for p in make_model(options).parameters())
    result = Result.begin(
        f"{size / 1e6:.1f}M parameters, width {options.width}, {options.layers} layers, "
        f"{options.micro_batches} micro-batches of {options.batch} x {options.length}, {options.dtype}, "
        f"{STAGES} stages x {options.data} data ranks x 1 thread",
        options,
    )
    found = launch(options, names)
    columns = {"schedule": "<23", "bubble": ".1%", "engine": "<18", "ms/step": ".1f", "to torch": ".2f"}
    table = result.table({**columns, "range": "", "loss": ".4f"})
    for schedule in names:
        times, losses = found[schedule]["times"], found[schedule]["losses"]
        for name, mine in times.items():
            ratios = [a / b for a, b in zip(mine, times["torch"], strict=True)]
            step, ratio = statistics.median(mine) * 1e3, statistics.median(ratios)
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            table.row(schedule, bubble(options, schedule), name, step, ratio, spread, losses[name])
    result.save(options.save)


if __name__ == "__main__":
    main()
