"""Run one model under one policy, as an engine: what every number of an audit is measured on.

The model is built anew for each run, with the same values and the same random numbers. So two runs differ in
their policies and in nothing else.

Invariant: the engine is the one that trains, at any stage and on any number of ranks; the caller's model is
never touched.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives, start, started
from zerodrift.config import ConfigSource, load
from zerodrift.engine import Engine, NativeExecutor, batch_on
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.inspect.audit.tokens import Batch, draw_batches, read_batches
from zerodrift.mesh import MeshShape
from zerodrift.model import build_runnable, describe, empty, holds
from zerodrift.plan import Plan, build
from zerodrift.policy import Policy, mesh_for, resolve
from zerodrift.weights import InitialValues

REFUSED = (ConfigError, ModelError, UnsupportedError)
"""Errors of a variant that the plan or the model does not admit."""

LARGE = 10_000_000  # parameters of a model that is collected before the next one is built


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under audit: how to build it, and the files of its values (None: its own)."""

    make: Callable[[], nn.Module]
    weights: str | os.PathLike[str] | None = None

    @staticmethod
    def of(model: nn.Module | Callable[[], nn.Module], weights: str | os.PathLike[str] | None) -> Subject:
        """Copy a module for every run, or call a function for every run, inside `empty()`."""
        if isinstance(model, nn.Module):
            bare = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            if bare and weights is None:
                must = "must have values, or be a function that builds it"
                do = "Pass the function that builds it, or `weights`."
                raise ModelError("model", must, got=f"{bare[0]} on the meta device", do=do)
            return Subject(lambda: copy.deepcopy(model), weights)
        build_model = model

        def make() -> nn.Module:
            with empty():
                return build_model().train()

        return Subject(make, weights)

    def frozen(self) -> Subject:
        """The same model for forwards alone: no gradients, no dtype refused because of training."""
        return Subject(lambda: self.make().requires_grad_(False), self.weights)


def this_rank() -> int:
    return started()[0]


def load_subject(
    config: ConfigSource,
    model: str,
    weights: Path | None,
    tokens: Path | None,
    count: int,
    overrides: list[str],
) -> tuple[Plan, Subject, list[Batch]]:
    """Load what a command names, with `count` micro-batches of this rank. Tokens and values are drawn where
    no file has them."""
    rank, ranks = started()
    if weights is None and Path(model).is_dir() and holds(Path(model)):
        weights = Path(model)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return build_runnable(model)

    built = make()
    loaded = load(config, overrides)
    mesh = mesh_for(loaded, ranks)
    plan = build(resolve(loaded, mesh), describe(built), mesh)
    batches = draw_batches(built, count, rank) if tokens is None else read_batches(tokens, count, rank, ranks)
    return plan, Subject(make, weights), batches


@contextlib.contextmanager
def running(subject: Subject, policy: Policy, mesh: MeshShape) -> Iterator[Engine]:
    """Start an engine for the model under a policy. A call of all ranks."""
    if policy.pipeline is not None or policy.backend != "native":
        what = "a pipeline" if policy.pipeline is not None else f"backend {policy.backend}"
        must = "must run the whole model on each rank, on the native backend"
        do = "Audit the same config without it: the columns are the same."
        raise UnsupportedError("the audit", must, got=what, do=do)
    model = subject.make()
    for module in model.modules():  # a forward that runs again in the backward would be seen twice
        if getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010
    if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
        gc.collect()  # the model of the run before and its hooks hold each other
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


def plan_for(subject: Subject, policy: Policy, mesh: MeshShape) -> Plan:
    """Build the plan of such a run without running it."""
    return build(policy, describe(subject.make()), mesh)


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        must, got = "must return a loss: one number, or what has `.loss`", type(output).__name__
        do = "A model of `transformers` returns one where the batch has `labels`."
        raise ModelError("model", must, got=f"{got} for {', '.join(batch)}", do=do)
    return loss.reshape(())


def call_model(engine: Engine, batch: Batch) -> Any:
    """Run the forward of one micro-batch; an error of the model names the batch."""
    try:
        return engine(**batch_on(batch, engine.mesh.device, lambda tensor: tensor))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{key} {list(getattr(value, 'shape', ()))}" for key, value in batch.items())
        must = "must be what the model can be called with"
        raise ModelError("batch", must, got=f"{shapes}: {error}") from error


def check_batches(batches: Sequence[Any]) -> list[Batch]:
    """Require micro-batches that are dicts of finite values."""
    if not batches:
        raise ModelError("batches", "must be at least one", got="none")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            must = "must be a dict of the model's keyword arguments"
            raise ModelError(f"batches[{number}]", must, got=type(batch).__name__)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
                raise ModelError(f"batches[{number}][{key!r}]", "must be finite", got="inf or nan")
    return list(batches)
