"""How a step is taken: micro-batches of the feed become calls of the engine.

The loop decides which micro-batches and when.

Invariant: the ranks of a pipeline are given the same micro-batches, and come to the same losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult
from zerodrift.engine.unit import loss_in
from zerodrift.train.data.batches import MicroBatch


class Driver:
    """What trains the model of a run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, batches: Sequence[MicroBatch]) -> tuple[torch.Tensor, StepResult]:
        """Train on the micro-batches of a step; their losses, not weighted, in fp32."""
        weights = [batch.weight for batch in batches]
        result = self.engine.train_batch([batch.inputs() for batch in batches], weights)
        return torch.tensor(result.losses, device=self.engine.mesh.device), result.step

    def losses(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Without gradients, and without what only training does; in fp64."""
        self.engine.eval()
        losses = self.engine.losses([batch.inputs() for batch in batches])
        self.engine.train()
        return torch.tensor(losses, dtype=torch.float64, device=self.engine.mesh.device)

    def has_finite_gradient(self, batch: MicroBatch, name: str) -> bool:
        """Whether a micro-batch by itself leaves a finite gradient of a parameter. Nothing else changes."""
        policy = self.engine.plan.policy
        if policy.pipeline is None and not policy.tree:
            loss = loss_in(self.engine(**batch.inputs()))
            self.engine.backward(loss * batch.weight)
        else:  # a schedule runs as many micro-batches as a step has, and a tree is complete with all of them
            count = self.engine.accumulation
            self.engine.accumulate([batch.inputs()] * count, [batch.weight] * count)
        finite = bool(torch.isfinite(self.engine.parameter(name).gradient).all())
        self.engine.zero_grad()
        return finite
