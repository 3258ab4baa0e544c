"""The protocol of an executor of a plan, and `SequentialRunner`, which runs the micro-batches of a step.

A pipeline runs micro-batches in an order of its own (`pipeline/run.py`). `SequentialRunner` runs them one by
one, so that a script for a pipeline also trains without one.

Invariants: an executor counts no micro-batches or steps. Invalid micro-batches of one rank are an error on
all ranks before any is run. A micro-batch is never changed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from zerodrift.comm import Collectives, raise_on_all_ranks
from zerodrift.engine.habits.determinism import generators_kept, seed_generators
from zerodrift.engine.progress import StepResult, TrainingProgress
from zerodrift.engine.shards import SegmentShard, Span
from zerodrift.engine.step.compute import ForwardPrecision
from zerodrift.engine.step.norm import Norm
from zerodrift.engine.values import WholeValues
from zerodrift.errors import ModelError, Problem, kind_of
from zerodrift.optim import OptimizerState
from zerodrift.plan import Plan
from zerodrift.report import UpdateReport


class Executor(Protocol):
    """Executes one rank's part of a plan over one model.

    In a pipeline `part`, `module` and `forwards` are this rank's part of the plan, of the model, and its
    pieces with a forward; elsewhere the whole plan, the model, and the model alone. `updater` is None if
    nothing is trained or no optimizer was given.
    """

    part: Plan
    module: nn.Module
    whole: nn.Module
    forwards: Sequence[nn.Module]
    precision: ForwardPrecision
    updater: OptimizerState | None

    @property
    def runner(self) -> Any:
        """Return an object with the methods of `SequentialRunner`; None if `engine(...)` runs a
        micro-batch."""
        return None

    def follow(self, progress: TrainingProgress) -> None:
        """Begin training. `progress` must be told of backwards that the engine does not call."""

    def require_peers(self) -> None:
        """Raise if a rank is known to have failed. Only a pipeline needs it: elsewhere a missing rank ends a
        collective."""
        return

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a forward."""

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a loss, which is a micro-batch."""

    def recover(self) -> None:
        """End running forwards, backwards and collectives after an exception; earlier gradients stay."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a step, in which `norm` reduces the gradients and `update` uses them."""

    def norm(self) -> Norm: ...
    def reduced(self) -> Iterator[tuple[Sequence[Span], torch.Tensor]]:
        """Yield this rank's share of the gradients, between `norm` and `update`. Ranks share no element."""

    def bad(self) -> list[str]:
        """Return the first parameters whose gradient is not finite."""

    def update(self, multiplier: float) -> None:
        """Update with the gradients times `multiplier`, and gather the new values."""

    def forget(self) -> None:
        """Drop the gradients of this step."""

    @property
    def values(self) -> WholeValues: ...
    def pieces(self) -> Iterator[SegmentShard]: ...
    def drop(self) -> None: ...
    def sync_storage(self) -> None: ...
    def update_statistics(self) -> UpdateReport: ...
    def leave(self) -> None:
        """Remove the hooks; no call is running."""


# --- micro-batches one by one -----------------------------------------------------------------------------

LossOf: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a step over all of its micro-batches."""

    losses: tuple[float, ...]
    """Loss of each micro-batch of this rank's data, without its weight and the loss scale."""
    step: StepResult
    """The same on every rank."""
    weights: tuple[float, ...] = ()
    """Factor of each loss; empty where all count 1."""

    @property
    def loss(self) -> float:
        """The weighted mean over micro-batches."""
        weights = self.weights or (1.0,) * len(self.losses)
        return sum(map(operator.mul, weights, self.losses)) / len(self.losses)


