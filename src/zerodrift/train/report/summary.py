"""Summarize a job before its first step: the plan, the data that was read, and the length of the run.

A dry run, training and the page say the same.
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
from zerodrift.train.data.prepare import PreparedData
from zerodrift.train.data.sampling import WINDOW, GroupedSampler, lengths_of, padding_shares, sampler_of
from zerodrift.train.data.tokenizer import Tokenizer
from zerodrift.train.job import Job, Run
from zerodrift.train.report.display import Display


def head_text(plan: Plan, display: Display, whole_plan: bool) -> str:
    """Return the plan in a few lines, or in full."""
    look: Any = {"color": display.color, "width": display.width}
    if whole_plan:
        return plan_text(plan, cost(plan), grouped(plan), timeline(plan), **look)
    return brief_text(plan, cost(plan), grouped(plan), "train", **look).rstrip("\n")


def _samples(plan: Plan) -> int:
    """Return the blocks of a step."""
    batch = plan.policy.batch
    return plan.mesh.data * max(1, batch.micro) * batch.accumulation


def data_facts(
    job: Job, prepared: PreparedData, letters: Tokenizer, steps: int, plan: Plan
) -> tuple[tuple[str, str], ...]:
    """Return labelled facts about the data, for the page."""
    train, blocks = prepared.train, steps * _samples(plan)
    whole = " in whole blocks" if job.data.group_by_length else ""
    run = f"{blocks * train.length:,} tokens{whole}, {blocks / len(train):.2f} epochs"
    filled = _padding(job, prepared, steps, plan)
    return (*prepared.facts(), ("tokenizer", letters.name), ("padding", filled), ("this run", run))


def data_text(job: Job, prepared: PreparedData, steps: int, plan: Plan, display: Display) -> str:
    """Return the data and the length of the run in a few lines."""
    samples = _samples(plan)
    training = f"{steps:,} steps of {samples} blocks, {steps * samples / len(prepared.train):.2f} epochs"
    if job.run.steps is not None and job.run.epochs != Run().epochs:
        training += f"; `run.epochs` {job.run.epochs:g} is not used, as `run.steps` is given"
    facts = [*prepared.lines(), ("training", training)]
    if job.data.group_by_length:
        facts.append(("padding", _padding(job, prepared, steps, plan)))
    lines = [(label.ljust(len("optimizer")), text) for label, text in facts]  # as wide as the plan's lines
    return printed([grid(lines, (10,), ("bold",), display.width)], display.color, display.width).rstrip("\n")


def _padding(job: Job, prepared: PreparedData, steps: int, plan: Plan) -> str:
    """Return the share of the computed tokens that is padding."""
    train = prepared.train
    if not job.data.group_by_length:
        trained = [(each.weight or 1.0, each.counts.train) for each in prepared.sets if len(each.train)]
        shares = [(weight, part.padding / (part.blocks * train.length)) for weight, part in trained]
        return f"{sum(w * share for w, share in shares) / sum(w for w, _ in shares):.1%} of what is computed"
    some = min(steps, 2 * WINDOW)
    sampler = GroupedSampler(sampler_of(train, job.data.seed), lengths_of(train), job.data.seed)
    micro = max(1, plan.policy.batch.micro)
    with_groups, without = padding_shares(sampler, some, _samples(plan), micro, train.length)
    what = "of what is computed" if some == steps else f"of the first {some} steps"
    return f"{with_groups:.1%} {what}; {without:.1%} without `data.group_by_length`"
