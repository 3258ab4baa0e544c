"""The engine: a plan, a model and an optimizer, and the step as a recipe of a few lines.

It owns the parts and decides nothing: what is gathered, cast, reduced and updated in which dtype is in the
plan's rows, when each happens is in `unit.py` and `grads.py`, what is counted and how a step ends in
`progress.py`. A micro-batch is `engine(...)` and `engine.backward(loss)`; `engine.step()` ends it and, at the
last one of a step, updates.

Invariant: after an exception, in the model's forward or in a backward, the engine is as good as before. A
forward that failed costs nothing else; a backward that failed costs the micro-batches of its step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine import compute, shards, statistics, steps
from zerodrift.engine.attached import AttachedParameters, own, settle
from zerodrift.engine.buffers import GradientBuffers
from zerodrift.engine.grads import BackwardCallbacks, Gradients
from zerodrift.engine.pins import pin, unpin
from zerodrift.engine.place import ValueSources, place
from zerodrift.engine.progress import StepResult, TrainingProgress
from zerodrift.engine.scale import (
    Norm,
    Scaler,
    UnreducedSegment,
    VisibleWeights,
    bad_parameters,
    global_norm,
    parts_of,
    set_on_some,
)
from zerodrift.engine.scheduled import ScheduledUnits
from zerodrift.engine.segment import FlatSegment
from zerodrift.engine.trained import trained
from zerodrift.engine.traversal import Traversal
from zerodrift.engine.unit import LiveUnit, guard, in_transform
from zerodrift.engine.update_function import choose_update_function
from zerodrift.engine.values import Values
from zerodrift.errors import RankError
from zerodrift.experts.dispatch import distribute_experts
from zerodrift.optim.make import make_updater
from zerodrift.optim.updater import Updater
from zerodrift.plan.stages import part
from zerodrift.plan.table import Plan
from zerodrift.policy.nouns import Mode
from zerodrift.report.explain import Explanation, explain
from zerodrift.report.updates import UpdateReport


class Engine:
    """Runs a plan. Made by `zerodrift.initialize`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Any = None,
        sources: ValueSources | None = None,
    ) -> None:
        if plan.policy.backend != "native":
            raise AssertionError(f"a plan for backend {plan.policy.backend}")
        self.plan = plan
        self.part = part(plan, mesh.rank("pipeline"))
        """What this rank executes of the plan: all of it, but for a pipeline."""
        self.module = model
        self.whole = model
        """All of the model; of a pipeline, the tree that was cut, without values for what is elsewhere."""
        self.mesh = mesh
        self.comm = Collectives(mesh)
        self.comm.agree(plan.digest, lambda: steps.texts(plan))
        policy = plan.policy
        self.segments: list[FlatSegment]
        self.units: list[LiveUnit]
        self._pools = GradientBuffers(keep=not policy.sharding.free_accumulator)
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.segments, self.units, masters = place(self.part, model, self.comm, self._pools, sources)
        alone = policy.pipeline is not None or not any(segment.gathers for segment in self.segments)
        self._traversal = Traversal(self.units, None if alone else self.comm.all_gather_object)
        self.gradients = Gradients(self._traversal, policy.averaging.before)
        self.precision = compute.ForwardPrecision(plan, mesh.device)
        """How forwards and backwards are entered."""
        self._handles: list[Any] = []
        self.scheduled: ScheduledUnits | None = None
        """Set where a pipeline's schedule runs the parts of the model; see `scheduled.py`."""
        if plan.policy.pipeline is None:
            self._handles += [handle for unit in self.units for handle in unit.attach(self.gradients)]
            self._handles += compute.attach(model, plan.boundaries)
        else:
            self.scheduled = ScheduledUnits(self.part, self.units, self.gradients)
        self._handles += guard(model, self.segments)
        self._handles += distribute_experts(self.part, model, self.comm)
        self.attached = AttachedParameters(model, self.segments)
        self._handles += self.attached.attach()
        if plan.policy.mode is not Mode.FP32:
            pin(self.segments)
        self._trained = trained(self.segments)
        for segment in self.segments:
            segment.know()
        update_slice = choose_update_function(plan, self.comm)
        self.updater: Updater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            owned = [segment.piece(masters.pop(segment.number)) for segment in self._trained]
            self.updater = make_updater(self.part, owned, optimizer, originals, update_slice=update_slice)
        self.group_of = self._groups_of_all()
        """Row name -> its parameter group, of the rows that the optimizer was given, on every stage."""
        given = steps.schedule(plan, self.optimizer, schedule)
        self.progress = TrainingProgress(plan, self.updater, given, shows=mesh.rank() == 0)
        """Micro-batches and steps so far, the loss scale, the schedule."""
        if self.scheduled is None:
            self._handles += self.progress.watch(model)
        own(self._handles)
        self.gradients.callbacks = BackwardCallbacks(
            self.progress.is_last, self._backward_ended, self._backward_failed
        )

    def _groups_of_all(self) -> Mapping[str, int]:
        mine = {} if self.updater is None else dict(self.updater.group_of)
        stages = self.comm.all_gather_object(mine, "pipeline")
        return {name: group for stage in stages for name, group in stage.items()}

    # --- a micro-batch ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the plan's precision."""
        self.require_open()
        self._require_whole("call")
        self.attached.check()
        self._require_masters()
        for unit in self.units:
            unit.take_places()
        try:
            with self.precision.forward(), self.precision.cast((args, kwargs)) as (args, kwargs):
                return self.module(*args, **kwargs)
        except RankError:
            raise  # there is nobody to finish with what is under way
        except BaseException:
            self._recover()
            raise

    def _require_masters(self) -> None:
        """Before a forward that is trained: masters that cannot follow what was written, while that is cheap
        to know; the step asks again."""
        if not torch.is_grad_enabled() or in_transform():
            return
        first = self.progress.micro_batches == 0 and self.mesh.device.type == "cpu"
        for segment in self._trained:
            if segment.apart and (first or segment.moved):
                settle(segment, self.updater)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on: multiplied by the loss scale where there is one."""
        return self.progress.scale(loss)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of one micro-batch. The average over micro-batches is taken in the step, after the sum."""
        self.require_open()
        self._require_whole("backward")
        scaled = self.scale(loss)
        try:
            with self.precision.backward(), self.gradients.micro_batch(scaled):
                scaled.backward(**kwargs)
        except RankError:
            raise
        except BaseException:
            self._backward_failed()
            raise

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside are not the last of their step: what is reduced once per step waits."""
        return self.progress.no_sync()

    def _backward_ended(self) -> None:
        if not self.progress.end_backward():
            self.zero_grad()
            raise steps.unscaled(self.plan)

    def _backward_failed(self) -> None:
        """Part of a micro-batch was added to the others and cannot be taken out: the step starts anew."""
        self._recover()
        self.zero_grad()

    def _recover(self) -> None:
        """Something was raised in the middle: nothing may be under way or half gathered afterwards."""
        self.gradients.abort()
        for unit in self.units:
            unit.forget()
        self.progress.unwind()

    def require_open(self) -> None:
        """Raise if it was destroyed."""
        self.progress.require_open()

    def _require_whole(self, what: str) -> None:
        if self.scheduled is not None:
            raise steps.is_driven(what)

    # Of a pipeline, whose schedule runs micro-batches in an order of its own; see `scheduled.py`.

    def end_step(self, micro_batches: int) -> StepResult:
        """All micro-batches of a step have ended: update."""
        self.progress.end_backwards(micro_batches)
        return self.step()

    def abandon_step(self) -> None:
        """Something was raised in a schedule: the step starts anew."""
        self._backward_failed()

    # --- the step ---------------------------------------------------------------------------------------

    def step(
        self, error_if_nonfinite: bool = False, schedule_arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """End a micro-batch; after the last one of a step, update. The schedule gets `schedule_arguments`."""
        before = self.progress.now()
        self.attached.require_closed("step")
        self.attached.check(stepping=True)
        taken = self.gradients.hide()
        if taken:
            raise steps.taken_away(taken)
        if self.progress.micro_batches == 0:
            self._end_unseen()
        if not self.progress.begin_step():
            return before
        with torch.no_grad():
            norm = self._norm()
            if norm.written:
                self._settle()
            bad = [] if norm.finite else bad_parameters(parts_of(self._trained), self.comm)
            if norm.finite:
                self._update(self.progress.multiplier(norm))
        self.zero_grad()
        return self.progress.end_step(before, norm, bad, schedule_arguments, error_if_nonfinite)

    def _end_unseen(self) -> None:
        """A backward that nobody was told of ends here, on all ranks or on none."""
        loose = self.comm.all_gather_object(self.gradients.loose)
        if any(loose) and not all(loose):
            raise set_on_some(next(filter(None, loose)))
        self.gradients.end_unseen()

    def _norm(self) -> Norm:
        """Of everything that was accumulated, which is reduced when this returns.

        Gradients that were set by hand are reduced when the ranks know that all have them, which travels with
        a norm of what else there is. Over replicas it does not, and is taken for granted.
        """
        alone = self.mesh.size("replicate") == 1 and self.scheduled is None
        unreduced = self.gradients.unreduced if alone else []
        self.gradients.flush(without=unreduced)
        if self.mesh.size("replicate") > 1:
            self.gradients.sum_over_replicas()
        if self.scheduled is not None:
            self.scheduled.sum_over_ends(self.comm)
        norm = self._norm_of_reduced(
            [UnreducedSegment(segment.number, segment.loose) for segment in unreduced]
        )
        if not unreduced:
            return norm
        self.gradients.reduce(unreduced)
        return self._norm_of_reduced()

    def _settle(self) -> None:
        """What was written outside of the engine becomes the masters', or is an error on every rank."""
        with raise_on_all_ranks(self.comm):
            for segment in self.segments:
                settle(segment, self.updater)

    def _shown(self) -> VisibleWeights:
        written = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        checksum = written.clone()
        for segment in self.segments:
            if segment.apart or segment.gathers or self.mesh.size("shard") > 1:
                look = segment.look()
                if look is not None:
                    written += look[0]
                    checksum = (checksum * 31 + look[1]) & 0xFFFFFFFF
        return VisibleWeights(written, checksum)

    def _norm_of_reduced(self, strays: Sequence[UnreducedSegment] = ()) -> Norm:
        shown = self._shown()
        counted = [segment for segment in self._trained if segment.spec.lead]
        gradients = [segment.reduced for segment in counted if segment.reduced is not None]
        order, self._traversal.checksum = self._traversal.checksum, 0
        dropped = self.progress.dropped
        return global_norm(gradients, self.comm, self.progress.unscale, order, strays, dropped, shown)

    def _update(self, multiplier: float) -> None:
        if self.updater is None:
            raise AssertionError("unreachable")
        for unit in self.units:
            unit.drop()
        gradients: dict[int, torch.Tensor] = {}
        for segment in self._trained:
            if segment.reduced is not None:
                whole = not segment.update.axis
                gradients[segment.number] = segment.whole_gradient() if whole else segment.reduced
        self.updater.update(gradients, multiplier)
        for segment in self._trained:
            if segment.number in gradients:
                segment.give_back(gradients[segment.number])
        handles = [segment.sync_storage() for segment in self._trained if segment.number in gradients]
        for handle in handles:
            handle.wait()
        for segment in self._trained:
            segment.changed()
            segment.renew()

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self.gradients.drop()
        self._pools.end_step()
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

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Parameter groups and their learning rates; what schedulers of torch take."""
        return None if self.updater is None else self.updater.groups

    @property
    def values(self) -> Values:
        """Full values out and in."""
        # Made anew: one that was kept would hold the engine, and the engine it, until Python looks for
        # cycles, and their memory with them.
        return Values(self)

    def pieces(self) -> Iterator[shards.FlatShard]:
        """What this rank owns: for `Shards`."""
        return shards.pieces(self)

    def sync_storage(self) -> None:
        """After pieces were filled: for `Shards`."""
        shards.sync_storage(self)

    def explain(self, name: str) -> Explanation:
        """Every column of a parameter, with its reason."""
        return explain(self.plan, name)

    def update_statistics(self) -> UpdateReport:
        """What became of the last update, per parameter: shares lost to rounding, sizes, underflow. For a
        config with `precision.statistics: true`; every rank calls it together."""
        return statistics.collect(self)

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise steps.copied()

    def destroy(self) -> None:
        """Take the hooks off and leave the process groups. The module keeps what it holds, which of sharded
        parameters is nothing, and it says so; inside `gathered()` it keeps full values, and is a plain one.
        Waits for what goes on beside training, unless an exception is on its way through this rank."""
        if self.progress.closed:
            return
        try:
            self.progress.finish_background()
        finally:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(RankError):  # was raised where it was waited for
            self._recover()
        self.zero_grad()
        self.progress.closed = True
        for handle in self._handles:
            handle.remove()
        for unit in self.units:
            unit.detach()
        self.attached.leave()
        unpin(self.segments)
        self.gradients.callbacks = None
        self.mesh.stop()
