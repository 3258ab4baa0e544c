"""All micro-batches of a step at once, and what they came to: `Engine.train_batch`.

A pipeline runs them in an order of its own (`pipeline/run.py`); here they are run one by one, so that a
script for a pipeline trains without one.

Invariant: what is wrong with the micro-batches of one rank is an error on all, before any of them is run; and
a micro-batch is never changed.
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

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.progress import StepResult
from zerodrift.engine.seeds import generators_kept, seed_generators
from zerodrift.engine.unit import loss_in
from zerodrift.errors import ModelError, Problem

LossOf: TypeAlias = Callable[[nn.Module, Any], torch.Tensor]
"""(model, micro-batch) -> its loss."""


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The result of a step over all of its micro-batches."""

    losses: tuple[float, ...]
    """Of each micro-batch, without its weight and the loss scale; those of this rank's data."""
    step: StepResult
    """The same on every rank."""
    weights: tuple[float, ...] = ()
    """By which each loss was multiplied; empty where all count 1."""

    @property
    def loss(self) -> float:
        """The mean over micro-batches, each with its weight: what the gradients are of."""
        weights = self.weights or (1.0,) * len(self.losses)
        return sum(map(operator.mul, weights, self.losses)) / len(self.losses)


class Runs(Protocol):
    """An engine, as far as micro-batches are run on it."""

    @property
    def module(self) -> nn.Module: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, loss: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class OneByOne:
    """Runs the micro-batches of a step one after the other."""

    engine: Runs
    comm: Collectives
    loss_of: LossOf | None
    """None for a model that is called with a micro-batch's items and returns a loss."""

    def taken(
        self, micro_batches: Iterable[Any], weights: Sequence[float], count: int | None
    ) -> tuple[list[Any], tuple[float, ...]]:
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
        with _forward_is(self.engine.module, self.loss_of):
            return one_number(self.engine(batch))


@contextlib.contextmanager
def _forward_is(model: nn.Module, forward: LossOf) -> Iterator[None]:
    """Inside, the model's forward is this one: around it is all that is around the model's own."""
    before = model.__dict__.get("forward")
    model.forward = lambda batch: forward(model, batch)
    try:
        yield
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


def one_number(loss: Any) -> torch.Tensor:
    """A loss, without dimensions."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError("loss", "must be one number per micro-batch", got=got)
    return loss if loss.dim() == 0 else loss.sum()  # no view: a schedule detaches it in place


def wrong_number(count: int, wanted: int | None) -> Problem | None:
    """What is wrong with how many micro-batches there are."""
    if wanted is not None and count != wanted:
        must = f"must be {wanted}, as `gradient_accumulation_steps` or `pipeline.micro_batches` says"
        return Problem("micro_batches", must, got=str(count))
    return None if count else Problem("micro_batches", "must be at least one", got="none")


def numbers_of(weights: Sequence[Any], count: int) -> tuple[tuple[float, ...], Problem | None]:
    """Weights as numbers, and what is wrong with them."""
    numbers: tuple[float, ...] = ()
    wrong = ""
    try:
        numbers = tuple(float(number) for number in weights)
    except (TypeError, ValueError, RuntimeError):
        wrong = repr(weights)
    bad = next((number for number in numbers if not math.isfinite(number)), None)
    if numbers and len(numbers) != count:
        wrong = str(len(numbers))
    elif bad is not None:
        wrong = repr(bad)
    if not wrong:
        return numbers, None
    must = f"must be {count} finite numbers, one for each micro-batch, or none"
    return (), Problem("weights", must, got=wrong)


def batch_on(batch: Any, device: torch.device, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A micro-batch with its tensors changed and moved; every container of it is a copy of its own class."""

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
            copied.data = dict(data)  # of a UserDict, whose copy has the original's
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
