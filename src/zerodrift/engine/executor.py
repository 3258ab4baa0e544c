"""The protocol of an executor of a plan, as `Engine` calls it, and the micro-batches of a step.

A pipeline runs micro-batches in an order of its own (`pipeline/run.py`); `SequentialRunner` runs them one by
one, so that a script for a pipeline trains without one.

Invariants: an executor counts nothing and decides nothing about a step. What is wrong with the micro-batches
of one rank is an error on all, before any of them is run; and a micro-batch is never changed.
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
from zerodrift.errors import ModelError, Problem
from zerodrift.optim import OptimizerState
from zerodrift.plan import Plan
from zerodrift.report import UpdateReport


class Executor(Protocol):
    """Executes one rank's part of a plan over one model.

    In a pipeline `part`, `module` and `forwards` are this rank's part of the plan, the tree that was cut and
    its pieces; elsewhere all of the plan, the model and its forward. `runner` is None where a caller runs
    each micro-batch by itself, `updater` where nothing is trained or no optimizer was given.
    """

    part: Plan
    module: nn.Module
    whole: nn.Module
    forwards: Sequence[nn.Module]
    precision: ForwardPrecision
    updater: OptimizerState | None

    @property
    def runner(self) -> Any:
        """Return what has the methods of `SequentialRunner`, or None."""
        return None

    def follow(self, progress: TrainingProgress) -> None:
        """Begin training; `progress` hears of backwards that the engine does not call."""

    def require_peers(self) -> None:
        """Raise if another rank is known to have ended all of them. Elsewhere than in a pipeline, peers that
        are gone end a collective by themselves."""
        return

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a forward."""

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Return a context for the backward of a loss, which counts as a micro-batch."""

    def recover(self) -> None:
        """End what is under way after an exception; gradients of whole micro-batches stay."""

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a step, in which `norm` reduces the gradients and `update` uses them."""

    def norm(self) -> Norm: ...
    def reduced(self) -> Iterator[tuple[Sequence[Span], torch.Tensor]]:
        """Yield this rank's share of the gradients, between `norm` and `update`: each element is on one
        rank."""

    def bad(self) -> list[str]:
        """Return the first parameters whose gradient is not finite."""

    def update(self, multiplier: float) -> None:
        """Update with the gradients times `multiplier`, and show the new values."""

    def forget(self) -> None:
        """Drop the gradients of this step."""

    @property
    def values(self) -> WholeValues: ...
    def pieces(self) -> Iterator[SegmentShard]: ...
    def drop(self) -> None: ...
    def sync_storage(self) -> None: ...
    def update_statistics(self) -> UpdateReport: ...
    def leave(self) -> None:
        """Take the hooks off; nothing is under way."""


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
        """The weighted mean over micro-batches, whose gradient the step has used."""
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
        """Return the micro-batches on this device and their weights. What is wrong with them, such as another
        number than `count`, is one error on every rank."""
        with raise_on_all_ranks(self.comm):
            batches = list(micro_batches)
            numbers, wrong = numbers_of(weights, len(batches))
            unnamed = None if self.loss_of is not None else next(filter(None, map(_unnamed, batches)), None)
            problem = wrong_number(len(batches), count) or unnamed or wrong
            if problem is not None:
                raise ModelError.of([problem])
        device = self.comm.mesh.device
        return [batch_on(batch, device, lambda tensor: tensor) for batch in batches], numbers

    def train(
        self, batches: list[Any], weights: tuple[float, ...], seeds: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Run forwards and backwards; return the losses, without weights. Random numbers of a micro-batch
        begin with its seed, where there are seeds."""
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
            return one_number(loss_in(self.engine(**batch)))
        # The model's forward is replaced, with all hooks that are around its own.
        model, loss_of = self.engine.module, self.loss_of
        before = model.__dict__.get("forward")
        model.forward = lambda given: loss_of(model, given)
        try:
            return one_number(self.engine(batch))
        finally:
            del model.forward
            if before is not None:
                model.forward = before


def _unnamed(batch: Any) -> Problem | None:
    if isinstance(batch, Mapping):
        return None
    return Problem(
        "micro_batches",
        "must each be a dict of the model's keyword arguments",
        got=type(batch).__name__,
        do="Pass `parts=zerodrift.Parts(...)` to `initialize`, which says what is done with them.",
    )


def loss_in(output: Any) -> Any:
    """Find a model's loss in what it returned: `.loss`, an item of that name, the first of several, or all of
    it."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    return output if loss is None else loss


def one_number(loss: Any) -> torch.Tensor:
    """Return a loss without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError("loss", "must be one number per micro-batch", got=got)
    return loss if loss.dim() == 0 else loss.sum()  # no view: a schedule detaches it in place


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
    """Return a micro-batch with its tensors changed and moved; its containers are copies of their classes."""

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
            copied.data = dict(data)  # a copied UserDict has the original's
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