@dataclass(frozen=True, slots=True)
class SequentialRunner:
    """Runs the micro-batches of a step one after the other. A pipeline's executor has the same methods."""

    engine: Any
    comm: Collectives
    loss_of: LossOf | None
    """None for a model that is called with a micro-batch's items and returns a loss."""

    def prepare(
        self, micro_batches: Iterable[Any], weights: Sequence[float], count: int | None
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Return the micro-batches on this device and their weights. Invalid ones, or another number than
        `count`, are one error on every rank."""
        with raise_on_all_ranks(self.comm):
            batches = list(micro_batches)
            numbers, wrong = numbers_of(weights, len(batches))
            problem = wrong_number(len(batches), count) or wrong
            if problem is not None:
                raise ModelError.of([problem])
            unnamed = [kind_of(batch) for batch in batches if not isinstance(batch, Mapping)]
            if self.loss_of is None and unnamed:
                must = "must each be a dict of the model's keyword arguments"
                do = "Pass `parts=zerodrift.Parts(...)` to `initialize`, which computes their loss."
                raise ModelError("micro_batches", must, got=unnamed[0], do=do)
        device = self.comm.mesh.device
        return [batch_on(batch, device, lambda tensor: tensor) for batch in batches], numbers

    def train(
        self, batches: list[Any], weights: tuple[float, ...], seeds: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Run forwards and backwards; return the losses, without weights. Each micro-batch is seeded, if
        there are seeds."""
        losses, device = [], self.comm.mesh.device
        with generators_kept(device) if seeds else contextlib.nullcontext():
            for place, batch in enumerate(batches):
                if seeds:
                    seed_generators(seeds[place], device)
                weight = weights[place] if weights else 1.0
                with torch.enable_grad():
                    loss = self._loss(batch)
                    self.engine.backward(loss if weight == 1.0 else loss * weight)
                losses.append(loss.detach().double())
        return tuple(torch.stack(losses).tolist())

    def losses(self, batches: list[Any]) -> tuple[float, ...]:
        with torch.no_grad():
            return tuple(torch.stack([self._loss(batch).double() for batch in batches]).tolist())

    def _loss(self, batch: Any) -> torch.Tensor:
        if self.loss_of is None:
            return one_number(item_in(self.engine(**batch), "loss"))
        # Replace the model's forward, so that the hooks around it run.
        model, loss_of = self.engine.module, self.loss_of
        before = model.__dict__.get("forward")
        model.forward = lambda given: loss_of(model, given)
        try:
            return one_number(self.engine(batch))
        finally:
            del model.forward
            if before is not None:
                model.forward = before


def item_in(output: Any, name: str) -> Any:
    """Return what a model's output has as attribute or item `name`, the first of several, or the output."""
    found = getattr(output, name, None)
    if found is None and isinstance(output, Mapping):
        found = output.get(name)
    if found is None and isinstance(output, (tuple, list)) and output:
        found = output[0]
    return output if found is None else found


def one_number(loss: Any) -> torch.Tensor:
    """Return a loss without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError("loss", "must be one number per micro-batch", got=got)
    return loss if loss.dim() == 0 else loss.sum()  # not a view, because a schedule detaches it in place


def wrong_number(count: int, wanted: int | None) -> Problem | None:
    """Return what is wrong with the number of micro-batches."""
    if wanted is not None and count != wanted:
        must = f"must be {wanted}, as `gradient_accumulation_steps` or `pipeline.micro_batches` says"
        return Problem("micro_batches", must, got=str(count))
    return None if count else Problem("micro_batches", "must be at least one", got="none")


def numbers_of(weights: Sequence[Any], count: int) -> tuple[tuple[float, ...], Problem | None]:
    """Return weights as numbers, and what is wrong with them."""
    try:
        numbers = tuple(float(number) for number in weights)
    except (TypeError, ValueError, RuntimeError):
        numbers, wrong = (), repr(weights)
    else:
        wrong = next((repr(number) for number in numbers if not math.isfinite(number)), "")
        if numbers and len(numbers) != count:
            wrong = str(len(numbers))
    if not wrong:
        return numbers, None
    must = f"must be {count} finite numbers, one for each micro-batch, or none"
    return (), Problem("weights", must, got=wrong)


def batch_on(batch: Any, device: torch.device, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a micro-batch with its tensors moved and changed; containers keep their classes."""

    def moved(value: Any) -> Any:
        return batch_on(value, device, change)

    if isinstance(batch, torch.Tensor):
        return change(batch.to(device))
    if isinstance(batch, Mapping):
        items = {key: moved(value) for key, value in batch.items()}
        if type(batch) is dict or not hasattr(batch, "__setitem__"):
            return items
        copied: Any = copy.copy(batch)
        if (data := getattr(batch, "data", None)) is not None:
            copied.data = dict(data)  # a copy of a UserDict shares its data
        for key, item in items.items():
            copied[key] = item
        return copied
    if isinstance(batch, tuple):
        values = map(moved, batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, list):
        return [moved(value) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(copied, field.name, moved(getattr(batch, field.name)))
        return copied
    return batch
