"""The same plan, executed by PyTorch's `fully_shard`: an engine with the surface of `engine/engine.py`.

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerodrift.backends.attached import TensorsAttached
from zerodrift.backends.backwards import Passes
from zerodrift.backends.device_mesh import DTensorMesh
from zerodrift.backends.optimizer import TensorUpdater
from zerodrift.backends.placing import make_groups, shard
from zerodrift.backends.shards import DTensorShard, pieces
from zerodrift.backends.values import TensorValues
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.comm.watch import is_the_users
from zerodrift.engine import compute, steps
from zerodrift.engine.grads import BackwardCallbacks
from zerodrift.engine.place import ValueSources
from zerodrift.engine.progress import StepResult, TrainingProgress
from zerodrift.engine.scale import Norm, Scaler, bad_parameters, global_norm
from zerodrift.errors import ModelError, RankError, UnsupportedError
from zerodrift.plan.table import Plan
from zerodrift.report.explain import Explanation, explain


class FsdpEngine:
    """Runs a plan of backend fsdp2. Made by `zerodrift.initialize`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Any = None,
        sources: ValueSources | None = None,
    ) -> None:
        if plan.policy.backend != "fsdp2":
            raise AssertionError(f"a plan for backend {plan.policy.backend}")
        policy = plan.policy
        if policy.sharding.offload and mesh.device.type != "cpu":
            raise UnsupportedError(
                "zero_optimization.offload_optimizer.device",
                "must be none on backend fsdp2 on a GPU, where fully_shard would move the parameters too",
                got="cpu",
                do="Remove it, or use the native backend.",
            )
        self.plan = plan
        self.module = self.whole = model
        self.mesh = mesh
        self.comm = Collectives(mesh)
        self.comm.agree(plan.digest, lambda: steps.texts(plan))
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        self._precision = compute.ForwardPrecision(plan, mesh.device)
        self.units = make_groups(plan, model, self.comm)
        """What is gathered together: the groups of `fully_shard`."""
        self.passes = Passes(self.units, keep=policy.sharding.keep_gathered == "step")
        self.dtensor_mesh = DTensorMesh(mesh)
        """torch's device mesh, which the parameters lie on."""
        self._handles = shard(
            plan, model, self.units, self.comm, self.dtensor_mesh, self.passes, sources or ValueSources()
        )
        self._handles += compute.attach(model, plan.boundaries)
        self.members = {member.row.name: member for group in self.units for member in group.members}
        """By the first name of a parameter."""
        unit_of = {row.name: plan.units[row.unit].name for row in plan.rows}
        self.attached = TensorsAttached(self.units, unit_of)
        self._handles += self.attached.attach()
        self._trained = [self.members[row.name] for row in plan.rows if row.trained]
        self.updater: TensorUpdater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            self.updater = TensorUpdater(plan, self.units, optimizer, originals)
        self.group_of = {} if self.updater is None else self.updater.group_of
        self.scheduled = None
        """What a pipeline has; there is none on this backend."""
        given = steps.schedule(plan, self.optimizer, schedule)
        self.progress = TrainingProgress(plan, self.updater, given, shows=mesh.rank() == 0)
        """Micro-batches and steps so far, the loss scale, the schedule."""
        self.passes.callbacks = BackwardCallbacks(
            self.progress.is_last, self._backward_ended, self._backward_failed
        )

    # --- a micro-batch ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the plan's precision."""
        self.progress.require_open()
        self.attached.check()
        try:
            with self._precision.forward(), self._precision.cast((args, kwargs)) as (args, kwargs):
                return self.module(*args, **kwargs)
        except RankError:
            raise  # there is nobody to finish with what is under way
        except BaseException as error:
            self._recover()
            if "mixed torch.Tensor and DTensor" in str(error):
                raise _used_elsewhere(error) from error
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on: multiplied by the loss scale where there is one."""
        return self.progress.scale(loss)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of one micro-batch. The average over micro-batches is taken in the step, after the sum."""
        self.progress.require_open()
        try:
            with self._precision.backward():
                self.scale(loss).backward(**kwargs)
        except RankError:
            raise
        except BaseException:
            self._backward_failed()
            raise

    def _backward_ended(self) -> None:
        if not self.progress.end_backward():
            self._backward_failed()
            raise steps.unscaled(self.plan)

    def _backward_failed(self) -> None:
        """Part of a micro-batch was added to the others and cannot be taken out: the step starts anew."""
        self._recover()
        self.zero_grad()

    def _recover(self) -> None:
        """Something was raised in the middle: nothing may be under way or half gathered afterwards. What
        whole micro-batches have summed stays; torch since 2.15 would forget it."""
        if self.passes.abort():
            held = [(member, member.full.grad, member.sharded.grad) for member in self._trained]
            self.module.reset_iter_state()  # type: ignore[operator]
            for member, full, sharded in held:
                member.full.grad, member.sharded.grad = full, sharded
        self.progress.unwind()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside are not the last of their step: what is reduced once per step waits."""
        return self.progress.no_sync()

    # --- the step ---------------------------------------------------------------------------------------

    def step(
        self, error_if_nonfinite: bool = False, schedule_arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """End a micro-batch; after the last one of a step, update. The schedule gets `schedule_arguments`."""
        before = self.progress.now()
        self.attached.check(stepping=True)
        if self.updater is None or not self.progress.begin_step():
            return before
        with torch.no_grad():
            for group in self.units:
                group.drop()  # what is gathered is of the old values
            self.passes.flush()
            gradients = [(member.row.name, member.gradient()) for member in self._trained]
            norm = self._norm(gradient for _, gradient in gradients)
            bad = [] if norm.finite else bad_parameters(gradients, self.comm)
            if norm.finite:
                self.updater.step(self.progress.multiplier(norm))
        self.zero_grad()
        return self.progress.end_step(before, norm, bad, schedule_arguments, error_if_nonfinite)

    def _norm(self, gradients: Iterable[torch.Tensor]) -> Norm:
        """Of what this rank has of each gradient; what several ranks have is counted on one of them."""
        members = zip(self._trained, gradients, strict=True)
        counted = (gradient for member, gradient in members if member.counts(self.mesh))
        order, self.passes.checksum = self.passes.checksum, 0
        return global_norm(counted, self.comm, self.progress.unscale, order)

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self.passes.drop()
        self.comm.release()
        self.progress.restart()

    # --- where it is ------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken, skipped ones not counted."""
        return self.progress.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.progress.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Of the last complete step, before clipping."""
        return self.progress.grad_norm

    @property
    def micro_batches(self) -> int:
        """Of the step under way, so far; 0 between steps."""
        return self.progress.micro_batches

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return self.progress.accumulation

    @property
    def is_boundary(self) -> bool:
        """Whether `step` would update now."""
        return self.progress.is_boundary

    @property
    def scaler(self) -> Scaler:
        """The loss scale."""
        return self.progress.scaler

    @property
    def schedule(self) -> Any:
        """What sets the learning rates; None without one."""
        return self.progress.schedule

    # --- modes, schedules, the end ----------------------------------------------------------------------

    def train(self, mode: bool = True) -> FsdpEngine:
        self.module.train(mode)
        return self

    def eval(self) -> FsdpEngine:
        return self.train(False)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """torch's optimizer over the sharded parameters; what schedulers of torch take."""
        return None if self.updater is None else self.updater.groups

    @property
    def values(self) -> TensorValues:
        """Full values out and in."""
        return TensorValues(self)

    def pieces(self) -> Iterator[DTensorShard]:
        """What this rank owns: for `Shards`."""
        if self.mesh.size("tensor") > 1:
            raise UnsupportedError(
                "checkpoint",
                "must be written and read where parameters are plain tensors",
                got=f"DTensors over {self.mesh.size('tensor')} ranks",
                do="Take whole values out of `engine.gathered()` or `engine.full_master(name)`.",
            )
        return pieces(self)

    def sync_storage(self) -> None:
        """After pieces were filled: for `Shards`. What was gathered from older values is given up."""
        for group in self.units:
            group.drop()

    def explain(self, name: str) -> Explanation:
        """Every column of a parameter, with its reason."""
        return explain(self.plan, name)

    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """Full values of all or some parameters by name; with `write`, changes become the parameters'."""
        return self.values.gathered(names, write)

    def full_gradient(self, name: str) -> torch.Tensor:
        """The gradient accumulated so far in this step, averaged and unscaled, in fp32."""
        return self.values.gradient(name)

    def full_master(self, name: str) -> torch.Tensor:
        """What the optimizer updates, in fp32."""
        return self.values.master(name)

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's moments, by torch's names for them, in fp32."""
        return self.values.state(name)

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None:
        self.values.set_gradient(name, value)

    def set_full_master(self, name: str, value: torch.Tensor) -> None:
        self.values.set_master(name, value)

    def set_full_state(self, name: str, key: str, value: torch.Tensor) -> None:
        self.values.set_state(name, key, value)

    def update_statistics(self) -> Any:
        raise UnsupportedError(
            "update_statistics",
            "must be called on the native backend: on fsdp2 torch's optimizer updates",
            got="backend fsdp2",
            do="Use the native backend.",
        )

    def destroy(self) -> None:
        """Take our hooks off and leave the process groups; torch's hooks and the sharded parameters stay, so
        the module cannot be run any more. Waits for what goes on beside training, unless an exception is on
        its way through this rank."""
        if self.progress.closed:
            return
        try:
            self.progress.finish_background()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._recover()
        self.zero_grad()
        self.progress.closed = True
        for handle in self._handles:
            handle.remove()
        self.passes.callbacks = None
        self.dtensor_mesh.stop()
        self.mesh.stop()


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
