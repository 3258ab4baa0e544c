"""Audit a plan: measure what each dtype decision costs, and recommend pins.

    found = audit(plan, model, batches)
    print(found.text())

Three passes estimate the worth of every cell. The cells with the largest estimates are replayed one at a
time, pins are searched within a budget and measured, and defects are found.

Invariant: the caller's model is not touched, and every number that is not called an estimate was run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from zerodrift.comm import started, usable_accelerator
from zerodrift.errors import ConfigError, MeshError
from zerodrift.inspect.audit import advice, estimates, runs, variants
from zerodrift.inspect.audit.advice import Progress
from zerodrift.inspect.audit.estimates import AuditSetup, PassResults
from zerodrift.inspect.audit.findings import find_defects, narrowed_choices
from zerodrift.inspect.audit.report import Audit
from zerodrift.inspect.audit.results import (
    ByteKind,
    CellReplay,
    FormatGoal,
    FormatPoint,
    GradientLine,
    UpdateCost,
)
from zerodrift.inspect.audit.runs import Subject
from zerodrift.inspect.audit.tokens import Batch
from zerodrift.inspect.audit.variants import Choice
from zerodrift.optimizers import of_type
from zerodrift.plan import Plan
from zerodrift.policy import ComponentSpec, Output, Policy, State

REPLAYED = 8  # cells of the shortlist that are replayed by default


def audit(
    plan: Plan,
    model: nn.Module | Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    weights: str | os.PathLike[str] | None = None,
    budget: float | None = 0.01,
    of: ByteKind = "rest",
    confirm: int = REPLAYED,
    told: Progress | None = None,
    narrow: str | None = None,
) -> Audit:
    """Measure what the dtypes of a plan cost, with micro-batches of this rank. All ranks must call it.

    `model` is a module, which is copied, or a function that builds one inside `empty()`. `weights` names
    files with its values; without it, the values are the model's own. `budget` is the share of more bytes
    that pins may cost, or None to search for no pins. `of` says which bytes: at `rest`, at `peak` or on the
    `wire`. `confirm` is the number of cells of the shortlist to replay. `narrow` is `bytes` or `speed`, the
    purpose for which narrow formats are chosen. Their drift stays within 1.5 times the plan's, or within
    another limit, as in `bytes:2x` or `bytes:0.01`.
    """
    goal = None if narrow is None else advice.parse_goal(narrow)
    return audit_subject(plan, Subject.of(model, weights), batches, budget, of, confirm, told, goal)


def audit_subject(
    plan: Plan,
    subject: Subject,
    batches: Sequence[Batch],
    budget: float | None,
    of: ByteKind,
    confirm: int,
    told: Progress | None,
    goal: FormatGoal | None,
) -> Audit:
    if budget is not None and not 0 <= budget < float("inf"):
        raise ConfigError("budget", "must be a share of at least 0, such as 0.01", got=budget)
    if confirm < 0:
        raise ConfigError("confirm", "must be at least 0", got=confirm)
    _, world = started()
    if world != plan.mesh.world:
        got = f"{plan.mesh.world} planned, {world} started"
        do = f"Plan for {world}, or start {plan.mesh.world} with torchrun."
        raise MeshError("plan", "must be for as many ranks as were started", got=got, do=do)
    accelerator = usable_accelerator()
    devices = [torch.accelerator.current_device_index()] if accelerator is not None else []
    kind = "cuda" if accelerator is None else accelerator.type
    progress = told or (lambda what, done, count: None)
    whole = variants.for_micro_batches(plan.policy, len(batches), plan.mesh.data)
    setup = AuditSetup(subject, variants.without_update(whole), plan.mesh, runs.check_batches(batches))
    recommended, replayed = None, []
    with torch.random.fork_rng(devices, device_type=kind):
        progress("shortlist", 0, 1)
        if whole.loss_scale is not None and whole.loss_scale.dynamic:
            whole = replace(whole, loss_scale=estimates.settle_loss_scale(setup, whole.loss_scale))
            setup = replace(setup, policy=variants.without_update(whole))
        results, ran = estimates.run_three_passes(setup)
        ran = replace(ran, policy=setup.policy)
        gradients = _with_columns(setup, ran, results)
        progress("updates", 0, 1)
        updates = update_costs(setup, whole)
        chosen = _cells_to_replay(ran, results, confirm)
        for number, choice in enumerate(chosen):
            progress("replays", number, len(chosen))
            if (one := _replay(setup, ran, results, choice)) is not None:
                replayed.append(one)
        worth = _worth(results, replayed)
        start = FormatPoint(results.total, advice.bytes_of(setup, whole))
        trials = advice.Trials(setup, ran, whole, results.reference, start, progress)
        if budget is not None and results.total.square > 0 and any(worth.values()):
            found = advice.candidates(ran, worth)
            recommended = advice.PinSearch(trials, budget, of).recommend(found)
        narrower = advice.narrower_columns(setup, ran, whole) if confirm and budget is not None else []
        formats = advice.FormatSearch(trials, goal).recommend() if goal is not None else None
        findings = find_defects(ran, subject, results, gradients, updates, replayed)
    flips = runs.router_flips(results.planned, results.reference)
    return Audit(
        source=plan.source,
        digest=plan.digest,
        mode=str(plan.policy.mode),
        ranks=plan.mesh.world,
        batches=len(batches),
        drift=results.total,
        own=results.own,
        gradient_cosine=results.cosine,
        shortlist=tuple(results.estimates),
        replayed=tuple(sorted(replayed, key=lambda each: -each.alone.square)),
        places=tuple(results.places),
        gradients=tuple(gradients),
        updates=tuple(updates),
        flips={name: count for name, (count, _) in flips.items()},
        caused=tuple((each.choice, each.alone.flips) for each in replayed if each.alone.flips),
        findings=tuple(findings),
        recommendation=recommended,
        narrower=tuple(narrower),
        formats=formats,
        seconds=results.seconds,
    )


def _with_columns(setup: AuditSetup, plan: Plan, results: PassResults) -> list[GradientLine]:
    """Measure what `accumulate` and `reduce` do to each gradient. One run per column is enough, because the
    columns of a parameter affect only its own gradient."""
    changes: dict[variants.Cell, dict[str, float]] = {"accumulate": {}, "reduce": {}}
    for cell in changes:
        rows = [row for row in plan.rows if cell in variants.narrow_cells(row.columns)]
        if rows and cell == "reduce" and setup.mesh.data == 1:
            reductions = {row.name: row.columns.update.reduce for row in rows if row.columns.update}
            wires = {name: variants.narrowest(one.wire, one.sum) for name, one in reductions.items()}
            changes[cell] = estimates.wire_rounding(setup, wires)
        elif rows:
            choice = Choice("*", cell, tuple(row.name for row in rows))
            wide = variants.widened_policy(plan, choice)
            changes[cell] = estimates.gradient_distances(setup, setup.policy, wide)
    accumulate, reduce = changes.values()
    return [
        replace(line, accumulate=accumulate.get(line.name, 0.0), reduce=reduce.get(line.name, 0.0))
        for line in results.gradients
    ]


def _cells_to_replay(plan: Plan, results: PassResults, confirm: int) -> list[Choice]:
    """Choose the cells with the largest estimates, and cells for which an estimate is not enough: those of
    routers, and those that are narrower than the mode."""
    if not confirm:
        return []
    chosen = [estimate.choice for estimate in results.estimates[:confirm] if estimate.square > 0]
    routers = {key.rpartition("#")[0] for routes in results.reference.routes for key in routes}
    for estimate in results.estimates:
        module = estimate.choice.names[0].rpartition(".")[0]
        routes = any(module == path or module.startswith(f"{path}.gate") for path in routers)
        if routes and estimate.choice not in chosen and len(chosen) < 2 * confirm:
            chosen.append(estimate.choice)
    narrowed = (choice for choices in narrowed_choices(plan).values() for choice in choices)
    return [*chosen, *(choice for choice in narrowed if choice not in chosen)]


def _replay(setup: AuditSetup, plan: Plan, results: PassResults, choice: Choice) -> CellReplay | None:
    """Replay a cell. Return None if the model cannot run with it alone, whatever dtype its modules return."""
    alone = widened = returned = None
    outputs: tuple[Output | None, ...] = (None, "input")
    for output in outputs:
        with contextlib.suppress(*runs.REFUSED):
            alone = alone or setup.signals(variants.isolated_policy(plan, choice, output), results.narrowed)
        with contextlib.suppress(*runs.REFUSED):
            if widened is None:
                wide = setup.signals(variants.widened_policy(plan, choice, output))
                widened, returned = runs.drift(wide, results.reference), output
    return (
        None if alone is None else CellReplay(choice, runs.drift(alone, results.reference), widened, returned)
    )


def _worth(results: PassResults, replayed: Sequence[CellReplay]) -> dict[str, float]:
    """Return by parameter the largest squared drift of its forward cells, as replayed or else estimated."""
    worth: dict[str, float] = {}
    whole = results.total.square
    known: dict[Choice, float] = {}
    for each in replayed:
        removed = 0.0 if each.widened is None else whole - each.widened.square
        known[each.choice] = max(each.alone.square, removed)
    for estimate in results.estimates:
        name = estimate.choice.names[0]
        worth[name] = max(worth.get(name, 0.0), known.get(estimate.choice, estimate.square))
    return worth


def update_costs(setup: AuditSetup, policy: Policy) -> list[UpdateCost]:
    """Measure the updates of trained parameters in the second of two steps, if the plan has an optimizer."""
    if policy.optimizer is None:
        return []
    watched = replace(policy, statistics=True, schedule=None)
    with runs.running(setup.subject, watched, setup.mesh) as engine:
        advice.take_steps(engine, setup, 2)
        if not engine.global_steps:
            return []  # all steps were skipped; other findings name gradients that are not finite
        costs = []
        for line in engine.update_statistics().lines:
            row = engine.plan.row(line.name)
            update = None if row is None else row.columns.update
            state = State.FP32 if update is None else update.state
            stuck, decays = 0.0, _decays(policy.optimizer) if state is State.BF16 else {}
            for moment, value in engine.parameter(line.name).state.items() if decays else ():
                if moment in decays and value.numel():
                    # Rounding to nearest undoes the decay of some elements.
                    after = (value * decays[moment]).to(State.BF16.dtype.torch).float()
                    stuck = max(stuck, float(((after == value) & (value != 0)).float().mean()))
            costs.append(UpdateCost(line.name, line.lost_share, line.underflow_share, stuck, str(state)))
        return costs


def _decays(optimizer: ComponentSpec) -> dict[str, float]:
    """Return by moment the factor by which a step multiplies it."""
    algorithm = of_type(optimizer.type)
    given = {**algorithm.defaults, **json.loads(optimizer.params)}
    if algorithm.moments == ("momentum_buffer",):
        return {"momentum_buffer": float(given.get("momentum", 0.0))}
    first, second = (float(beta) for beta in given.get("betas", (0.9, 0.999)))
    if algorithm.moments == ("exp_avg",):  # Lion: the second beta is of the moment
        return {"exp_avg": second}
    return {"exp_avg": first, "exp_avg_sq": second}
