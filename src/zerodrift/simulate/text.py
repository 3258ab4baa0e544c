"""A simulation as text of 80 columns, and as JSON.

Invariant: no line is wider than WIDTH, and nothing reads as measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from zerodrift.errors import several
from zerodrift.plan.table import Plan
from zerodrift.record import encode
from zerodrift.report.figures import percent, significant, size
from zerodrift.report.frame import grid, pairs, printed, section, title
from zerodrift.simulate.simulation import Memory, Simulation
from zerodrift.simulate.sweep import Tried
from zerodrift.simulate.work import Work

WIDTH = 80
SHOWN = 12
"""Ways of a sweep that are printed of each kind; JSON has all."""
UNITS = 6
"""Lines of what is waited for."""


def simulation_text(plan: Plan, work: Work, cluster: str, simulation: Simulation, *, color: bool) -> str:
    """For a person."""
    lines: list[RenderableType] = [
        title("plan --simulate", plan.digest, WIDTH),
        pairs(_facts(plan, work, cluster, simulation), width=WIDTH),
        section("step", "simulated, not measured"),
        grid(list(_step(simulation)), (24, 12), ("", "bold"), WIDTH),
        section("waited for", "what nothing hides, by unit" if simulation.waited else "nothing"),
        grid(list(_waited(simulation)), (24, 12, 12), ("", "bold", ""), WIDTH),
        section("memory", "of the fullest rank, at the worst moment of a step"),
        grid(list(_memory(simulation.memory)), (24, 12), ("", "bold"), WIDTH),
    ]
    return printed(lines, color, WIDTH)


def _facts(plan: Plan, work: Work, cluster: str, simulation: Simulation) -> list[tuple[str, str]]:
    return [
        ("model", plan.source),
        ("mesh", str(plan.mesh)),
        ("cluster", cluster),
        ("batch", _batch(plan, work, simulation)),
    ]


def _batch(plan: Plan, work: Work, simulation: Simulation) -> str:
    recompute = "activations computed again" if simulation.recompute else "activations kept"
    return (
        f"{simulation.micro_batches} x {work.inputs} on each of {several(plan.mesh.data, 'data rank')}, "
        f"{recompute}"
    )


def _step(simulation: Simulation) -> Iterator[tuple[str, str, str]]:
    seconds = simulation.seconds
    yield "a step", _time(seconds), ""
    yield "  computing", _time(simulation.computed), percent(simulation.computed / seconds)
    yield "  waiting for the link", _time(simulation.exposed), percent(simulation.exposed / seconds)
    if simulation.idle:
        yield "  waiting for stages", _time(simulation.idle), percent(simulation.idle / seconds)
    yield "sent by a rank", size(simulation.wire), ""
    yield "tokens/s", f"{simulation.tokens_per_second:,.0f}", "on all ranks"
    yield "MFU", percent(simulation.mfu), "of the products that the device is stated to have"


def _waited(simulation: Simulation) -> Iterator[tuple[str, str, str, str]]:
    for line in simulation.waited[:UNITS]:
        share = percent(line.seconds / simulation.seconds)
        yield line.unit or "(root)", line.what, _time(line.seconds), share
    rest = simulation.waited[UNITS:]
    if rest:
        total = sum(line.seconds for line in rest)
        yield f"{len(rest)} more", "", _time(total), percent(total / simulation.seconds)


def _memory(use: Memory) -> Iterator[tuple[str, str, str]]:
    yield "the plan's peak", size(use.plan), "what `zerodrift plan` counts"
    yield "activations", size(use.activations), "what autograd keeps"
    yield "one operation", size(use.workspace), "the result of the largest"
    yield "reserved", size(use.reserve), "`reserve_gb` of the cluster"
    room = f"of {size(use.room)}: it " + ("fits" if use.fits else "does not fit")
    yield "in all", size(use.total), room


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{significant(seconds)} s"
    return f"{significant(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{significant(seconds * 1e6)} us"


# --- the sweep --------------------------------------------------------------------------------------------


def sweep_text(
    plan: Plan, work: Work, cluster: str, fit: Sequence[Tried], others: Sequence[Tried], *, color: bool
) -> str:
    """Those that fit, the fastest first, and why the others do not."""
    facts = [
        ("model", plan.source),
        ("mesh", f"{plan.mesh.world:,} ranks"),
        ("cluster", cluster),
        ("batch", f"{plan.policy.batch.accumulation} x {work.inputs} on each data-parallel rank"),
    ]
    short = [tried for tried in others if tried.simulation is not None]
    refused = [tried for tried in others if tried.simulation is None]
    lines: list[RenderableType] = [
        title("plan --simulate --sweep", "", WIDTH),
        pairs(facts, width=WIDTH),
        section("fits", "simulated, not measured; the fastest first" if fit else "none"),
        _table(list(_rows(fit))),
    ]
    if short:
        lines += [section("does not fit", "what needs least first"), _table(list(_rows(short)))]
    if refused:
        told = {tried.refused: tried for tried in refused}
        lines += [section("refused"), *(Text(f"{_way(tried)}: {why}") for why, tried in told.items())]
    return printed(lines, color, WIDTH)


HEADS = ("stage", "wire", "order", "replicas", "recompute", "step", "tokens/s", "MFU", "waits", "memory")


WIDTHS = (5, 4, 6, 8, 9, 7, 8, 5, 5, 9)


def _table(rows: list[tuple[str, ...]]) -> RenderableType:
    """Text on the left, numbers on the right."""
    lines = []
    for row in [HEADS, *rows] if rows else []:
        cells = zip(row, WIDTHS, strict=True)
        lines.append(" ".join(c.ljust(w) if n < 5 else c.rjust(w) for n, (c, w) in enumerate(cells)).rstrip())
    return Text("\n".join(lines))


def _rows(found: Sequence[Tried]) -> Iterator[tuple[str, ...]]:
    for tried in found[:SHOWN]:
        simulation, way = tried.simulation, tried.way
        if simulation is None:
            continue
        yield (
            str(way.stage),
            way.wire,
            way.order,
            f"{way.replicas:,}",
            "yes" if way.recompute else "no",
            _time(simulation.seconds),
            _count(simulation.tokens_per_second),
            f"{simulation.mfu:.0%}",
            f"{simulation.exposed / simulation.seconds:.0%}",
            f"{simulation.memory.total / 2**30:.0f} GiB",
        )
    if len(found) > SHOWN:
        yield (f"and {len(found) - SHOWN} more", *("",) * 9)


def _way(tried: Tried) -> str:
    way = tried.way
    return f"stage {way.stage}, wire {way.wire}, order {way.order}, {way.replicas} replicas"


def _count(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{significant(value / limit)}{suffix}"
    return significant(value)


# --- JSON -----------------------------------------------------------------------------------------------


def simulation_json(plan: Plan, work: Work, cluster: str, simulation: Simulation) -> str:
    document = {"digest": plan.digest, "source": plan.source, "cluster": cluster, "inputs": work.inputs}
    return json.dumps(document | _encoded(simulation), indent=1)


def sweep_json(cluster: str, fit: Sequence[Tried], others: Sequence[Tried]) -> str:
    def told(tried: Tried) -> dict[str, Any]:
        found = {"refused": tried.refused} if tried.simulation is None else _encoded(tried.simulation)
        return encode(tried.way) | found

    document = {"cluster": cluster, "fit": list(map(told, fit)), "others": list(map(told, others))}
    return json.dumps(document, indent=1)


def _encoded(simulation: Simulation) -> dict[str, Any]:
    found: dict[str, Any] = encode(simulation)
    del found["intervals"]
    memory = found["memory"] | {"total": simulation.memory.total, "fits": simulation.memory.fits}
    more = {"exposed": simulation.exposed, "tokens_per_second": simulation.tokens_per_second}
    return found | more | {"memory": memory}
