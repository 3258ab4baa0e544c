"""The audit: which dtype decision costs how much, and which pins buy it back.

    found = audit(plan, model, batches)
    print(found.text())

Estimates make a shortlist in three passes; what is worth most is replayed, one cell at a time; pins are taken
under a budget and measured; what is not as it should be is told apart.

Invariant: the model that is handed in is not touched, and a number that is told as a fact was run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zerodrift.comm.mesh import started
from zerodrift.errors import ConfigError, MeshError
from zerodrift.numerics import findings, narrower, recommend, signals, updates, variants
from zerodrift.numerics.audit_text import Audit
from zerodrift.numerics.measure import Bench, ThreePasses, gradient_apart, rounded_on_the_wire, three_passes
from zerodrift.numerics.nouns import Estimate, GradientLine, Replayed
from zerodrift.numerics.recommend import ByteKind, Told
from zerodrift.numerics.runs import REFUSED, Batch, Subject, checked
from zerodrift.numerics.variants import Choice
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Output

CONFIRMED = 8
"""Cells of the shortlist that are replayed unless told otherwise."""


def audit(
    plan: Plan,
    model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    weights: str | os.PathLike[str] | None = None,
    budget: float | None = 0.01,
    of: ByteKind = "rest",
    confirm: int = CONFIRMED,
    told: Told | None = None,
) -> Audit:
    """Measure what the dtypes of a plan cost, with micro-batches of this rank. A call of all ranks.

    `model` is a module, which is copied and stays as it is, or a function that builds one, which is called
    inside `empty()` and whose values are those of `weights` or its own. `budget` is the share of bytes that
    pins may cost, None for findings alone; `of` is memory at `rest`, at `peak` or on the `wire`. `confirm`
    cells of the shortlist are replayed.
    """
    return audit_subject(plan, Subject.of(model, weights), batches, budget, of, confirm, told or _silent)


def _silent(what: str, done: int, of: int) -> None:
    """Nobody watches."""


def audit_subject(
    plan: Plan,
    subject: Subject,
    batches: Sequence[Batch],
    budget: float | None,
    of: ByteKind,
    confirm: int,
    told: Told,
) -> Audit:
    """The same of a model that a command names."""
    _require(plan, budget, confirm)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        return _audit(plan, subject, checked(batches), budget, of, confirm, told)


def _require(plan: Plan, budget: float | None, confirm: int) -> None:
    if budget is not None and not 0 <= budget < float("inf"):
        raise ConfigError("budget", "must be a share of at least 0, such as 0.01", got=budget)
    if confirm < 0:
        raise ConfigError("confirm", "must be at least 0", got=confirm)
    _, world = started()
    if world != plan.mesh.world:
        raise MeshError(
            "plan",
            "must be for as many ranks as were started",
            got=f"{plan.mesh.world} planned, {world} started",
            do=f"Plan for {world}, or start {plan.mesh.world} with torchrun.",
        )


def _audit(
    plan: Plan,
    subject: Subject,
    batches: list[Batch],
    budget: float | None,
    of: ByteKind,
    confirm: int,
    told: Told,
) -> Audit:
    whole = variants.for_micro_batches(plan.policy, len(batches), plan.mesh.data)
    bench = Bench(subject, variants.without_update(whole), plan.mesh, batches)
    told("shortlist", 0, 1)
    passes, ran = three_passes(bench)
    ran = replace(ran, policy=bench.policy)
    told("shortlist", 1, 1)
    gradients = _columns_of_gradients(bench, ran, passes)
    told("updates", 0, 1)
    lost = updates.costs(bench, whole)
    told("updates", 1, 1)
    chosen = _chosen(passes, ran, confirm)
    replayed = []
    for number, choice in enumerate(chosen):
        told("replays", number, len(chosen))
        if (one := _replayed(bench, ran, passes, choice)) is not None:
            replayed.append(one)
    told("replays", len(chosen), len(chosen))
    worth = _worth(passes.estimates, replayed, passes.total.square)
    advice = None
    if budget is not None and passes.total.square > 0 and any(worth.values()):
        ordered = recommend.candidates(ran, worth)
        search = recommend.Search(bench, ran, whole, passes.reference, budget, of)
        advice = recommend.recommend(search, passes.planned, ordered, told)
    return Audit(
        source=plan.source,
        digest=plan.digest,
        mode=str(plan.policy.mode),
        ranks=plan.mesh.world,
        batches=len(batches),
        drift=passes.total,
        own=passes.own,
        gradient_cosine=passes.cosine,
        shortlist=tuple(passes.estimates),
        replayed=tuple(sorted(replayed, key=lambda each: -each.alone.square)),
        places=tuple(passes.places),
        gradients=tuple(gradients),
        updates=tuple(lost),
        flips=signals.flips_of(passes.planned, passes.reference),
        caused=tuple((each.choice, each.alone.flips) for each in replayed if each.alone.flips),
        findings=tuple(findings.findings(ran, subject, passes, gradients, lost, replayed)),
        recommendation=advice,
        narrower=tuple(narrower.narrower(bench, ran, whole)) if confirm and budget is not None else (),
        seconds=passes.seconds,
    )


def _columns_of_gradients(bench: Bench, plan: Plan, passes: ThreePasses) -> list[GradientLine]:
    """What `accumulate` and `reduce` do to each gradient: one replay for all, as each does it to its own."""
    apart: dict[str, dict[str, float]] = {"accumulate": {}, "reduce": {}}
    for cell, found in apart.items():
        narrow = tuple(row.name for row in plan.rows if cell in variants.narrow_cells(row.columns))
        if narrow and cell == "reduce" and bench.mesh.data == 1:
            found |= rounded_on_the_wire(bench, _wires(plan))
        elif narrow:
            choice: Any = Choice("*", cell, narrow)  # type: ignore[arg-type]
            found |= gradient_apart(bench, bench.policy, variants.widened(plan, [choice]))
    return [
        replace(
            line,
            accumulate=apart["accumulate"].get(line.name, 0.0),
            reduce=apart["reduce"].get(line.name, 0.0),
        )
        for line in passes.gradients
    ]


def _wires(plan: Plan) -> dict[str, torch.dtype]:
    """Parameter -> the narrowest dtype of its gradient between ranks."""
    wires = {}
    for row in plan.rows:
        update = row.columns.update
        if update is not None and "reduce" in variants.narrow_cells(row.columns):
            both = (update.reduce.wire, update.reduce.sum)
            wires[row.name] = min(both, key=lambda dtype: dtype.size).torch
    return wires


def _chosen(passes: ThreePasses, plan: Plan, confirm: int) -> list[Choice]:
    """What is replayed: what is worth most, and every router, whose flips no estimate has."""
    chosen = [estimate.choice for estimate in passes.estimates[:confirm] if estimate.square > 0]
    if not confirm:
        return []
    routers = {key.rpartition("#")[0] for routes in passes.reference.routes for key in routes}
    for estimate in passes.estimates:
        module = estimate.choice.names[0].rpartition(".")[0]
        routes = any(module == path or module.startswith(f"{path}.gate") for path in routers)
        if routes and estimate.choice not in chosen and len(chosen) < 2 * confirm:
            chosen.append(estimate.choice)
    return chosen


def _replayed(bench: Bench, plan: Plan, passes: ThreePasses, choice: Choice) -> Replayed | None:
    """None where the model cannot be run so, whatever the module returns."""
    alone = wide = None
    outputs: tuple[Output | None, ...] = (None, "input")
    for output in outputs:
        with contextlib.suppress(*REFUSED):
            alone = alone or bench.signals(variants.only(plan, [choice], output), passes.narrowed)
        with contextlib.suppress(*REFUSED):
            wide = wide or bench.signals(variants.widened(plan, [choice], output))
    if alone is None or wide is None:
        return None
    return Replayed(choice, signals.drift(alone, passes.reference), signals.drift(wide, passes.reference))


def _worth(estimates: Sequence[Estimate], replayed: Sequence[Replayed], whole: float) -> dict[str, float]:
    """Parameter -> what its forward cells are worth: the most that one of them was measured at, or is
    estimated at."""
    worth: dict[str, float] = {}
    known = {each.choice: max(each.alone.square, whole - each.widened.square) for each in replayed}
    for estimate in estimates:
        name = estimate.choice.names[0]
        worth[name] = max(worth.get(name, 0.0), known.get(estimate.choice, estimate.square))
    return worth
