"""One step of a run: the micro-batches of this rank in, the losses of all ranks out.

Invariant: what a step does depends on the job, its number and the state before it, and under
`reduce.order: tree` not on the number of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zerodrift.engine.progress import StepResult
from zerodrift.train.data.batches import MicroBatch
from zerodrift.train.loop.session import Session


@dataclass(frozen=True, slots=True)
class StepTaken:
    """A step that was tried."""

    batches: list[MicroBatch]
    """Of this rank."""
    own: list[float]
    """Their losses, not weighted."""
    losses: list[float]
    """The weighted loss of every micro-batch, by its number over all ranks."""
    result: StepResult
    asked: bool
    """Whether any rank was asked to stop."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def take_step(
    session: Session,
    step: int,
    around: contextlib.AbstractContextManager[object],
    asked: Callable[[], bool] = lambda: False,
) -> StepTaken:
    """Take step number `step`, counted from 0, inside `around`. Every rank calls it."""
    engine, seat = session.engine, session.seat
    mesh = engine.mesh
    # Dropout and the like depend on the step and the rank, so nothing has to be kept to go on.
    place = mesh.rank("data") + mesh.size("data") * mesh.rank("pipeline")
    torch.manual_seed(_seed(session.job.run.seed, step, place))
    batches = list(session.feed.step(step))
    with around:
        losses, result = session.driver.step(batches)
    # One small sum, of which each rank has some places.
    places = torch.zeros(seat.ranks * seat.accumulation + 1, dtype=torch.float64, device=losses.device)
    if not mesh.rank("pipeline"):  # all stages have the same losses
        weights = places.new_tensor([batch.weight for batch in batches])
        places[list(seat.numbers)] = losses.double() * weights
    places[-1] = float(asked())
    *every, stop = engine.comm.all_reduce_sum(places, "world").tolist()
    return StepTaken(batches, losses.tolist(), every, result, bool(stop))


def _seed(seed: int, step: int, rank: int) -> int:
    return (seed * 1_000_003 + step) * 65_537 + rank
