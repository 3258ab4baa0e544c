"""What is said before the first step: the plan in short, what was read, and how far it will go.

Invariant: what a dry run says is what training says.
"""

from __future__ import annotations

from typing import Any

from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.cost import cost
from zerodrift.plan.table import Plan
from zerodrift.report.brief import brief_text
from zerodrift.report.frame import grid, printed
from zerodrift.report.rows import grouped
from zerodrift.report.terminal import plan_text
from zerodrift.train.data.prepare import Prepared
from zerodrift.train.data.sampling import WINDOW, GroupedSampler, lengths_of, padding, sampler_of
from zerodrift.train.data.tokenizer import Tokenizer
from zerodrift.train.loop.job import Job, Run
from zerodrift.train.report.display import Display


def head_text(plan: Plan, display: Display, whole_plan: bool) -> str:
    """The plan in a few lines, and in full where that is asked for."""
    look: Any = {"color": display.color, "width": display.width}
    if whole_plan:
        return plan_text(plan, cost(plan), grouped(plan), timeline(plan), **look)
    return brief_text(plan, cost(plan), grouped(plan), "train", **look).rstrip("\n")


def data_facts(
    job: Job, prepared: Prepared, letters: Tokenizer, steps: int, plan: Plan
) -> tuple[tuple[str, str], ...]:
    """(label, value) of what was read, for the page."""
    train, batch = prepared.train, plan.policy.batch
    samples = plan.mesh.data * max(1, batch.micro) * batch.accumulation
    whole = " in whole blocks" if job.data.group_by_length else ""
    run = f"{steps * samples * train.length:,} tokens{whole}, {steps * samples / len(train):.2f} epochs"
    filled = _padding(job, prepared, steps, plan)
    return (*prepared.facts(), ("tokenizer", letters.name), ("padding", filled), ("this run", run))


def data_text(job: Job, prepared: Prepared, steps: int, plan: Plan, display: Display) -> str:
    """What was read and what is done with it, in a few lines."""
    batch = plan.policy.batch
    samples = plan.mesh.data * max(1, batch.micro) * batch.accumulation
    epochs = steps * samples / len(prepared.train)
    training = f"{steps:,} steps of {samples} blocks, {epochs:.2f} epochs"
    if job.run.steps is not None and job.run.epochs != Run().epochs:
        training += f"; `run.epochs` {job.run.epochs:g} is not used, as `run.steps` is given"
    told = [*prepared.lines(), ("training", training)]
    if job.data.group_by_length:
        told.append(("padding", _padding(job, prepared, steps, plan)))
    below = [(label.ljust(len("optimizer")), text) for label, text in told]  # the lines of the plan
    return printed([grid(below, (10,), ("bold",), display.width)], display.color, display.width).rstrip("\n")


def _padding(job: Job, prepared: Prepared, steps: int, plan: Plan) -> str:
    """The share of what is computed that only fills micro-batches up."""
    train, batch = prepared.train, plan.policy.batch
    if not job.data.group_by_length:
        trained = [(each.weight or 1.0, each.counts.train) for each in prepared.sets if len(each.train)]
        shares = [(weight, part.padding / (part.blocks * train.length)) for weight, part in trained]
        return f"{sum(w * share for w, share in shares) / sum(w for w, _ in shares):.1%} of what is computed"
    micro = max(1, batch.micro)
    samples, some = plan.mesh.data * micro * batch.accumulation, min(steps, 2 * WINDOW)
    sampler = GroupedSampler(sampler_of(train, job.data.seed), lengths_of(train), job.data.seed)
    with_groups, without = padding(sampler, some, samples, micro, train.length)
    what = "of what is computed" if some == steps else f"of the first {some} steps"
    return f"{with_groups:.1%} {what}; {without:.1%} without `data.group_by_length`"
