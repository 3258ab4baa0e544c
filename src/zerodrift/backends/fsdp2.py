"""Execute a plan by PyTorch's `fully_shard`: the counterpart of `engine/native_executor.py`.

torch decides when to gather, free and reduce. Dtypes, sums, averages, norm, clipping, loss scale, skipping
and the casts at module boundaries are the plan's, by the same functions as on the native backend. Only public
calls of torch are used.

Invariant: every column of the plan is executed, or the plan was refused.

[Note: stages] `fully_shard` always shards parameters, over the shard axis. At stage 0 that axis has one rank,
and every other rank is a replica. Stages 1 and 2 gather once per step and differ in when gradients are
reduced. Stage 3 gathers for every forward and backward.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from zerodrift.backends.adapters import DTensorMesh
from zerodrift.backends.group import Backwards
from zerodrift.backends.placement import make_groups, shard
from zerodrift.backends.tensor_guard import TensorGuard
from zerodrift.backends.values import DTensorShard, TensorUpdater, TensorValues
from zerodrift.comm import Collectives, is_the_users
from zerodrift.engine import (
    Executor,
    Norm,
    RankAgreement,
    Span,
    TrainingProgress,
    ValueSources,
    WholeValues,
    bad_parameters,
    compute,
    global_norm,
    refusal,
    refuse_wrapper,
)
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.optim import learning_rates
from zerodrift.plan import Plan
from zerodrift.report import UpdateReport


class FullyShardExecutor(Executor):
    """Runs a plan of backend fsdp2."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        comm: Collectives,
        optimizer: torch.optim.Optimizer | None = None,
        sources: ValueSources | None = None,
    ) -> None:
        policy, mesh = plan.policy, comm.mesh
        if policy.sharding.offload and mesh.device.type != "cpu":
            key = "zero_optimization.offload_optimizer.device"
            must = "must be none on backend fsdp2 on a GPU, where fully_shard would move the parameters too"
            raise UnsupportedError(key, must, got="cpu", do="Remove it, or use the native backend.")
        self.plan = self.part = plan
        self.module = self.whole = model
        self.forwards: Sequence[nn.Module] = (model,)
        self.comm = comm
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        self.precision = compute.ForwardPrecision(plan, mesh.device)
        self.units = make_groups(plan, model, comm)
        self.backwards = Backwards(self.units, keep=policy.sharding.keep_gathered == "step")
        self.dtensor_mesh = DTensorMesh(mesh)
        self._handles = shard(plan, model, self.units, comm, self.dtensor_mesh, self.backwards, sources or {})
        self._handles += [*self.precision.attach(model), *compute.attach(model, plan.boundaries)]
        self._handles.append(refuse_wrapper(model))
        self.members = {member.row.name: member for group in self.units for member in group.members}
        unit_of = {row.name: plan.units[row.unit].name for row in plan.rows}
        self.guard = TensorGuard(self.units, unit_of)
        self._handles += self.guard.attach()
        self._trained = [self.members[row.name] for row in plan.rows if row.trained]
        self.updater: TensorUpdater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            self.updater = TensorUpdater(plan, self.units, optimizer, originals)
        self._progress: TrainingProgress
        """Set by `follow`."""

    def follow(self, progress: TrainingProgress) -> None:
        self._progress = self.backwards.progress = progress

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        self.guard.check()
        return _explaining()

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def recover(self) -> None:
        """Reset torch's state, except gradients of whole micro-batches, which torch drops since 2.15."""
        if self.backwards.abort():
            held = [(member, member.full.grad, member.sharded.grad) for member in self._trained]
            self.module.reset_iter_state()  # type: ignore[operator]
            for member, full, sharded in held:
                member.full.grad, member.sharded.grad = full, sharded

    # --- the step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.guard.check(stepping=True)
        yield

    def norm(self) -> Norm:
        """Return the norm. A gradient that is the same on several ranks counts on one of them."""
        self.drop()
        self.backwards.flush()
        held = () if self.updater is None else self.updater.group_of
        gradients = [(member, member.gradient()) for member in self._trained]
        counted = [g for member, g in gradients if member.counts(self.comm.mesh) and member.row.name in held]
        order, self.backwards.checksum = self.backwards.checksum, 0
        agreement = RankAgreement(order, rates=learning_rates(self.updater))
        return global_norm(counted, self.comm, self._progress.unscale, agreement)

    def reduced(self) -> Iterator[tuple[Sequence[Span], torch.Tensor]]:
        mesh = self.comm.mesh
        for member in self._trained:
            if member.counts(mesh) and not mesh.rank("replicate"):
                mine = Span(member.row, member.range.start, slice(0, member.range.numel))
                yield (mine,), member.gradient()

    def bad(self) -> list[str]:
        return bad_parameters(((member.row.name, member.gradient()) for member in self._trained), self.comm)

    def update(self, multiplier: float) -> None:
        if self.updater is None:
            raise refusal("no optimizer")
        self.updater.step(multiplier)

    def forget(self) -> None:
        self.backwards.drop()

    # --- values -----------------------------------------------------------------------------------------

    @property
    def values(self) -> WholeValues:
        return TensorValues(self.members, self.units, self.updater, self.backwards, self.guard, self.comm)

    def pieces(self) -> Iterator[DTensorShard]:
        mesh = self.comm.mesh
        if mesh.size("tensor") > 1:
            must = "must be written and read where parameters are plain tensors"
            do = "Take whole values out of `engine.gathered()` or `engine.parameter(name).master`."
            got = f"DTensors over {mesh.size('tensor')} ranks"
            raise UnsupportedError("checkpoint", must, got=got, do=do)
        copy = mesh.rank("replicate"), mesh.size("replicate")
        names = [[self.plan.rows[row].name for row in segment.rows] for segment in self.plan.segments]
        held = [[self.members[name] for name in each] for each in names]
        return (DTensorShard(each, self.updater, copy) for each in held)

    def drop(self) -> None:
        for group in self.units:
            group.drop()

    sync_storage = drop
    """Frees gathered parameters that have older values."""

    def update_statistics(self) -> UpdateReport:
        must = "must be called on the native backend: on fsdp2 torch's optimizer updates"
        raise UnsupportedError("update_statistics", must, got="backend fsdp2", do="Use the native backend.")

    def leave(self) -> None:
        """Remove our hooks. torch's hooks and the sharded parameters stay."""
        for handle in self._handles:
            handle.remove()
        self.backwards.progress = None
        self.dtensor_mesh.stop()


def fully_sharded(executor: Executor) -> FullyShardExecutor:
    """Return the executor as a `FullyShardExecutor`, for callers that read groups."""
    assert isinstance(executor, FullyShardExecutor), f"{type(executor).__name__} has no groups"
    return executor


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Replace torch's error for the use of a parameter that is not gathered."""
    try:
        yield
    except Exception as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        at = "`forward`"
        for line in traceback.extract_tb(error.__traceback__):
            if is_the_users(line.filename):
                at = f"`{line.line}` ({Path(line.filename).name}:{line.lineno})"
        must = "must use parameters where they are gathered, in the forward of the module that they belong to"
        raise ModelError(at, must, got="a sharded one", do="Compute with it there.") from error
