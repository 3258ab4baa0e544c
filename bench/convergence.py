"""A small language model in every master x state scheme: do the loss curves part?

    python bench/convergence.py --plot docs/convergence.svg       # all schemes, two seeds
    python bench/convergence.py --spike 50 --steps 3000 --seeds 1 --plot docs/spike.svg \
        --only "mode fp32,split/fp32,split/bf16-stochastic,split/8bit,split/bf16 (forced)"

A byte-level decoder learns the sources of Python's standard library, so nothing is downloaded. Mode bf16,
AdamW with beta2 0.999, one rank (stages and ranks change no bit). `fp32` alone is the reference: mode fp32,
nothing rounded. Every scheme sees the same batches from the same weights; a seed changes both, so the spread
over seeds is what chance alone does. The loss of a run is the mean over its last 50 steps; `held out` is the
mean over files that were not trained on. `shrank` is the share of second moments that are smaller than they
were 25 steps before, over the second half of the run: gradients rise and fall, so moments must.

With `--spike STEP` the loss of that step is multiplied by 100, as a broken batch would, and nothing is
clipped: afterwards every second moment has to come down again.

`bf16 (forced)` is refused by zerodrift for a beta2 above 0.98. The script gets it as a user could: it plans
with 0.98 and writes 0.999 into the parameter group afterwards.

The plot needs the `plot` extra.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT
from result import Result, flags

from zerodrift import initialize

MASTERS = ("fp32", "split", "same")
STATES = ("fp32", "bf16-stochastic", "8bit", FORCED := "bf16 (forced)")
REFERENCE = "mode fp32"
BETA2 = 0.999
LAST = 50
LOOK = 25
"""Steps between two measurements of the second moments."""
SPIKE = 100.0


@dataclass
class Curves:
    """Losses and second moments of one run."""

    scheme: str
    seed: int
    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0
    seconds: float = 0.0
    moments: list[float] = field(default_factory=list)
    """The median second moment, every LOOK steps."""
    shrank: list[float] = field(default_factory=list)
    """The share of second moments that fell since the last measurement."""

    @property
    def final(self) -> float:
        return statistics.fmean(self.losses[-LAST:])

    @property
    def shrinking(self) -> float:
        return statistics.fmean(self.shrank[len(self.shrank) // 2 :]) if self.shrank else 0.0


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    results = []
    for result in read(options.read) if options.read else measure(options):
        results.append(result)
        if options.json:  # after every run: one that is cut short leaves what it has
            text = json.dumps({"results": [asdict(result) for result in results]})
            options.json.write_text(text + "\n")
    show(results, options)
    if options.plot:
        draw(results, options.plot)


def parse() -> argparse.Namespace:
    parser = flags(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="comma-separated schemes, as the table names them")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--spike", type=int, default=-1, help="the step of a broken batch; none by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path, help="show and draw the figures of an earlier --json instead")
    parser.add_argument("--plot", type=Path, help="where to draw")
    return parser.parse_args()


def schemes() -> list[str]:
    return [REFERENCE, *(f"{master}/{state}" for master in MASTERS for state in STATES)]


# --- text -----------------------------------------------------------------------------------------------


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the standard library as bytes: (training data, every tenth file as held-out data)."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 200_000)
    texts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        texts[number % 10 == 0].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in texts)
    return train, held_out


def sample(text: torch.Tensor, options: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - options.length, (options.batch, 1), generator=generator)
    return text[starts + torch.arange(options.length)].long()


# --- runs -----------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Iterator[Curves]:
    text, other = corpus()
    chosen = options.only.split(",") if options.only else schemes()
    unknown = [name for name in chosen if name not in schemes()]
    if unknown:
        raise SystemExit(f"`--only`: must be of {', '.join(schemes())}; got {', '.join(unknown)}.")
    for seed in range(options.seeds):
        for scheme in chosen:
            result = run(scheme, seed, text, other, options)
            print(
                f"{scheme:24} seed {seed}  {result.final:.4f}  held out {result.held_out:.4f}"
                f"  {result.seconds:.0f} s",
                flush=True,
            )
            yield result


def run(
    scheme: str, seed: int, text: torch.Tensor, other: torch.Tensor, options: argparse.Namespace
) -> Curves:
    model = GPT(options.width, options.layers, vocabulary=256, length=options.length)
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    engine = initialize(model, config=config(scheme, options), device="cpu", quiet=True)
    if scheme.endswith(FORCED):
        for group in engine.optimizer.param_groups:  # type: ignore[union-attr]
            group["betas"] = (0.9, BETA2)
    result, start = Curves(scheme, seed), time.perf_counter()
    generator = torch.Generator().manual_seed(seed)
    moments = None
    for step in range(options.steps):
        loss = engine(sample(text, options, generator))
        engine.backward(loss * SPIKE if step == options.spike else loss)
        engine.step()
        result.losses.append(loss.item())
        if (step + 1) % LOOK == 0:
            before, moments = moments, second_moments(engine)
            result.moments.append(moments.median().item())
            if before is not None:
                result.shrank.append((moments < before).float().mean().item())
    result.seconds = time.perf_counter() - start
    generator.manual_seed(10_000)
    with torch.no_grad():
        held_out = [engine(sample(other, options, generator)).item() for _ in range(50)]
    result.held_out = statistics.fmean(held_out)
    engine.destroy()
    return result


def second_moments(engine: Any) -> torch.Tensor:
    states = (engine.parameter(row.name).state["exp_avg_sq"] for row in engine.plan.rows)
    return torch.cat([state.flatten() for state in states])


def config(scheme: str, options: argparse.Namespace) -> dict[str, Any]:
    forced = scheme.endswith(FORCED)
    if scheme == REFERENCE:
        precision = {"mode": "fp32"}
    else:
        master, _, state = scheme.partition("/")
        precision = {"mode": "bf16", "master": master, "state": "bf16" if forced else state}
    params = {"lr": options.lr, "betas": [0.9, 0.98 if forced else BETA2], "weight_decay": 0.1}
    return {
        "precision": precision,
        "gradient_clipping": 1.0 if options.spike < 0 else 0,
        "optimizer": {"type": "AdamW", "params": params},
    }


def read(path: Path) -> Iterator[Curves]:
    for item in json.loads(path.read_text())["results"]:
        yield Curves(**item)


# --- what is shown --------------------------------------------------------------------------------------


def by_scheme(results: list[Curves]) -> dict[str, list[Curves]]:
    found: dict[str, list[Curves]] = {}
    for result in results:
        found.setdefault(result.scheme, []).append(result)
    return found


def show(results: list[Curves], options: argparse.Namespace) -> None:
    """Print means over seeds, and the differences from the reference within a seed."""
    base = {result.seed: result.final for result in results if result.scheme == REFERENCE}
    kept = Result.begin(f"{options.steps} steps, {options.seeds} seeds, lr {options.lr}", options)
    columns = {"master": "", "state": "<15", f"loss, last {LAST} steps": ".4f", "held out": ".4f"}
    table = kept.table({**columns, f"above {REFERENCE} (range over seeds)": "", "shrank": ".1%"})
    for scheme, runs in by_scheme(results).items():
        master, _, state = scheme.partition("/")
        above = [each.final - base[each.seed] for each in runs if each.seed in base and scheme != REFERENCE]
        spread = f"{statistics.fmean(above):+.4f} ({min(above):+.4f} to {max(above):+.4f})" if above else None
        means = (statistics.fmean(getattr(each, what) for each in runs) for what in ("final", "held_out"))
        shrank = statistics.fmean(each.shrinking for each in runs)
        table.row(master, state or None, *means, spread, shrank)
    if len(base) > 1:
        print(f"\nmode fp32 over seeds: {min(base.values()):.4f} to {max(base.values()):.4f}")
    kept.save(options.save)


def draw(results: list[Curves], path: Path) -> None:
    """Draw losses, their distance from the reference, and second moments beside those of fp32 state."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zerodrift"  # the same file for the same figures
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    runs = by_scheme(results)
    losses = {name: torch.tensor([each.losses for each in found]).mean(0) for name, found in runs.items()}
    moments = {name: torch.tensor([each.moments for each in found]).mean(0) for name, found in runs.items()}
    sides = (
        ("masters, with fp32 state", [f"{master}/fp32" for master in MASTERS]),
        ("states, with a split master", [f"split/{state}" for state in STATES]),
    )
    sides = tuple((title, names) for title, names in sides if sum(name in runs for name in names) > 1)
    figure, axes = pyplot.subplots(
        3,
        len(sides),
        figsize=(5.5 * len(sides), 9),
        sharex=True,
        sharey="row",
        height_ratios=(3, 2, 2),
        layout="constrained",
        squeeze=False,
    )
    for column, (title, names) in enumerate(sides):
        upper, middle, lower = axes[:, column]
        for name in (name for name in [REFERENCE, *names] if name in runs):
            style = {"color": "black", "linestyle": "--"} if name == REFERENCE else {"linewidth": 1.2}
            upper.plot(*smooth(losses[name]), label=name, **style)
            if REFERENCE in runs:
                middle.plot(*smooth(losses[name] - losses[REFERENCE]), **style)
                looks = torch.arange(1, len(moments[name]) + 1) * LOOK
                lower.plot(looks, moments[name] / moments[REFERENCE], **style)
        upper.set_title(title)
        upper.legend()
        lower.set_xlabel("step")
    axes[0, 0].set_ylabel("loss (nats per byte)")
    axes[1, 0].set_ylabel(f"loss above {REFERENCE}")
    axes[2, 0].set_ylabel(f"median second moment,\ntimes that of {REFERENCE}")
    figure.savefig(path, metadata={"Date": None})
    print(f"drawn: {path}")


def smooth(curve: torch.Tensor, over: int = 20, points: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (steps, means over the last `over` steps), thinned to about `points`."""
    means = curve.unfold(0, min(over, len(curve)), 1).mean(-1)
    steps = torch.arange(len(means)) + min(over, len(curve))
    every = max(1, len(means) // points)
    return steps[::every], means[::every]


if __name__ == "__main__":
    main()
