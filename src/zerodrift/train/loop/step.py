"""Run one optimizer step of a job: this rank's micro-batches in, the losses of all ranks out.

A step depends on the job, its number and the state before it. Under `reduce.order: tree` it does not depend
on the number of ranks. The ranks of a pipeline get the same micro-batches and the same losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.engine.digest import Digest
from zerodrift.engine.engine import Engine
from zerodrift.engine.executor import loss_in
from zerodrift.engine.progress import StepResult
from zerodrift.train.data.batches import Feed, MicroBatch


@dataclass(frozen=True, slots=True)
class StepRun:
    """A step that was tried."""

    batches: list[MicroBatch]
    own: list[float]
    """Losses of this rank's micro-batches, not weighted."""
    losses: list[float]
    """Weighted loss of every micro-batch, by its number over all ranks."""
    result: StepResult
    asked: bool
    """Whether any rank was asked to stop."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


def run_step(
    engine: Engine,
    feed: Feed,
    seed: int,
    step: int,
    around: contextlib.AbstractContextManager[object],
    asked: Callable[[], bool] = lambda: False,
) -> StepRun:
    """Run step `step`, counted from 0, inside `around`; `seed` is that of the run. Collective."""
    mesh, seat = engine.mesh, feed.seat
    # Dropout and the like depend on the step and the rank, so a checkpoint keeps no random state.
    rank = mesh.rank("data") + mesh.size("data") * mesh.rank("pipeline")
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + rank)
    batches = list(feed.step(step))
    with around:
        inputs = [batch.inputs() for batch in batches]
        result = engine.train_batch(inputs, [batch.weight for batch in batches])
    losses = torch.tensor(result.losses, device=mesh.device)  # not weighted, fp32
    # One small sum, in which each rank fills in its own places.
    places = torch.zeros(seat.ranks * seat.accumulation + 1, dtype=torch.float64, device=losses.device)
    if not mesh.rank("pipeline"):  # all stages have the same losses
        weights = places.new_tensor([batch.weight for batch in batches])
        places[list(seat.numbers)] = losses.double() * weights
    places[-1] = float(asked())
    *every, stop = engine.comm.all_reduce_sum(places, "world").tolist()
    return StepRun(batches, losses.tolist(), every, result.step, bool(stop))


def losses_of(engine: Engine, batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Return losses in evaluation mode, without gradients; fp64."""
    engine.eval()
    losses = engine.losses([batch.inputs() for batch in batches])
    engine.train()
    return torch.tensor(losses, dtype=torch.float64, device=engine.mesh.device)


def has_finite_gradient(engine: Engine, batch: MicroBatch, name: str) -> bool:
    """Return True if a micro-batch alone leaves a finite gradient of a parameter. Changes nothing else."""
    policy = engine.plan.policy
    if policy.pipeline is None and not policy.tree:
        loss = loss_in(engine(**batch.inputs()))
        engine.backward(loss * batch.weight)
    else:  # a pipeline runs as many micro-batches as a step has, and a tree needs all of them
        count = engine.accumulation
        engine.accumulate([batch.inputs()] * count, [batch.weight] * count)
    finite = bool(torch.isfinite(engine.parameter(name).gradient).all())
    engine.zero_grad()
    return finite


class StepDigests:
    """Takes digests of one step, for `zerodrift replay`: its gradients before the update, and the state
    after.

    Two runs that computed the same bits have the same digests, on any number of ranks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gradients: Digest | None = None

    def __enter__(self) -> None:
        def digest_gradients() -> None:
            self._gradients = self._engine.gradient_digest()

        self._engine.before_update = digest_gradients

    def __exit__(self, *error: object) -> None:
        self._engine.before_update = None

    def line(self, step: int, losses: list[float]) -> dict[str, Any]:
        """Return the metrics line of a step; `losses` by the numbers of micro-batches. Collective."""
        state = self._engine.digest()
        return {
            "step": step,
            "digest": str(state),
            "state": state.by_unit(),
            "gradients": {} if self._gradients is None else self._gradients.by_unit(),
            "losses": [loss.hex() for loss in losses],
        }
