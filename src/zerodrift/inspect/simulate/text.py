"""A simulation as text of 80 columns, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from zerodrift import report
from zerodrift.errors import several
from zerodrift.inspect.simulate.simulation import Simulation, SweepChoice, SweepResult, own_choice
from zerodrift.inspect.simulate.work import Work
from zerodrift.plan import Plan
from zerodrift.record import encode
from zerodrift.report import percent, size

WIDTH = 80
SHOWN = 12  # results of a sweep that are printed of each kind; JSON has all
UNITS = 6  # lines of exposed communication

_ORDERS = {"tree": "by the tree", "rank": "in the order of ranks", "native": "in NCCL's own order"}


def simulation_text(
    plan: Plan,
    work: Work,
    cluster: str,
    simulation: Simulation,
    fewest: Mapping[str, int | None],
    *,
    color: bool,
    width: int = WIDTH,
) -> str:
    """Render one step. `fewest` has the fewest ranks on which it fits, with and without recomputation."""
    step, memory = simulation.seconds, simulation.memory
    recompute = "activations computed again" if simulation.recompute else "activations kept"
    ranks = several(plan.mesh.data, "data rank")
    own = own_choice(plan, simulation.recompute)
    facts = [
        ("model", plan.source),
        ("mesh", str(plan.mesh)),
        ("cluster", cluster),
        ("batch", f"{simulation.micro_batches} x {work.inputs} on each of {ranks}, {recompute}"),
        ("sums", f"gradients in {own.wire} on the wire, {_ORDERS.get(own.order, own.order)}"),
    ]

    def part(name: str, seconds: float) -> tuple[str, str, str]:
        return f"  {name}", _seconds(seconds), percent(seconds / step)

    times = [
        ("a step", _seconds(step), ""),
        part("computing", simulation.computed),
        part("waiting for the link", simulation.exposed),
        *([part("waiting for stages", simulation.idle)] if simulation.idle else []),
        ("sent by a rank", size(simulation.wire), ""),
        ("tokens/s", f"{simulation.tokens_per_second:,.0f}", "on all ranks"),
        ("MFU", percent(simulation.mfu), "of the products that the device is stated to have"),
    ]
    shown, rest = simulation.waited[:UNITS], simulation.waited[UNITS:]
    waited = [(w.unit or "(root)", w.what, _seconds(w.seconds), percent(w.seconds / step)) for w in shown]
    if rest:
        total = sum(line.seconds for line in rest)
        waited.append((f"{len(rest)} more", "", _seconds(total), percent(total / step)))
    fits = "fits" if memory.fits else "does not fit"
    uses = [
        ("the plan's peak", size(memory.plan), "counted by `zerodrift plan`"),
        ("activations", size(memory.activations), "what autograd keeps"),
        ("one operation", size(memory.workspace), "the result of the largest"),
        ("reserved", size(memory.reserve), "`reserve_gb` of the cluster"),
        ("in all", size(memory.total), f"of {size(memory.room)} ({memory.room / 1e9:.0f} GB): it {fits}"),
        *(("fits from", several(ranks, "rank"), how) for how, ranks in fewest.items() if ranks),
    ]
    lines: list[RenderableType] = [
        report.title("plan --simulate", plan.digest, width),
        report.pairs(facts, width=width),
        report.section("step", "simulated, not measured"),
        report.grid(times, (24, 12), ("", "bold"), width),
        report.section("waited for", "what nothing hides, by unit" if simulation.waited else "nothing"),
        report.grid(waited, (24, 12, 12), ("", "bold", ""), width),
        report.section("memory", "of the fullest rank, at the worst moment of a step"),
        report.grid(uses, (24, 12), ("", "bold"), width),
    ]
    return report.render(lines, color, width)


def _seconds(seconds: float) -> str:
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{report.significant(seconds * scale)} {unit}"


def sweep_text(
    plan: Plan,
    work: Work,
    cluster: str,
    fit: Sequence[SweepResult],
    others: Sequence[SweepResult],
    own: SweepChoice,
    *,
    color: bool,
    width: int = WIDTH,
) -> str:
    """Render a sweep. `own` is the choice of the config."""
    facts = [
        ("model", plan.source),
        ("mesh", f"{plan.mesh.world:,} ranks"),
        ("cluster", cluster),
        ("batch", f"{plan.policy.batch.accumulation} x {work.inputs} on each data-parallel rank"),
    ]
    detail = "simulated, not measured; the fastest first; * is the config"
    lines: list[RenderableType] = [
        report.title("plan --simulate --sweep", "", width),
        report.pairs(facts, width=width),
        report.section("fits", detail if fit else "none"),
        _results(fit, own, width),
    ]
    if too_large := [one for one in others if one.simulation]:
        lines += [report.section("does not fit", "what needs least first"), _results(too_large, own, width)]
    reasons = {one.refused: one.choice for one in others if not one.simulation}
    lines += [report.section("refused")] if reasons else []
    for why, one in reasons.items():
        choice = f"stage {one.stage}, wire {one.wire}, order {one.order}, {one.replicas} replicas"
        lines.append(Text(f"{choice}: {why}"))
    return report.render(lines, color, width)


def _results(results: Sequence[SweepResult], own: SweepChoice, width: int) -> RenderableType:
    """Draw a table of the first results. It also has the config's own choice and the first of every wire."""
    rows, wires = [], set()
    for number, (choice, found) in enumerate((each.choice, each.simulation) for each in results):
        is_shown = number < SHOWN or choice == own or choice.wire not in wires
        wires.add(choice.wire)
        if found is not None and is_shown:
            keys = (
                f"{choice.stage}{' *' * (choice == own)}",
                choice.wire,
                choice.order,
                f"{choice.replicas:,}",
            )
            times = "yes" if choice.recompute else "no", _seconds(found.seconds)
            rates = report.elements(round(found.tokens_per_second)), f"{found.mfu:.0%}"
            waits = f"{found.exposed / found.seconds:.0%}", f"{found.memory.total / 2**30:.0f} GiB"
            rows.append((*keys, *times, *rates, *waits))
    if not rows:
        return Text()
    heads = "stage", "wire", "order", "replicas", "recompute", "step", "tokens/s", "MFU", "waits", "memory"
    # What a narrow terminal leaves out follows from the time of a step.
    table = report.PageTable(heads, rows, figures=heads[5:], wide_only=heads[6:9])
    more = [Text(f"and {len(results) - len(rows)} more")] if len(results) > len(rows) else []
    return Group(report.fitted_table(table, width), *more)


def simulation_json(
    plan: Plan, work: Work, cluster: str, simulation: Simulation, fewest: Mapping[str, int | None]
) -> str:
    document = {"digest": plan.digest, "source": plan.source, "cluster": cluster, "inputs": work.inputs}
    return json.dumps(document | _values(simulation) | {"fits_from": dict(fewest)}, indent=1)


def sweep_json(cluster: str, fit: Sequence[SweepResult], others: Sequence[SweepResult]) -> str:
    def values(one: SweepResult) -> dict[str, Any]:
        found = {"refused": one.refused} if one.simulation is None else _values(one.simulation)
        return encode(one.choice) | found

    document = {"cluster": cluster, "fit": list(map(values, fit)), "others": list(map(values, others))}
    return json.dumps(document, indent=1)


def _values(simulation: Simulation) -> dict[str, Any]:
    values: dict[str, Any] = encode(simulation)
    memory = values["memory"] | {"total": simulation.memory.total, "fits": simulation.memory.fits}
    more = {"exposed": simulation.exposed, "tokens_per_second": simulation.tokens_per_second}
    return values | more | {"memory": memory}
