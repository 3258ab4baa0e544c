"""One model under one policy, as an engine: what every number of an audit is measured on.

The model is built anew for each run and its values come from the same place, so two runs differ in their
policies and in nothing else. Random numbers are seeded alike before every micro-batch.

Invariant: what is measured is the engine that trains, at any stage and on any number of ranks; the model that
was handed in is never touched.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import start, started
from zerodrift.engine.engine import Engine
from zerodrift.engine.executor import batch_on
from zerodrift.engine.native import NativeExecutor
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.mesh import MeshShape
from zerodrift.model.empty import empty
from zerodrift.plan.build import build
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Policy
from zerodrift.weights.load import InitialValues


def place() -> tuple[int, int]:
    """This rank, and how many were started."""
    return started()


REFUSED = (ConfigError, ModelError, UnsupportedError)
"""What comes of a variant that the plan or the model does not admit; anything else is a failure."""

LARGE = 10_000_000
"""Parameters of a model that is not left to the garbage collector."""

Batch = Mapping[str, Any]
"""Keyword arguments of the model."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is looked at: how it is built, and where its values come from."""

    make: Callable[[], nn.Module]
    weights: str | os.PathLike[str] | None = None
    """Files; None for the model's own values."""

    @staticmethod
    def of(model: nn.Module | Callable[[], nn.Module], weights: str | os.PathLike[str] | None) -> Subject:
        """A module is copied for every run; a function is called for every run, inside `empty()`."""
        if isinstance(model, nn.Module):
            bare = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            if bare and weights is None:
                raise ModelError(
                    "model",
                    "must have values, or be a function that builds it",
                    got=f"{bare[0]} on the meta device",
                    do="Pass the function that builds it, or `weights`.",
                )
            return Subject(lambda: copy.deepcopy(model), weights)
        return Subject(_built(model), weights)

    def frozen(self) -> Subject:
        """The same for whoever looks at forwards alone: nothing is held for gradients, and no dtype is
        refused for what training would do with it."""

        def made() -> nn.Module:
            return self.make().requires_grad_(False)

        return Subject(made, self.weights)


def _built(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        with empty():
            return make().train()

    return built


@contextlib.contextmanager
def running(subject: Subject, policy: Policy, mesh: MeshShape) -> Iterator[Engine]:
    """The model under a policy, until the end of the context. A call of all ranks."""
    if policy.pipeline is not None or policy.backend != "native":
        what = "a pipeline" if policy.pipeline is not None else f"backend {policy.backend}"
        raise UnsupportedError(
            "the audit",
            "must run the whole model on each rank, on the native backend",
            got=what,
            do="Audit the same config without it: the columns are the same.",
        )
    model = subject.make()
    _without_recomputation(model)
    if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
        gc.collect()  # the model of the run before this one and its hooks hold each other
    joined = start(mesh)
    try:
        first = InitialValues.begin(model, subject.weights, True, Collectives(joined))
        plan = build(policy, first.spec, mesh)
        sources = first.sources(plan)
        engine = Engine(plan, joined, lambda comm: NativeExecutor(plan, model, comm, None, sources))
        first.finish()
    except BaseException:
        joined.stop()
        raise
    try:
        yield engine
    finally:
        engine.destroy()


def _without_recomputation(model: nn.Module) -> None:
    """A forward that is run again in the backward would be looked at twice."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010


def planned(subject: Subject, policy: Policy, mesh: MeshShape) -> Plan:
    """The plan of such a run, without running it."""
    from zerodrift.model.sources import describe

    return build(policy, describe(subject.make()), mesh)


def seeded(number: int) -> None:
    """Before the forward of micro-batch `number`: what dropout draws is the same in every run."""
    torch.manual_seed(1_000_003 + number)


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    """What a model returns as its loss; an error that names what it is without one."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, torch.Tensor) and output.numel() == 1:
        loss = output
    if loss is None and isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        loss = output[0] if output[0].numel() == 1 else None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ModelError(
            "model",
            "must return a loss: one number, or what has `.loss`",
            got=f"{type(output).__name__} for {', '.join(batch)}",
            do="A model of `transformers` returns one where the batch has `labels`.",
        )
    return loss.reshape(())


def called(engine: Engine, batch: Batch) -> Any:
    """The forward of one micro-batch; what the model says of a batch that it cannot take is told by name."""
    try:
        return engine(**batch_on(batch, engine.mesh.device, lambda tensor: tensor))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{key} {list(getattr(value, 'shape', ()))}" for key, value in batch.items())
        raise ModelError(
            "batch", "must be what the model can be called with", got=f"{shapes}: {error}"
        ) from error


def checked(batches: Sequence[Any]) -> list[Batch]:
    """Micro-batches as dicts; an error for anything else, and for none."""
    if not batches:
        raise ModelError("batches", "must be at least one", got="none")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            must = "must be a dict of the model's keyword arguments"
            raise ModelError(f"batches[{number}]", must, got=type(batch).__name__)
        for key, value in batch.items():
            bad = isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all()
            if bad:
                raise ModelError(f"batches[{number}][{key!r}]", "must be finite", got="inf or nan")
    return list(batches)
