"""torch's pipeline schedules by our names, and the order that they run in, as data.

torch's classes decide the order of actions. They are made here for stages that run, and asked for their order
with stages that are only numbers. Private in torch, and used in this file only (2.13 to 2.15): the lists of
actions of a schedule (`pipeline_order`, `pipeline_order_with_comms`), and its steps for a forward and a
backward, for pairs of these that it leaves to others (`register_custom_function`).

Invariant: the order that a plan shows is the one that the schedule's own class runs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from zerodrift.plan import TIME, Action, Plan, Timeline, can_interleave, pieces, pieces_of
from zerodrift.policy import SINGLE, V_SHAPED, Schedule

CLASSES: dict[Schedule, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}

MOST_DRAWN = 5_000
"""Most pieces times micro-batches whose order is shown in a report."""


def _torch() -> Any:
    """Import torch's schedules only if there is a pipeline: the module imports the compiler."""
    from torch.distributed.pipelining import schedules

    return schedules


def training(
    name: Schedule, stages: Sequence[Any], micro_batches: int, loss: Callable[..., torch.Tensor] | None
) -> Any:
    """Make the schedule of a step over the stages of this rank; gradients stay sums."""
    given = stages[0] if name in SINGLE else list(stages)
    return getattr(_torch(), CLASSES[name])(given, micro_batches, loss_fn=loss, scale_grads=False)


def forwards(name: Schedule, stages: Sequence[Any], micro_batches: int) -> Any:
    """Make a schedule of forwards alone over the same stages."""
    if name in SINGLE:
        return _torch().ScheduleGPipe(stages[0], micro_batches)
    if name not in V_SHAPED:
        return _torch().ScheduleLoopedBFS(list(stages), micro_batches)
    schedule = _torch().ScheduleZBVZeroBubble(list(stages), micro_batches)
    # A V passes gradients on inside of a rank, which torch also tries where there are none.
    kept = ("F", "SEND_F", "WAIT_SEND_F", "RECV_F")
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.value in kept]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    return schedule


def run_pairs(
    schedule: Any, run: Callable[[Callable[[], None], Callable[[], None]], None], when: Callable[..., bool]
) -> None:
    """Let `run` execute each pair of a forward and a backward for which `when(piece, piece)` is true; others
    run one after the other, as in torch."""

    def pair(action: Any, given: Any) -> None:
        first, second = action.sub_actions
        forward, backward = partial(_forward, schedule, given, first), partial(_backward, schedule, second)
        if when(first.stage_index, second.stage_index):
            run(forward, backward)
        else:
            forward()
            backward()

    schedule.register_custom_function(_torch().OVERLAP_F_B, pair)


def _forward(schedule: Any, given: Any, action: Any) -> None:
    stages, piece, micro_batch, stage = _at(schedule, action)
    if not stage.is_first and piece - 1 not in stages:
        _torch()._wait_batch_p2p(schedule.fwd_recv_ops.pop((piece, micro_batch)))
    arguments = given.arg_mbs[micro_batch], given.kwarg_mbs[micro_batch]
    output = stage.forward_one_chunk(micro_batch, *arguments, save_forward_output=False)
    schedule._maybe_compute_loss(stage, output, given.target_mbs, micro_batch)
    if piece + 1 in stages:
        stages[piece + 1].set_local_fwd_input(output, micro_batch)


def _backward(schedule: Any, action: Any) -> None:
    stages, piece, micro_batch, stage = _at(schedule, action)
    if not stage.is_last and piece + 1 not in stages:
        _torch()._wait_batch_p2p(schedule.bwd_recv_ops.pop((piece, micro_batch)))
    loss = schedule._maybe_get_loss(stage, micro_batch)
    schedule.backward_counter[piece] += 1
    last = schedule.backward_counter[piece] == schedule._n_microbatches
    stage.backward_one_chunk(micro_batch, loss=loss, full_backward=True, last_backward=last)
    if piece - 1 in stages:
        stages[piece - 1].set_local_bwd_input(stage.get_local_bwd_output(micro_batch), micro_batch)


def _at(schedule: Any, action: Any) -> tuple[dict[int, Any], int, int, Any]:
    """Return the stages of this rank by piece, and the piece, the micro-batch and the stage of an action."""
    stages = {stage.stage_index: stage for stage in schedule._stages}
    return stages, action.stage_index, action.microbatch_index, stages[action.stage_index]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log of the whole order of a schedule, which it writes at every error."""
    logger = logging.getLogger(_torch().__name__)

    def unless_raised(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR

    logger.addFilter(unless_raised)
    try:
        yield
    finally:
        logger.removeFilter(unless_raised)


def timeline(plan: Plan) -> Timeline | None:
    """Return the actions of each rank of the pipeline in a step, in order; None without a pipeline or for
    more than `MOST_DRAWN`."""
    pipeline, count = plan.policy.pipeline, plan.policy.batch.accumulation
    if pipeline is None:
        return None
    ranks, total = plan.mesh.pipeline, pieces(pipeline, plan.mesh)
    if total * count > MOST_DRAWN:
        return None
    if pipeline.schedule in SINGLE:
        # torch lists other actions for these two than they run: its 1F1B names forwards that do not exist.
        warm = [count if pipeline.schedule == "gpipe" else min(count, ranks - rank) for rank in range(ranks)]
        return Timeline(tuple(tuple(_one_piece(rank, count, warm[rank])) for rank in range(ranks)))
    shared = {"num_stages": total, "group_size": ranks, "group_rank": 0, "submod": torch.nn.Module()}
    stages = [SimpleNamespace(stage_index=piece, **shared) for piece in pieces_of(plan, 0)]
    order = training(pipeline.schedule, stages, count, lambda output, target: output).pipeline_order or {}
    entries = [[_actions(entry) for entry in order[rank] if entry is not None] for rank in range(ranks)]
    return Timeline(
        tuple(tuple(action for entry in rank for action in entry) for rank in entries),
        frozenset(
            entry[0]
            for rank in entries
            for entry in rank
            if len(entry) > 1 and can_interleave(plan, entry[0].piece, entry[1].piece)
        ),
    )


def _one_piece(rank: int, count: int, warm: int) -> Iterator[Action]:
    """Yield `warm` forwards, then backwards and forwards in turn, then the backwards that are left."""
    yield from (Action("F", rank, micro) for micro in range(warm))
    for micro in range(count):
        yield Action("B", rank, micro)
        if warm + micro < count:
            yield Action("F", rank, warm + micro)


def _actions(entry: Any) -> list[Action]:
    """Convert an action of torch; a pair is its forward and its backward."""
    if entry.sub_actions:
        return [action for sub_action in entry.sub_actions for action in _actions(sub_action)]
    kind = entry.computation_type.value
    return [Action(kind, entry.stage_index, entry.microbatch_index)] if kind in TIME else []
