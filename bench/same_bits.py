"""Check that a run has the same SHA-256 of weights, masters and moments on any shape and through kills.

    python bench/same_bits.py                            # 1,000 steps of every run; many minutes
    python bench/same_bits.py --steps 50 --only fp16     # a few steps of some runs
    python bench/same_bits.py --only "moe fp16" --kills 40

A run is a model with its mode, optimizer state, pins and micro-batches per step. A shape is its ranks, stage,
`reduce.when`, stages of a pipeline, replicas. Every run is trained on 1, 2 and 4 ranks, at three stages, and
most in a pipeline and with replicas; one on 8 ranks. Without a pipeline it is a loop over
`engine.micro_batches_of_this_rank()`, in one `engine.train_batch`. Two runs go through kills as well: ranks
get SIGKILL at random moments, all at once or one of them, so that the others must notice, and the run goes on
from its newest checkpoint on a shape drawn at random.

gloo ranks of one thread each. The exit code is 1 where anything differs, hangs or fails.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parent))
from result import Result, flags

from zerodrift import Checkpoints, initialize
from zerodrift.errors import RankError
from zerodrift.pipeline.cut import Parts

VOCABULARY, WIDTH, LENGTH, SAMPLES = 61, 16, 12, 2
SAVE_EVERY = 10
"""Steps between the checkpoints of a run that is killed."""
LONGEST = 600.0
"""Seconds after which ranks that have not ended count as hung."""


# --- what is trained --------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A top-1 mixture of three stacked experts, which all run on all tokens, in products of one shape."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        shares = F.one_hot(chosen, len(self.up)).t() * weights
        made = F.gelu(flat.expand(len(self.up), -1, -1) @ self.up) @ self.down
        return (made * shares[:, :, None].to(made.dtype)).sum(0).view_as(x)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """A block that mixes each token with the one before."""

    def __init__(self, moe: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp: nn.Module = Experts() if moe else _mlp()
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.norm(x) + F.pad(x, (0, 0, 1, 0))[:, :-1]
        return x + F.dropout(self.mlp(both), self.dropout, self.training)


class Model(nn.Module):
    """A mixture of experts, or a dense model with dropout; returns a loss."""

    def __init__(self, moe: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dropout = 0.0 if moe else 0.1
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(moe, self.dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = before(self, tokens)
        for layer in self.layers:
            x = layer(x)
        return after(self, x, tokens)


def before(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.dropout(model.tokens(tokens), model.dropout, model.training)


def after(model: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    logits = model.head(model.norm(hidden))[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def data(step: int, number: int) -> torch.Tensor:
    """Return sequences of tokens with a constant stride, which a model can learn."""
    generator = torch.Generator().manual_seed(1_000_003 * step + number)
    first, stride = torch.randint(VOCABULARY, (2, SAMPLES, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH)) % VOCABULARY


@dataclass(frozen=True)
class Run:
    """A training run, whose bits must not depend on its shape."""

    model: str
    mode: str
    state: str
    pins: str = ""
    total: int = 4
    """Micro-batches per step, over all ranks."""

    def __str__(self) -> str:
        pins = f"pins {self.pins}" if self.pins else ""
        return ", ".join(filter(None, [self.model, self.mode, self.state, pins, f"{self.total} a step"]))


@dataclass(frozen=True)
class Shape:
    """Ranks, stage, time of reduction, pipeline stages and replicas of a run."""

    ranks: int
    stage: int
    when: str
    stages: int = 1
    """Pipeline stages."""
    replicate: int = 1

    def __str__(self) -> str:
        pipeline = f"pipeline {self.stages}" if self.stages > 1 else ""
        replicas = f"replicas {self.replicate}" if self.replicate > 1 else ""
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return ", ".join(filter(None, [ranks, f"stage {self.stage}", self.when, pipeline, replicas]))


def config(run: Run, shape: Shape, steps: int) -> dict[str, Any]:
    written: dict[str, Any] = {
        "precision": {
            "mode": run.mode,
            "state": run.state,
            "reduce": {"order": "tree", "when": shape.when},
            "rules": [{"match": run.pins, "pin": "fp32"}] if run.pins else [],
        },
        "zero_optimization": {"stage": shape.stage},
        "gradient_accumulation_steps": run.total * shape.stages // shape.ranks,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 20, "total_num_steps": max(steps, 100)},
        },
    }
    if run.mode == "fp16":  # begins too high, and soon is so again
        written["fp16"] = {"initial_scale_power": 22, "loss_scale_window": 20, "hysteresis": 1}
    if shape.stages > 1:
        written["pipeline"] = {"stages": shape.stages, "schedule": "1f1b"}
    if shape.replicate > 1:
        written["sharding"] = {"replicate": shape.replicate}
    return written


NORMS, ROUTERS = "*norm*", "*.router.*"
RUNS = [
    Run("dense", "fp32", "8bit"),
    Run("moe", "fp32", "bf16-stochastic"),
    Run("dense", "bf16", "bf16-stochastic", NORMS),
    Run("moe", "bf16", "8bit", ROUTERS),
    Run("dense", "fp16", "fp32", NORMS),
    Run("moe", "fp16", "8bit", ROUTERS),
    Run("dense", "autocast-bf16", "fp32"),
    Run("moe", "autocast-bf16", "bf16-stochastic", ROUTERS),
]
KILLED = [RUNS[2], RUNS[5]]
EIGHT = Run("moe", "bf16", "fp32", ROUTERS, total=8)
ON_EIGHT = [Shape(1, 0, "last"), Shape(8, 3, "every")]

KINDS = [(1, 1), (2, 1), (1, 2)]
"""(pipeline stages, replicas)"""
WHEN = ("last", "every")


def shapes_of(place: int) -> list[Shape]:
    """Return the shapes of a run: 1, 2 and 4 ranks, two kinds, three stages, both times."""
    kinds = [KINDS[0], KINDS[place % 3], KINDS[(place + 1) % 3]]
    stages = [(place + turn) % 4 for turn in (3, 0, 1)]
    whens = [WHEN[(stage + place // 4) % 2] for stage in stages]
    return [
        Shape(ranks, stage, when, *kind)
        for ranks, kind, stage, when in zip((1, 2, 4), kinds, stages, whens, strict=True)
    ]


DEALT = [*((run, shapes_of(place)) for place, run in enumerate(RUNS)), (EIGHT, ON_EIGHT)]
DRAWN = [shape for run, shapes in DEALT for shape in shapes if run != EIGHT]
"""Shapes for the runs that are killed."""


# --- on a rank --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """The work of one launch of ranks."""

    run: Run
    shape: Shape
    steps: int
    saves: str = ""
    """Folder of the checkpoints; empty for a run without kills."""
    asynchronous: bool = False


def run_rank(rank: int, folder: str, task: Task, reached: Any) -> None:
    """Train to the last step, from the newest checkpoint if there is one, and write the outcome."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=task.shape.ranks,
            timeout=timedelta(seconds=LONGEST),
        )
        told = train_task(task, reached)
    except RankError as error:
        told = {"missed": str(error)}
    except Exception:
        told = {"failed": traceback.format_exc()}
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(told))
    path.with_suffix(".part").rename(path)
    os._exit(0)


