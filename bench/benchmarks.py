"""Write the generated parts of `docs/benchmarks.md` and the README: claims, tables of results, plots.

A page has `<!-- claims: all -->` or `<!-- result: NAME -->`, and below it, up to `<!-- end -->`, what this
module makes of the files in `bench/results`. `tools/refresh.py` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import plots
from claims import IN_THE_README, Claim, Results, claims
from result import Cell, Result, Table, format_cell

BLOCK = re.compile(r"(<!-- (claims|result): (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def refresh(text: str, results: Results) -> str:
    """Return a page with its claims and tables written anew."""

    def block(found: re.Match[str]) -> str:
        kind, name = found[2], found[3]
        made = result_text(name, results[name]) if kind == "result" else claims_text(name == "main", results)
        return f"{found[1]}\n{made}\n\n{found[4]}"

    return BLOCK.sub(block, text)


# --- claims -------------------------------------------------------------------------------------------------


def claims_text(main: bool, results: Results) -> str:
    """Return the table of claims: the first few for the README, all with their results for the page."""
    if main:
        rows = [
            _claim("docs/benchmarks.md", claim) for claim in claims(results) if claim.what in IN_THE_README
        ]
        return _markdown(["what", "here", "beside it", "limit", "met"], "lrlll", rows)
    rows = [[*_claim("", claim), *_source(claim, results)] for claim in claims(results)]
    heads = ["what", "here", "beside it", "limit", "met", "script", "machine", "date"]
    return _markdown(heads, "lrllllll", rows)


def _claim(page: str, claim: Claim) -> list[str]:
    anchor = re.sub(r"[^\w\- ]", "", claim.section.lower()).replace(" ", "-")
    limit, met = "-", "-"
    if claim.limit is not None:
        way = "at least" if claim.limit.at_least else "at most"
        limit = f"{way} {format_cell(claim.limit.value, claim.figure.form)} ({claim.limit.why})"
        met = "yes" if claim.met else "**missed**"
    beside = ", ".join(f"{name} {figure}" for name, figure in claim.beside.items())
    return [f"[{claim.what}]({page}#{anchor})", str(claim.figure), beside or "-", limit, met]


def _source(claim: Claim, results: Results) -> list[str]:
    result = results[claim.figure.source]
    script = re.search(r"bench/\w+\.py", result.command or result.title)
    assert script, claim.figure.source
    return [f"`{script[0]}`", result.machine.partition(" (")[0], result.date]


# --- results ------------------------------------------------------------------------------------------------


def result_text(name: str, result: Result) -> str:
    """Return the tables of a result, and below them the command, the versions and the machine."""
    parts = [f"**{result.title}**"]
    for table in result.tables:
        parts += [table.title] * bool(table.title)
        sides = "".join("l" if table.left(column) else "r" for column in table.columns)
        parts.append(_markdown(table.columns, sides, map(table.texts, table.rows)))
    command = f"`{result.command}`" if result.command else "No command is kept"
    versions = ", ".join(f"{package} {number}" for package, number in result.versions.items())
    where = f"{result.machine}; {versions}; what else ran: {result.beside}"
    parts.append(f"{command}, {result.date}. {where}. [{name}.json](../bench/results/{name}.json)")
    return "\n\n".join(parts)


def _markdown(heads: Iterable[str], sides: str, rows: Iterable[Iterable[str]]) -> str:
    rules = ["---:" if side == "r" else "---" for side in sides]
    lines = [list(heads), rules, *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- plots --------------------------------------------------------------------------------------------------


DTYPES, SIZES = ("fp32", "bf16"), ("20M", "200M")
UPDATES = (
    *(
        f"{kind} grad"
        for kind in ("fp32 master, fp32 state, fp32", "split, fp32 state, fp32", "split, 8bit state, fp32")
    ),
    *("limit: the bytes of fp32 master", "limit: the bytes of split"),
    *("torch AdamW fused", "torch AdamW foreach", "torch AdamW default", "DeepSpeed CPU Adam"),
    "chain: unscale, clip, AdamW fused, cast",
)
"""Rows of the update benchmark that its plot shows."""


def plot_files(results: Results) -> dict[str, str]:
    """Return each file of `docs/img` with its picture."""

    def panel(
        name: str, column: str, title: str, *limits: tuple[float, str], only: Iterable[str] = ()
    ) -> plots.Bars:
        (table,) = results[name].tables
        place, bars = list(table.columns).index(column), []
        for row in table.rows:
            if str(row[0]) in only or not only:
                bars.append(_bar(str(row[0]), row[place], table.texts(row)[place]))
        return plots.Bars(title, tuple(bars), limits)

    goals = ((1.05, "goal of stages 0-2"), (1.10, "goal of stage 3"))
    steps = [panel(f"step-{dtype}", "ratio to ddp", dtype, *goals) for dtype in DTYPES]
    rest = panel("persistent", "resident", "between steps: bytes per parameter, over all ranks")
    peak = panel("load-fp32", "peak MB", "at the peak of loading 2 GB into fp32 shards: MB")
    step_peak = panel("step-memory", "peak MiB", "at the peak of a step, 92M parameters, fp32: MiB")
    goal = (1.6, "goal")
    updates = [panel(f"update-{n}", "x copy_", f"{n} parameters", goal, only=UPDATES) for n in SIZES]
    loads = [panel(f"load-{dtype}", "s", f"into {dtype} shards") for dtype in DTYPES]
    (one,), (host,) = results["order-scale"].tables, results["host"].tables
    reduction = [_line(f"order: {order}", one, f"{order}: ms") for order in ("tree", "native", "rank")]
    step = [_line(engine, host, "ms", engine) for engine in ("zd-3-native", "alone", "fsdp2")]
    return {
        "bench-step.svg": plots.bars("Time of a step on two gloo ranks, relative to DDP", steps),
        "bench-memory.svg": plots.bars("Memory of a rank", [rest, step_peak, peak]),
        "bench-update.svg": plots.bars("The optimizer's step: bytes per second, relative to a copy", updates),
        "bench-load.svg": plots.bars("Loading 2 GB on two ranks: seconds", loads),
        "bench-pipeline.svg": plots.bars(
            "Time of a pipeline step, relative to torch's schedules over fully_shard",
            [_pipelines(results["pipeline"].tables[0])],
        ),
        "bench-scale.svg": plots.lines(
            "A step at stage 3 and on FSDP2: host ms on rank 0", "ranks", "ms", step
        ),
        "bench-order.svg": plots.lines(
            "One reduction by the order of its sums: host ms", "ranks", "ms", reduction
        ),
    }


OURS = re.compile(r"zd-|zerodrift|split|fp32 (master|storage)|norm")


def _bar(name: str, value: Cell, text: str) -> plots.Bar:
    return plots.Bar(name, _number(value), text, OURS.match(name) is not None)


def _number(value: Cell) -> float:
    assert isinstance(value, (int, float)), value
    return value


def _pipelines(table: Table) -> plots.Bars:
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    bars = []
    for row in rows:
        if row["engine"] != "torch":
            name = f"{row['schedule']} {str(row['engine']).removeprefix('zerodrift')}".strip()
            ratio = _number(row["to torch"])
            bars.append(plots.Bar(name, ratio, format_cell(ratio, table.columns["to torch"]), True))
    return plots.Bars("two stages", tuple(bars), ((1.0, "torch"),))


def _line(name: str, table: Table, column: str, *rows: str) -> plots.Line:
    found = [
        dict(zip(table.columns, row, strict=True)) for row in table.rows if all(each in row for each in rows)
    ]
    return plots.Line(name, tuple((_number(row["ranks"]), _number(row[column])) for row in found))
