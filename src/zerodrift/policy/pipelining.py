"""The pipeline of a config: the schedule, the number of pieces, and the cuts.

Sizes that torch's schedules cannot run are refused by key, before any rank starts. `plan/stages.py` decides
the cuts, and the package `pipeline` runs the schedule.

Invariant: a policy has a `Pipelining` exactly if the mesh has more than one rank along its pipeline axis.
"""

from __future__ import annotations

from zerodrift.config import Config
from zerodrift.errors import Problems
from zerodrift.mesh import MeshShape
from zerodrift.policy.decisions import Decision, Pipelining, Schedule

SINGLE: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Schedules with one piece of the model on each rank."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules with two pieces on each rank, the last one beside the first."""

MOST_MICRO_BATCHES = 1 << 16

SPLIT: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv", "dualpipev")


def decide_pipeline(
    config: Config, mesh: MeshShape, micro_batches: int, tree: bool, problems: Problems
) -> tuple[Pipelining | None, tuple[Decision, ...]]:
    """Return the pipeline of a config, None without one, and the decisions on it.

    `tree` is True if gradients are summed by the tree over micro-batches.
    """
    block = config.pipeline
    if block is None or mesh.pipeline == 1:
        return None, ()
    schedule: Schedule = block.schedule or ("1f1b" if micro_batches >= mesh.pipeline else "gpipe")
    chunks = block.chunks or (1 if schedule in SINGLE else 2)
    _check_sizes(schedule, chunks, mesh.pipeline, micro_batches, problems)
    if config.sharding.keep_gathered == "never":
        must = "must be `step` or `micro-batch` with a pipeline, whose backwards come in two parts"
        do = "Leave it out for `step`, or use `micro-batch`, which gathers for each forward and backward."
        problems.add("sharding.keep_gathered", must, got="'never'", do=do)
    if block.weight_grads == "autograd" and config.sharding.keep_gathered == "micro-batch":
        why = "the second pass of autograd reads parameters, a queue does not"
        must = f"must be `queue` with `sharding.keep_gathered: micro-batch`: {why}"
        problems.add("pipeline.weight_grads", must, got="'autograd'", do="Leave one of the two keys out.")
    if block.weight_grads is not None and schedule not in SPLIT:
        must = f"must be left out with schedule {schedule}, which defers no gradients"
        do = f"Use one of {', '.join(SPLIT)}."
        problems.add("pipeline.weight_grads", must, got=repr(block.weight_grads), do=do)
    if config.precision.statistics:
        must = "must be off with a pipeline"
        problems.add("precision.statistics", must, got="true", do="Measure without a pipeline.")
    by_autograd = tree and config.sharding.keep_gathered != "micro-batch"
    weight_grads = block.weight_grads or ("autograd" if by_autograd else "queue")
    split = block.split or "layers"
    default = "default" if schedule == "1f1b" else f"default below {mesh.pipeline} micro-batches"
    pieces = f"{chunks * mesh.pipeline} pieces by {split}"
    decisions = [
        Decision("pipeline.schedule", schedule, "`pipeline.schedule`" if block.schedule else default),
        Decision("pipeline.split", pieces, "`pipeline.split`" if block.split else "default"),
    ]
    if schedule in SPLIT:
        why = "default: formed in the accumulate dtype"
        if block.weight_grads:
            why = "`pipeline.weight_grads`"
        elif weight_grads == "autograd":
            why = "default with `precision.reduce.order: tree`"
        decisions.append(Decision("pipeline.weight_grads", weight_grads, why))
    return Pipelining(schedule, chunks, split, weight_grads), tuple(decisions)


def queues(pipeline: Pipelining | None) -> bool:
    return pipeline is not None and pipeline.schedule in SPLIT and pipeline.weight_grads == "queue"


def most_unfinished(pipeline: Pipelining | None, ranks: int, micro_batches: int) -> int:
    """Return the most micro-batches for which a piece has some gradients and not all, at one time."""
    splits = pipeline is not None and pipeline.schedule in SPLIT
    return min(ranks, micro_batches) if splits else 1


def decide_micro_batches(config: Config, steps: int | None, problems: Problems) -> int | None:
    """Return the micro-batches per step from either of the two keys."""
    ours = config.pipeline.micro_batches if config.pipeline is not None else None
    if ours is not None and steps is not None and ours != steps:
        must = f"must agree with `gradient_accumulation_steps`, which says {steps}"
        problems.add("pipeline.micro_batches", must, got=ours, do="Keep one of the two keys.")
    return steps if ours is None else ours


def _check_sizes(schedule: Schedule, chunks: int, ranks: int, count: int, problems: Problems) -> None:
    """Refuse numbers of pieces and micro-batches that torch's schedules cannot run."""
    if schedule in SINGLE and chunks != 1:
        must = f"must be 1 with schedule {schedule}"
        problems.add("pipeline.chunks", must, got=chunks, do="Use `interleaved`.")
    if schedule in V_SHAPED and chunks != 2:
        problems.add("pipeline.chunks", f"must be 2 with schedule {schedule}", got=chunks, do="Leave it out.")
    if count > MOST_MICRO_BATCHES:
        must = f"must be at most {MOST_MICRO_BATCHES:,}: a schedule lists every one"
        problems.add("pipeline.micro_batches", must, got=f"{count:,}", do="Make micro-batches larger.")
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    if count < least:
        must = f"must be at least {least} with schedule {schedule} over {ranks} ranks"
        do = f"Use more micro-batches, or `{'gpipe' if schedule == '1f1b' else 'zbv'}`."
        problems.add("pipeline.micro_batches", must, got=count, do=do)
    rounds = max(1, count // ranks)
    if schedule in ("interleaved", "interleaved-zero-bubble") and count % rounds:
        must = f"must be a multiple of its rounds over {ranks} ranks, {rounds}, with schedule {schedule}"
        do = f"Use {count // ranks * ranks} or {(count // ranks + 1) * ranks}."
        problems.add("pipeline.micro_batches", must, got=count, do=do)
