"""How a step is taken: by one engine, micro-batch after micro-batch, or by a pipeline, all of them together.

The loop decides which micro-batches and when; here they become calls of what was initialised.

Invariant: the ranks of a pipeline are given the same micro-batches, and come to the same losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult
from zerodrift.engine.unit import loss_in
from zerodrift.errors import ModelError
from zerodrift.pipeline.run import PipelineEngine
from zerodrift.train.feed import MicroBatch


class Driver(Protocol):
    """What trains the model of a run."""

    @property
    def engine(self) -> Engine:
        """This rank's own: of its plan, mesh, sums and checkpoints."""

    def step(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, StepResult]:
        """Train on the micro-batches of a step; their losses, not weighted, in fp32."""

    def losses(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Without gradients, and without what only training does; in fp64."""

    def has_finite_gradient(self, batch: MicroBatch, name: str) -> bool:
        """Whether a micro-batch by itself leaves a finite gradient of a parameter. Nothing else changes."""

    def destroy(self) -> None:
        """Leave the process groups."""


class WholeModelDriver:
    """A model that each rank runs from its first layer to its last."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, StepResult]:
        losses = []
        for batch in batches:
            loss = loss_of(self.engine(**_inputs(batch)))
            losses.append(loss.detach().float())
            self.engine.backward(loss if batch.weight == 1.0 else loss * batch.weight)
        return torch.stack(losses), self.engine.step()

    def losses(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        self.engine.eval()
        with torch.no_grad():
            losses = [loss_of(self.engine(**_inputs(batch))).double() for batch in batches]
        self.engine.train()
        return torch.stack(losses)

    def has_finite_gradient(self, batch: MicroBatch, name: str) -> bool:
        loss = loss_of(self.engine(**_inputs(batch)))
        self.engine.backward(loss * batch.weight)
        finite = bool(torch.isfinite(self.engine.full_gradient(name)).all())
        self.engine.zero_grad()
        return finite

    def destroy(self) -> None:
        self.engine.destroy()


class PipelineDriver:
    """A model that is cut over the ranks of a pipeline."""

    def __init__(self, model: PipelineEngine) -> None:
        self._whole = model
        self.engine = model.stage

    def step(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, StepResult]:
        weights = [batch.weight for batch in batches]
        result = self._whole.step([_inputs(batch) for batch in batches], weights)
        return torch.tensor(result.losses, device=self.engine.mesh.device), result.step

    def losses(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        self._whole.eval()
        losses = self._whole.losses([_inputs(batch) for batch in batches])
        self._whole.train()
        return torch.tensor(losses, dtype=torch.float64, device=self.engine.mesh.device)

    def has_finite_gradient(self, batch: MicroBatch, name: str) -> bool:
        # A schedule runs as many micro-batches as a step has.
        count = self.engine.accumulation
        self._whole.accumulate([_inputs(batch)] * count, [batch.weight] * count)
        finite = bool(torch.isfinite(self._whole.full_gradient(name)).all())
        self._whole.zero_grad()
        return finite

    def destroy(self) -> None:
        self._whole.destroy()


def _inputs(batch: MicroBatch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch.tokens, "labels": batch.labels}


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returned."""
    loss = loss_in(output)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ModelError(
            "model",
            "must return a loss, or an object with `.loss`, when it is called with `input_ids` and `labels`",
            got=type(output).__name__,
        )
    return loss
