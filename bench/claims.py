"""The claims of the README and of `docs/benchmarks.md`, each with its peers, its limit and its source.

Every figure is a cell of a file in `bench/results`; none is written here. One that misses its limit is shown
as missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from result import RESULTS, Cell, Result, format_cell, read


@dataclass(frozen=True)
class Figure:
    """A cell, and the name of the result that it is in."""

    value: float
    form: str
    source: str

    def __str__(self) -> str:
        return format_cell(self.value, self.form)


@dataclass(frozen=True)
class Limit:
    """The bound that a figure should keep."""

    value: float
    why: str = "goal"
    """`goal`, the peer whose figure it is, or what was counted."""
    at_least: bool = False


@dataclass(frozen=True)
class Claim:
    """A figure, its limit and the figures that it is compared with."""

    section: str
    """The heading on the page that has its table."""
    what: str
    figure: Figure
    beside: Mapping[str, Figure]
    """Other figures of the same run."""
    limit: Limit | None

    @property
    def met(self) -> bool | None:
        """Compare the figures as they are printed, because hidden digits decide nothing."""
        if self.limit is None:
            return None
        figure, limit = (
            float(format_cell(value, self.figure.form).strip("%"))
            for value in (self.figure.value, self.limit.value)
        )
        return figure >= limit if self.limit.at_least else figure <= limit


IN_THE_README = (
    "Time of a step at stage 3, fp32, relative to DDP",
    "Peak MiB of a step at stage 3, 92M parameters, fp32, two ranks",
    "Loading 2 GB into fp32 shards: peak MB beyond the shard",
    "A step at stage 3 on 4096 ranks: host ms",
)
"""Names of the claims that the README shows too, met or not."""


class Results(dict[str, Result]):
    """The results of a folder, by name."""

    def __init__(self, folder: Path = RESULTS) -> None:
        super().__init__({path.stem: read(path) for path in sorted(folder.glob("*.json"))})

    def __missing__(self, name: str) -> Result:
        raise FileNotFoundError(
            f"bench/results/{name}.json: must be there, a page shows it. Measure it with `--save {name}`."
        )

    def all(self, name: str, column: str, *rows: Cell) -> list[Figure]:
        """Return the figures of a column, of the rows that have these names among their cells."""
        found = []
        for table in self[name].tables:
            if column not in table.columns:
                continue
            place = list(table.columns).index(column)
            for row in table.rows:
                value = row[place]
                if all(each in row for each in rows):
                    assert isinstance(value, (int, float)), (name, column, row)
                    found.append(Figure(value, table.columns[column], name))
        return found

    def one(self, name: str, column: str, *rows: Cell) -> Figure:
        (found,) = self.all(name, column, *rows)
        return found

    def several(self, name: str, column: str, rows: Mapping[str, str]) -> dict[str, Figure]:
        """Return a figure for each label, from the row of that name."""
        return {said: self.one(name, column, row) for said, row in rows.items()}


def claims(results: Results) -> Iterator[Claim]:
    """Yield all claims in the order of the page."""
    yield from _step(results)
    yield from _peak(results)
    yield from _update(results)
    yield from _loading(results)
    yield from _what_stays(results)
    yield from _on_a_device(results)
    yield from _pipelines(results)
    yield from _order(results)
    yield from _many_ranks(results)
    yield from _simulated(results)
    yield from _watching(results)
    loop = results.one("trainer", "loop to engine", "trainer's loop")
    yield Claim("The trainer's loop", "Time of a trainer step, relative to the engine", loop, {}, Limit(1.03))
    yield from _long_run(results)
    yield from _audit(results)


def _step(results: Results) -> Iterator[Claim]:
    column = "ratio to ddp"
    for source, dtype in (("step-fp32", "fp32"), ("step-bf16", "bf16")):
        for stage in range(4):
            peers = {"FSDP2": "fsdp2", "FSDP2 over pairs": "fsdp2-p2p", "DeepSpeed": f"ds-{max(stage, 1)}"}
            yield Claim(
                "One step",
                f"Time of a step at stage {stage}, {dtype}, relative to DDP",
                results.one(source, column, f"zd-{stage}"),
                results.several(source, column, peers),
                Limit(1.10 if stage == 3 else 1.05),
            )


def _update(results: Results) -> Iterator[Claim]:
    fused = {"torch's fused AdamW": "torch AdamW fused"}
    for source, size in (("update-20M", "20M"), ("update-200M", "200M")):
        for master in ("fp32 master", "split"):
            what, row = f"Update of {size} elements, {master}", f"{master}, fp32 state, fp32 grad"
            peers = {**fused, "DeepSpeed's": "DeepSpeed CPU Adam"}
            peers["the bytes alone"] = f"limit: the bytes of {master}"
            copies, chain = (results.one(source, column, row) for column in ("x copy_", "of chain"))
            beside = results.several(source, "x copy_", peers)
            goal = Limit(1.6, at_least=True)
            yield Claim("The update", f"{what}: bytes per second, relative to a copy", copies, beside, goal)
            beside = results.several(source, "of chain", {**fused, "with the norm": f"norm + {master}"})
            what = f"{what}: time, relative to unscale, clip, fused AdamW and cast"
            yield Claim("The update", what, chain, beside, Limit(0.55))


def _loading(results: Results) -> Iterator[Claim]:
    for source, dtype in (("load-fp32", "fp32"), ("load-bf16", "bf16")):
        peers = {"DCP": "dcp"}
        if dtype == "fp32":
            peers |= {"`from_pretrained`": "from_pretrained", "DeepSpeed": "deepspeed"}
        for column, what in (("s", "seconds"), ("beyond", "peak MB beyond the shard")):
            beside = results.several(source, column, peers)
            limit = Limit(beside["DCP"].value, "DCP") if column == "s" else Limit(150)
            figure = results.one(source, column, "zerodrift")
            yield Claim("Loading", f"Loading 2 GB into {dtype} shards: {what}", figure, beside, limit)


def _peak(results: Results) -> Iterator[Claim]:
    peers = {"FSDP2": "fsdp2", "DDP": "ddp"}
    what = "Peak MiB of a step at stage 3, 92M parameters, fp32, two ranks"
    figure = results.one("step-memory", "peak MiB", "zd-3")
    beside = results.several("step-memory", "peak MiB", peers)
    yield Claim("One step", what, figure, beside, Limit(1000))


def _what_stays(results: Results) -> Iterator[Claim]:
    peers = {"FSDP2": "fsdp2", "with its gradients": "fsdp2 with gradients", "DeepSpeed stage 3": "ds-3"}
    beside = results.several("persistent", "tensors", peers)
    for row, state in (("zd-3", "fp32"), ("zd-3 bf16-stochastic", "bf16-stochastic"), ("zd-3 8bit", "8bit")):
        plan = Limit(results.one("persistent", "planned", row).value, "the plan")
        what = f"Bytes per parameter between steps, over all ranks: split master, {state} state"
        figure = results.one("persistent", "tensors", row)
        yield Claim("What stays between steps", what, figure, beside, plan)


def _on_a_device(results: Results) -> Iterator[Claim]:
    ratios = results.all("gpu-memory", "off")
    furthest = max(ratios, key=lambda figure: abs(figure.value))
    far = Figure(abs(furthest.value), ".1%", furthest.source)
    what = f"Planned peak of Llama-3-8B against the predicted one: largest of {len(ratios)} errors"
    yield Claim("Memory on a device", what, far, {}, Limit(0.05))


def _pipelines(results: Results) -> Iterator[Claim]:
    engines = ("zerodrift", "zerodrift queue", "zerodrift autograd")
    ratios = [figure for engine in engines for figure in results.all("pipeline", "to torch", engine)]
    ratios.sort(key=lambda figure: figure.value)
    what = "Time of a pipeline step, relative to torch over `fully_shard`: slowest of six schedules"
    yield Claim("Pipelines", what, ratios[-1], {"the fastest": ratios[0]}, Limit(1.0, "torch"))


def _order(results: Results) -> Iterator[Claim]:
    section = "The order of sums"
    ratios = sorted(results.all("order-steps", "auto / rank", "tree"), key=lambda figure: figure.value)
    what = f"Time of a step by the default tree, relative to the order of ranks: median of {len(ratios)}"
    beside = {"the fastest": ratios[0], "the slowest": ratios[-1]}
    yield Claim(section, what, ratios[len(ratios) // 2], beside, Limit(1.03))
    most = results["order-scale"].tables[0].rows[-1][0]
    orders = {"by the tree": "tree: ms", "NCCL's own": "native: ms"}
    beside = {name: results.one("order-scale", column, most) for name, column in orders.items()}
    what, time = f"One reduction on {most} ranks", results.one("order-scale", "rank: ms", most)
    yield Claim(section, f"{what}: host ms", time, beside, None)
    afar, beside = (results.one("order-scale", f"{order}: afar", most) for order in ("tree", "rank"))
    limit = Limit(1 / 8, "counted: a half, a quarter and an eighth stay")
    what = f"{what} by the tree: share of bytes between machines of 8 ranks"
    yield Claim(section, what, afar, {"in the order of ranks": beside}, limit)
    last = [row[-1] for table in results["same-bits"].tables for row in table.rows]
    same = Figure(last.count("same"), "", "same-bits")
    what = "Runs at other stages, on other ranks, or killed and resumed, that end with the same bits"
    yield Claim("The same bits", what, same, {}, Limit(len(last), "all", at_least=True))


def _many_ranks(results: Results) -> Iterator[Claim]:
    for ranks in (8, 64, 512, 4096, 16384):
        peer = results.one("host", "ms", "fsdp2", ranks)
        what, figure = (
            f"A step at stage 3 on {ranks} ranks: host ms",
            results.one("host", "ms", "zd-3-native", ranks),
        )
        limit = Limit(peer.value / 2, "goal: half of FSDP2's")
        yield Claim("Many ranks", what, figure, {"FSDP2": peer}, limit)


def _simulated(results: Results) -> Iterator[Claim]:
    for ranks in (2, 4):
        ratios = results.all("simulate", "simulated / measured", f"{ranks} ranks")
        furthest = max(ratios, key=lambda figure: abs(figure.value - 1))
        far = Figure(abs(furthest.value - 1), ".0%", "simulate")
        what = f"Simulated step on {ranks} ranks against the measured one: largest of {len(ratios)} errors"
        yield Claim("Simulated steps", what, far, {}, Limit(0.15))


def _watching(results: Results) -> Iterator[Claim]:
    for source, ranks in (("check-short", ""), ("check-long", ""), ("check-ranks", " on two ranks")):
        for kind in ("fp32", "autocast bf16"):
            alone, watched, ended = (
                results.one(source, column, kind) for column in ("step ms", "watched", "ended")
            )
            what = f"Time of a watched step, relative to an unwatched one of {alone} ms{ranks}, {kind}"
            yield Claim("Watching", what, watched, {"a step after it": ended}, Limit(1.10))


def _long_run(results: Results) -> Iterator[Claim]:
    columns = {"memory": 1.02, "files": 1.0, "threads": 1.0}
    for column, most in columns.items():
        figure = results.one("soak", column, "end to begin")
        what = f"{results['soak'].title}: {column} at the end, relative to the beginning"
        yield Claim("A long run", what, figure, {}, Limit(most))


def _audit(results: Results) -> Iterator[Claim]:
    for source in ("audit-pins", "audit-500m"):
        for table in results[source].tables:
            removed = {str(row[0]): row[list(table.columns).index("removed")] for row in table.rows}
            figures = {name: Figure(float(value or 0), ".1%", source) for name, value in removed.items()}
            ours = next(figure for name, figure in figures.items() if name.startswith("audit"))
            what = f"Drift that the audit's pins remove: {table.title}"
            beside = {"norms, router and head": figures["norms, router, head"]}
            yield Claim("The audit", what, ours, beside, Limit(0.8, at_least=True))
