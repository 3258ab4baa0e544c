"""The pipeline that a config means: which schedule, in how many pieces, cut by what.

What torch's schedules ask of their sizes is asked here, by the key that is wrong, before any rank starts.
Where the cuts fall is `plan/stages.py`'s affair, who runs the schedule the room `pipeline`'s.

Invariant: `Pipelining` is there exactly where the mesh has more than one rank along its pipeline axis.
"""

from __future__ import annotations

from zerodrift.config.schema import Config, Pipeline
from zerodrift.errors import Problems
from zerodrift.mesh import MeshShape
from zerodrift.policy.nouns import Decision, Pipelining, Schedule

SINGLE: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""Schedules with one piece of the model on each rank."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules with two pieces on each rank, the last one beside the first."""

MOST_MICRO_BATCHES = 1 << 16
"""Of a step of a pipeline."""

SPLIT: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that put weight gradients off."""


def pipelining(
    config: Config, mesh: MeshShape, micro_batches: int, tree: bool, problems: Problems
) -> tuple[Pipelining | None, tuple[Decision, ...]]:
    """The pipeline of a config, None without one, and what was decided. `tree` says how gradients are
    summed."""
    block = config.pipeline
    if block is None or mesh.pipeline == 1:
        return None, ()
    schedule: Schedule = block.schedule or ("1f1b" if micro_batches >= mesh.pipeline else "gpipe")
    chunks = block.chunks or (1 if schedule in SINGLE else 2)
    _check_sizes(schedule, chunks, mesh.pipeline, micro_batches, problems)
    _check_gathered(config, problems)
    if block.weight_grads == "autograd" and config.sharding.keep_gathered == "micro-batch":
        problems.add(
            "pipeline.weight_grads",
            "must be `queue` with `sharding.keep_gathered: micro-batch`: the second pass of autograd reads "
            "parameters, a queue does not",
            got="'autograd'",
            do="Leave one of the two keys out.",
        )
    if block.weight_grads is not None and schedule not in SPLIT:
        problems.add(
            "pipeline.weight_grads",
            f"must be left out with schedule {schedule}, which puts no gradient off",
            got=repr(block.weight_grads),
            do=f"Use one of {', '.join(SPLIT)}.",
        )
    if config.precision.statistics:
        problems.add(
            "precision.statistics",
            "must be off with a pipeline",
            got="true",
            do="Measure without a pipeline.",
        )
    by_autograd = tree and config.sharding.keep_gathered != "micro-batch"
    weight_grads = block.weight_grads or ("autograd" if by_autograd else "queue")
    pipelining_policy = Pipelining(schedule, chunks, block.split or "layers", weight_grads)
    return pipelining_policy, tuple(_decisions(block, pipelining_policy, mesh.pipeline))


def queues(pipeline: Pipelining | None) -> bool:
    """Whether weight gradients wait in a queue."""
    return pipeline is not None and pipeline.schedule in SPLIT and pipeline.weight_grads == "queue"


def begun(pipeline: Pipelining | None, ranks: int, micro_batches: int) -> int:
    """Of how many micro-batches of a step at once a piece may have some gradients and not all."""
    splits = pipeline is not None and pipeline.schedule in SPLIT
    return min(ranks, micro_batches) if splits else 1


def micro_batches(config: Config, steps: int | None, problems: Problems) -> int | None:
    """`gradient_accumulation_steps`, by either of its names."""
    ours = config.pipeline.micro_batches if config.pipeline is not None else None
    if ours is not None and steps is not None and ours != steps:
        problems.add(
            "pipeline.micro_batches",
            f"must agree with `gradient_accumulation_steps`, which says {steps}",
            got=str(ours),
            do="Keep one of the two keys.",
        )
    return steps if ours is None else ours


def _check_sizes(schedule: Schedule, chunks: int, ranks: int, count: int, problems: Problems) -> None:
    """What torch's schedules demand of pieces and micro-batches."""
    if schedule in SINGLE and chunks != 1:
        problems.add(
            "pipeline.chunks", f"must be 1 with schedule {schedule}", got=str(chunks), do="Use `interleaved`."
        )
    if schedule in V_SHAPED and chunks != 2:
        problems.add(
            "pipeline.chunks", f"must be 2 with schedule {schedule}", got=str(chunks), do="Leave it out."
        )
    if count > MOST_MICRO_BATCHES:
        problems.add(
            "pipeline.micro_batches",
            f"must be at most {MOST_MICRO_BATCHES:,}: a schedule lists every one",
            got=f"{count:,}",
            do="Make micro-batches larger.",
        )
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    if count < least:
        problems.add(
            "pipeline.micro_batches",
            f"must be at least {least} with schedule {schedule} over {ranks} ranks",
            got=str(count),
            do="Use more micro-batches, or `gpipe`."
            if schedule == "1f1b"
            else "Use more micro-batches, or `zbv`.",
        )
    rounds = max(1, count // ranks)
    if schedule in ("interleaved", "interleaved-zero-bubble") and count % rounds:
        problems.add(
            "pipeline.micro_batches",
            f"must be a multiple of its rounds over {ranks} ranks, {rounds}, with schedule {schedule}",
            got=str(count),
            do=f"Use {count // ranks * ranks} or {(count // ranks + 1) * ranks}.",
        )


def _check_gathered(config: Config, problems: Problems) -> None:
    if config.sharding.keep_gathered == "never":
        problems.add(
            "sharding.keep_gathered",
            "must be `step` or `micro-batch` with a pipeline, whose backwards come in two parts",
            got="'never'",
            do="Leave it out for `step`, or use `micro-batch`, which gathers for each forward and backward.",
        )


def _decisions(block: Pipeline, pipelining: Pipelining, ranks: int) -> list[Decision]:
    pieces = pipelining.chunks * ranks
    split_why = "`pipeline.split`" if block.split else "default"
    default = "default" if pipelining.schedule == "1f1b" else f"default below {ranks} micro-batches"
    decisions = [
        Decision(
            "pipeline.schedule", pipelining.schedule, "`pipeline.schedule`" if block.schedule else default
        ),
        Decision("pipeline.split", f"{pieces} pieces by {pipelining.split}", split_why),
    ]
    if pipelining.schedule in SPLIT:
        reasons = {
            "queue": "default: formed in the accumulate dtype",
            "autograd": "default with `precision.reduce.order: tree`",
        }
        why = "`pipeline.weight_grads`" if block.weight_grads else reasons[pipelining.weight_grads]
        decisions.append(Decision("pipeline.weight_grads", pipelining.weight_grads, why))
    return decisions
