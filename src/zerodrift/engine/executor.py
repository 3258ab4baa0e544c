"""What executes a plan, as `Engine` asks for it: the few verbs in which backends and pipelines differ.

Invariant: an executor counts nothing and decides nothing about a step; `Engine` does, for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zerodrift.engine.compute import ForwardPrecision
from zerodrift.engine.grads import BackwardCallbacks
from zerodrift.engine.parameter import WholeValues
from zerodrift.engine.progress import TrainingProgress
from zerodrift.engine.scale import Norm
from zerodrift.engine.shards import SegmentShard, Span
from zerodrift.optim.updater import OptimizerState
from zerodrift.plan.table import Plan
from zerodrift.report.updates import UpdateReport


class BatchRunner(Protocol):
    """What runs all micro-batches of a step."""

    def taken(
        self, micro_batches: Iterable[Any], weights: Sequence[float], count: int | None
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Micro-batches on this device and their weights, `count` of them where one is asked for; what is
        wrong with them is one error on every rank."""

    def train(
        self, batches: list[Any], weights: tuple[float, ...], seeds: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Forwards and backwards; the losses, without weights. Random numbers of a micro-batch begin with its
        seed, where there are any."""

    def losses(self, batches: list[Any]) -> tuple[float, ...]:
        """Forwards alone."""


class Executor(Protocol):
    """One rank's part of a plan, over one model."""

    part: Plan
    """What this rank executes of the plan: all of it, but for a pipeline."""
    module: nn.Module
    """The model; of a pipeline, the tree that was cut."""
    whole: nn.Module
    """All of the model; of a pipeline, without values for what is elsewhere."""
    forwards: Sequence[nn.Module]
    """The modules whose forwards are the model's: itself, or this rank's pieces."""
    precision: ForwardPrecision

    @property
    def runner(self) -> BatchRunner | None:
        """What runs micro-batches in an order of its own; None where a caller runs each by itself."""

    @property
    def updater(self) -> OptimizerState | None:
        """None where nothing is trained, or no optimizer was given."""

    def follow(self, progress: TrainingProgress, callbacks: BackwardCallbacks) -> None:
        """Training may begin; backwards that the engine does not call are told to `callbacks`."""

    def require_peers(self) -> None:
        """Raise if another rank is known to have ended all of them."""

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """To be around a forward. Raises at once where the model is not what it was."""

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """To be around the backward of a loss, which counts as a micro-batch."""

    def recover(self) -> None:
        """Something was raised in the middle: nothing may be under way or half gathered afterwards. What
        whole micro-batches have summed stays."""

    # --- the step ---------------------------------------------------------------------------------------

    def step(self) -> contextlib.AbstractContextManager[None]:
        """To be around a call of `step`. Raises where parameters cannot be updated."""

    def norm(self) -> Norm:
        """Of all gradients of a step, which are reduced when this returns."""

    def reduced(self) -> Iterator[tuple[Sequence[Span], torch.Tensor]]:
        """Between `norm` and `update`, this rank's share of the gradients: each element is on one rank."""

    def bad(self) -> list[str]:
        """The first parameters whose gradient is not finite."""

    def update(self, multiplier: float) -> None:
        """Update with the gradients times `multiplier`, and show the new values."""

    def forget(self) -> None:
        """There are no gradients of this step."""

    # --- values -----------------------------------------------------------------------------------------

    @property
    def values(self) -> WholeValues:
        """Whole values out and in."""

    def pieces(self) -> Iterator[SegmentShard]:
        """What this rank owns, one per segment in the order of the plan."""

    def drop(self) -> None:
        """Give up what is gathered: values are about to change."""

    def sync_storage(self) -> None:
        """Pieces were filled: what others show of them follows."""

    def update_statistics(self) -> UpdateReport:
        """See `Engine.update_statistics`."""

    def leave(self) -> None:
        """Take the hooks off; nothing is under way."""
