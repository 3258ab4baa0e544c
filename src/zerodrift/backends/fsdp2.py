"""The same plan, executed by PyTorch's `fully_shard`: the counterpart of `engine/native.py`.

Who gathers, frees and reduces when is torch's affair; dtypes, sums, averages, norm, clipping, loss scale,
skipping and the casts at module boundaries are the plan's, by the same functions as on the native backend.
Only public calls of torch are used.

Invariant: what the plan's columns say is what happens, or the plan was refused.

[Note: stages] `fully_shard` always rests sharded, on the ranks of the shard axis. Stage 0 is a shard axis of
one rank, every other rank a replica. Stages 1 and 2 gather once per step and differ in when gradients are
reduced; stage 3 gathers for every forward and backward.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from zerodrift.backends.attached import TensorsAttached
from zerodrift.backends.backwards import Passes
from zerodrift.backends.device_mesh import DTensorMesh
from zerodrift.backends.optimizer import TensorUpdater
from zerodrift.backends.placing import make_groups, shard
from zerodrift.backends.shards import DTensorShard, pieces
from zerodrift.backends.values import TensorValues
from zerodrift.comm.call_stack import is_the_users
from zerodrift.comm.collectives import Collectives
from zerodrift.engine import compute
from zerodrift.engine.executor import BatchRunner, Executor
from zerodrift.engine.grads import BackwardCallbacks
from zerodrift.engine.parameter import WholeValues
from zerodrift.engine.place import ValueSources
from zerodrift.engine.progress import TrainingProgress
from zerodrift.engine.scale import BetweenRanks, Norm, bad_parameters, global_norm
from zerodrift.engine.shards import Span
from zerodrift.engine.steps import needs_optimizer
from zerodrift.engine.unit import refuse_wrapper
from zerodrift.errors import ModelError, UnsupportedError
from zerodrift.plan.table import Plan
from zerodrift.report.updates import UpdateReport


class FullyShardExecutor:
    """Runs a plan of backend fsdp2."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        comm: Collectives,
        optimizer: torch.optim.Optimizer | None = None,
        sources: ValueSources | None = None,
    ) -> None:
        if plan.policy.backend != "fsdp2":
            raise AssertionError(f"a plan for backend {plan.policy.backend}")
        policy, mesh = plan.policy, comm.mesh
        if policy.sharding.offload and mesh.device.type != "cpu":
            raise UnsupportedError(
                "zero_optimization.offload_optimizer.device",
                "must be none on backend fsdp2 on a GPU, where fully_shard would move the parameters too",
                got="cpu",
                do="Remove it, or use the native backend.",
            )
        self.plan = self.part = plan
        self.module = self.whole = model
        self.forwards: Sequence[nn.Module] = (model,)
        self.comm = comm
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        self.precision = compute.ForwardPrecision(plan, mesh.device)
        self.units = make_groups(plan, model, comm)
        """What is gathered together: the groups of `fully_shard`."""
        self.passes = Passes(self.units, keep=policy.sharding.keep_gathered == "step")
        self.dtensor_mesh = DTensorMesh(mesh)
        """torch's device mesh, which the parameters lie on."""
        self._handles = shard(
            plan, model, self.units, comm, self.dtensor_mesh, self.passes, sources or ValueSources()
        )
        self._handles += [*compute.attach(model, plan.boundaries), refuse_wrapper(model)]
        self.members = {member.row.name: member for group in self.units for member in group.members}
        """By the first name of a parameter."""
        unit_of = {row.name: plan.units[row.unit].name for row in plan.rows}
        self.attached = TensorsAttached(self.units, unit_of)
        self._handles += self.attached.attach()
        self._trained = [self.members[row.name] for row in plan.rows if row.trained]
        self.updater: TensorUpdater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            self.updater = TensorUpdater(plan, self.units, optimizer, originals)
        self._progress: TrainingProgress
        """Set by `follow`."""

    @property
    def runner(self) -> BatchRunner | None:
        return None

    def follow(self, progress: TrainingProgress, callbacks: BackwardCallbacks) -> None:
        self._progress = progress
        self.passes.callbacks = callbacks

    def require_peers(self) -> None:
        """Peers that are gone end a collective by themselves."""

    # --- a micro-batch ----------------------------------------------------------------------------------

    def forward(self) -> contextlib.AbstractContextManager[None]:
        self.attached.check()
        return _explaining()

    def backward(self, loss: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def recover(self) -> None:
        """torch since 2.15 would forget what whole micro-batches have summed."""
        if self.passes.abort():
            held = [(member, member.full.grad, member.sharded.grad) for member in self._trained]
            self.module.reset_iter_state()  # type: ignore[operator]
            for member, full, sharded in held:
                member.full.grad, member.sharded.grad = full, sharded

    # --- the step ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.attached.check(stepping=True)
        yield

    def norm(self) -> Norm:
        """What several ranks have of a gradient is counted on one of them."""
        self.drop()
        self.passes.flush()
        gradients = [(member, member.gradient()) for member in self._trained]
        counted = [gradient for member, gradient in gradients if member.counts(self.comm.mesh)]
        order, self.passes.checksum = self.passes.checksum, 0
        return global_norm(counted, self.comm, self._progress.unscale, BetweenRanks(order))

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
            raise needs_optimizer()
        self.updater.step(multiplier)

    def forget(self) -> None:
        self.passes.drop()

    # --- values -----------------------------------------------------------------------------------------

    @property
    def values(self) -> WholeValues:
        return TensorValues(self.members, self.units, self.updater, self.passes, self.attached, self.comm)

    def pieces(self) -> Iterator[DTensorShard]:
        mesh = self.comm.mesh
        if mesh.size("tensor") > 1:
            raise UnsupportedError(
                "checkpoint",
                "must be written and read where parameters are plain tensors",
                got=f"DTensors over {mesh.size('tensor')} ranks",
                do="Take whole values out of `engine.gathered()` or `engine.parameter(name).master`.",
            )
        return pieces(self.plan, self.members, self.updater, mesh)

    def drop(self) -> None:
        for group in self.units:
            group.drop()

    def sync_storage(self) -> None:
        """What was gathered from older values is given up."""
        self.drop()

    def update_statistics(self) -> UpdateReport:
        raise UnsupportedError(
            "update_statistics",
            "must be called on the native backend: on fsdp2 torch's optimizer updates",
            got="backend fsdp2",
            do="Use the native backend.",
        )

    def leave(self) -> None:
        """torch's hooks and the sharded parameters stay."""
        for handle in self._handles:
            handle.remove()
        self.passes.callbacks = None
        self.dtensor_mesh.stop()


def fully_sharded(executor: Executor) -> FullyShardExecutor:
    """For whoever looks at groups, and is not asked to where there are none."""
    if not isinstance(executor, FullyShardExecutor):
        raise AssertionError(f"{type(executor).__name__} has no groups")
    return executor


@contextlib.contextmanager
def _explaining() -> Iterator[None]:
    """Around a forward: torch's word on a parameter that is not gathered where it is used, in ours."""
    try:
        yield
    except Exception as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise _used_elsewhere(error) from error
        raise


def _used_elsewhere(error: BaseException) -> ModelError:
    """For torch's word on a forward that computes with a parameter which is not gathered there."""
    lines = [line for line in traceback.extract_tb(error.__traceback__) if is_the_users(line.filename)]
    at = f"`{lines[-1].line}` ({Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else "`forward`"
    return ModelError(
        at,
        "must use parameters where they are gathered, in the forward of the module that they belong to",
        got="a sharded one",
        do="Compute with it there.",
    )