def train_task(task: Task, reached: Any) -> dict[str, Any]:
    engine = initialize(
        Model(task.run.model == "moe"),
        config=config(task.run, task.shape, task.steps),
        parts=Parts("layers", before, after) if task.shape.stages > 1 else None,
        device="cpu",
        quiet=True,
    )
    engine.seed = 5
    saves = task.saves and Checkpoints(engine, task.saves, keep=2, asynchronous=task.asynchronous, quiet=True)
    if saves:
        saves.resume()
    numbers = engine.micro_batches_of_this_rank()
    first = engine.global_steps + engine.skipped_steps
    reached[:] = [first, first]
    for step in range(first, task.steps):
        if task.shape.stages > 1:
            engine.train_batch([data(step, number) for number in numbers])
        else:
            for number in numbers:
                engine.seed_micro_batch(number)
                engine.backward(engine(data(step, number)))
                engine.step()
        reached[1] = step + 1
        if saves and (step + 1) % SAVE_EVERY == 0:
            saves.save()
    if saves:
        saves.wait()
    values = dict(whole_values(engine))
    told = {"skipped": engine.skipped_steps, "digest": str(engine.digest()), "values": values}
    engine.destroy()
    return told


def whole_values(engine: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the SHA-256 of each whole weight, master and moment."""
    for row in sorted(engine.plan.rows, key=lambda row: row.name):
        parameter = engine.parameter(row.name)
        state = parameter.state
        kinds = {"weight": parameter.value, "master": parameter.master}
        for kind, value in (kinds | {name: state[name] for name in sorted(state)}).items():
            found = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
            yield f"{kind} {row.name}", hashlib.sha256(f"{value.dtype}".encode() + found).hexdigest()


# --- ranks, from outside ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The outcome of a run on a shape, or through kills."""

    run: Run
    where: str
    steps: int
    skipped: int = 0
    kills: int = 0
    digest: str = ""
    values: dict[str, str] = field(default_factory=dict)
    wrong: str = ""
    """The error; empty if the run ended well."""

    @property
    def sha(self) -> str:
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()

    def difference(self, other: Outcome) -> str:
        """Describe the first difference from another shape of the same run; empty if there is none."""
        if self.wrong or other.wrong:
            return self.wrong or "nothing to compare with"
        if not self.skipped and self.run.mode == "fp16":
            return "no step overflowed"
        names = [
            name for name in self.values | other.values if self.values.get(name) != other.values.get(name)
        ]
        if names:
            return f"other: {len(names)} of {len(other.values)} values, first {names[0]}"
        apart = [what for what in ("skipped", "digest") if getattr(self, what) != getattr(other, what)]
        return f"other: {', '.join(apart)}" if apart else ""


PRELOAD = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining", "zerodrift.api"]
"""Modules that the first step and save of a process would import."""


def processes() -> Any:
    """Return a context for processes that begin with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


@contextmanager
def start(task: Task) -> Iterator[tuple[list[BaseProcess], Any, Path]]:
    """Start the ranks; yield them, their first and current steps, and their folder. Kill them in the end."""
    context = processes()
    with tempfile.TemporaryDirectory() as folder:
        reached = context.Array("q", [-1, -1], lock=False)
        ranks = [
            context.Process(target=run_rank, args=(rank, folder, task, reached), daemon=True)
            for rank in range(task.shape.ranks)
        ]
        try:
            for rank in ranks:
                rank.start()
            yield ranks, reached, Path(folder)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def reports(ranks: Sequence[BaseProcess], folder: Path, killed: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Return the reports of the ranks that were not killed; a hang is reported as one."""
    deadline = time.monotonic() + LONGEST
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    told = []
    for number, rank in enumerate(ranks):
        path = folder / f"{number}.json"
        if path.exists():
            told.append(json.loads(path.read_text()))
        elif number not in killed:
            hung = rank.exitcode is None
            told.append({"failed": f"rank {number} {'hung' if hung else f'died with {rank.exitcode}'}"})
    return told


def outcome(found: Outcome, told: Sequence[dict[str, Any]]) -> Outcome:
    """Add the reports of all ranks, which must be equal, to the outcome."""
    wrong = [one.get("failed") or one.get("missed") for one in told if "values" not in one]
    if wrong:
        found.wrong = str(wrong[0])
    elif any(one != told[0] for one in told):
        found.wrong = "ranks have read other values"
    else:
        found.skipped, found.digest, found.values = (told[0][key] for key in ("skipped", "digest", "values"))
    return found


def undisturbed(run: Run, shape: Shape, steps: int) -> Outcome:
    with start(Task(run, shape, steps)) as (ranks, _, folder):
        return outcome(Outcome(run, str(shape), steps), reports(ranks, folder))


def with_kills(
    run: Run, shapes: Sequence[Shape], steps: int, kills: int, say: Callable[[str], None]
) -> Outcome:
    """Run through so many kills, spread over the steps; each restart draws its shape."""
    draw = random.Random(str(run))
    lives: list[Shape] = []
    found = Outcome(run, "", steps)
    with tempfile.TemporaryDirectory() as saves:
        while True:
            lives.append(draw.choice(shapes))
            found.where = f"{len(lives)} lives on {len(set(lives))} shapes"
            with start(Task(run, lives[-1], steps, saves, draw.random() < 0.5)) as (ranks, reached, folder):
                if found.kills == kills:
                    return outcome(found, reports(ranks, folder))
                who = draw.choice([[*range(len(ranks))], [draw.randrange(len(ranks))]])
                spread = draw.uniform(0.0, 1.8) / (kills - found.kills + 1)
                alive = kill(ranks, who, reached, spread, steps)
                told = reports(ranks, folder, who)
                failed = [one["failed"] for one in told if "failed" in one]
                if failed or not alive:
                    found.wrong = str(failed[0] if failed else "it ended before it was killed")
                    return found
                first, last = reached
            found.kills += 1
            which = "all ranks" if len(who) == len(ranks) else f"rank {who[0]}"
            say(f"    kill {found.kills}: {which} of {lives[-1]}, begun at {first}, after step {last}")


def kill(ranks: Sequence[BaseProcess], who: Sequence[int], reached: Any, spread: float, steps: int) -> bool:
    """Kill ranks after a share of the remaining steps and a short delay; return False if they had ended."""
    deadline = time.monotonic() + LONGEST
    while reached[0] < 0 or reached[1] < reached[0] + int(spread * (steps - reached[0])):
        if wait([rank.sentinel for rank in ranks], 0.001) or time.monotonic() > deadline:
            return False
    time.sleep(spread % 0.01 * 5)
    alive = all(ranks[number].is_alive() for number in who)
    for number in who:
        ranks[number].kill()
    return alive


# --- what is asked for ------------------------------------------------------------------------------------


def main() -> None:
    parser = flags(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10, help="of each of two runs; 0 leaves them out")
    parser.add_argument("--only", default="", help="words that a run must have, such as `moe fp16`")
    parser.add_argument("--ranks", type=int, default=8, help="the most that are started")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    result = Result.begin(f"One training run on many shapes, {options.steps} steps", options)

    def asked(run: Run) -> bool:
        return all(word in str(run).replace(",", "").split() for word in options.only.split())

    todo: list[tuple[Run, Shape | None]] = []
    for run, shapes in DEALT:
        if asked(run):
            todo += [(run, shape) for shape in shapes if shape.ranks <= options.ranks]
            todo += [(run, None)] * (run in KILLED and options.kills > 0)
    cost = [1 if shape else 1 + options.kills // 5 for _, shape in todo]
    begun = time.monotonic()
    first: dict[Run, Outcome] = {}
    rows: list[list[str | int]] = []
    differ = 0
    for number, (run, shape) in enumerate(todo):
        if shape:
            found = undisturbed(run, shape, options.steps)
        else:
            drawn = [shape for shape in DRAWN if shape.ranks <= options.ranks]
            found = with_kills(run, drawn, options.steps, options.kills, lambda text: print(text, flush=True))
        apart = found.difference(first.setdefault(run, found))
        differ += bool(apart)
        told = apart.strip().splitlines()[-1] if apart else "same"
        rows.append(
            [str(found.run), found.where, found.steps, found.skipped, found.kills, found.sha[:12], told]
        )
        spent = time.monotonic() - begun
        left = spent * sum(cost[number + 1 :]) / sum(cost[: number + 1])
        time_left = f"{number + 1:2} of {len(todo)}, {spent:4.0f} s, {left:4.0f} s left"
        print(f"{time_left}: {found.run}; {found.where}: {told}", flush=True)
        if len(apart.splitlines()) > 1:
            print(apart, flush=True)
    columns = {"run": "<62", "shape": "<40", **dict.fromkeys(("steps", "skipped", "kills"), "")}
    table = result.table({**columns, "SHA-256": "<12", "as the first": "<12"})
    for row in rows:
        table.row(*row)
    result.save(options.save)
    print(f"\n{differ} of {len(todo)} differ, in {time.monotonic() - begun:.0f} s")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
