"""The engine: a plan, a model and an optimizer, and the step as a recipe of a few lines.

It owns the parts and decides nothing: what is gathered, cast, reduced and updated in which dtype is in the
plan's rows, when each happens is in `unit.py` and `grads.py`. A micro-batch is `engine(...)` and
`engine.backward(loss)`; `engine.step()` ends it and, at the last one of a step, updates.

Invariant: after an exception, in the model's forward or in a backward, the engine is as good as before. A
forward that failed costs nothing else; a backward that failed costs the micro-batches of its step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.engine import compute, scale, shards, statistics, steps
from zerodrift.engine.attached import Attached
from zerodrift.engine.grads import Gradients, Watcher
from zerodrift.engine.held import Held
from zerodrift.engine.place import Sources, place
from zerodrift.engine.segment import FlatSegment, Pools
from zerodrift.engine.unit import LiveUnit, guard
from zerodrift.engine.values import Values
from zerodrift.engine.walk import Walk
from zerodrift.engine.ways import way_of_updates
from zerodrift.errors import RankError
from zerodrift.experts.dispatch import spread_experts
from zerodrift.optim.update import Updater, make_updater
from zerodrift.plan.stages import part
from zerodrift.plan.table import Plan
from zerodrift.report.explain import Explanation, explain
from zerodrift.report.updates import UpdateReport


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a call of `step` did."""

    updated: bool
    """Whether parameters were updated: false between the micro-batches of a step, and for a skipped step."""
    skipped: bool
    """Whether the update was skipped for a gradient that is not finite."""
    grad_norm: float | None
    """Global norm before clipping; None where the step is not complete yet."""
    loss_scale: float
    """The multiplier of the loss in this step; 1 without one."""
    lr: tuple[float, ...]
    """Learning rate of each parameter group in this step."""
    step: int
    """Optimizer steps taken so far, skipped ones not counted."""
    bad: tuple[str, ...] = ()
    """The first parameters whose gradient is not finite."""


class Beside(Protocol):
    """Work that goes on beside training on every rank alike, such as a checkpoint being written."""

    def check(self) -> None:
        """At the beginning of every step. May call collectives, and raise on all ranks what went wrong."""

    def finish(self) -> None:
        """Before the ranks part: end it, or raise."""

    def abandon(self) -> None:
        """An exception is ending this rank: let go of it without a collective."""


class Engine:
    """Runs a plan. Made by `zerodrift.initialize`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Any = None,
        sources: Sources | None = None,
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
        self._pools = Pools(keep=not policy.sharding.free_accumulator)
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.segments, self.units, masters = place(self.part, model, self.comm, self._pools, sources)
        self._walk = Walk(self.units)
        self.gradients = Gradients(self._walk, policy.averaging.before)
        self.precision = compute.Precision(plan, mesh.device)
        """How forwards and backwards are entered."""
        self._handles: list[Any] = []
        self.held: Held | None = None
        """Set where a pipeline's schedule runs the parts of the model; see `held.py`."""
        if plan.policy.pipeline is None:
            self._handles += [handle for unit in self.units for handle in unit.attach(self.gradients)]
            self._handles += compute.attach(model, compute.boundaries(plan, model))
        else:
            self.held = Held(self.part, self.units, self.gradients)
        self._handles += guard(model, self.segments)
        self._handles += spread_experts(self.part, model, self.comm)
        self.attached = Attached(model, self.segments)
        self._handles += self.attached.attach()
        self._trained = [segment for segment in self.segments if segment.update is not None]
        way = way_of_updates(plan, self.comm)
        self.updater: Updater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            owned = [segment.piece(masters.pop(segment.number)) for segment in self._trained]
            self.updater = make_updater(self.part, owned, optimizer, originals, way=way)
        self.group_of = self._groups_of_all()
        """Row name -> its parameter group, of the rows that the optimizer was given, on every stage."""
        self.schedule = steps.schedule(plan, self.optimizer, schedule)
        self.scaler = scale.Scaler(policy.loss_scale)
        self.gradients.watcher = Watcher(self._is_last, self._backward_ended, self._backward_failed)
        self.global_steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        """Of the last complete step, before clipping."""
        self.accumulation = policy.batch.accumulation
        """Micro-batches per step, which gradients are divided by; may be changed between steps."""
        self.boundary: bool | None = None
        """Whether the micro-batch that is under way ends its step; None where the engine counts."""
        self._micro_batches = 0
        """Backwards since the last step."""
        self._sync = True
        self._scaled = False
        self._closed = False
        self.beside: Beside | None = None
        """What else the ranks are doing; at most one thing at a time."""

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
        args, kwargs = self.precision.inputs(args, kwargs)
        try:
            with self.precision.forward():
                return self.module(*args, **kwargs)
        except RankError:
            raise  # there is nobody to finish with what is under way
        except BaseException:
            self._recover()
            raise

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on: multiplied by the loss scale where there is one."""
        self._scaled = True
        return loss.float() * self.scaler.scale if self.scaler.active else loss

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backward of one micro-batch. The average over micro-batches is taken in the step, after the sum."""
        self.require_open()
        self._require_whole("backward")
        before = self._micro_batches
        try:
            with self.precision.backward():
                self.scale(loss).backward(**kwargs)
            if self._micro_batches == before:
                self.gradients.end_unseen()
        except RankError:
            raise
        except BaseException:
            self._backward_failed()
            raise

    def _is_last(self) -> bool:
        """Whether the coming backward is the last micro-batch of its step."""
        counted = (self._micro_batches + 1) % self.accumulation == 0
        return (counted if self.boundary is None else self.boundary) and self._sync

    def _backward_ended(self) -> None:
        self._micro_batches += 1
        scaled, self._scaled = self._scaled, False
        if self.scaler.active and not scaled:
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
        self._scaled = False

    def require_open(self) -> None:
        """Raise if it was destroyed."""
        if self._closed:
            raise steps.closed()

    def _require_whole(self, what: str) -> None:
        if self.held is not None:
            raise steps.is_driven(what)

    # Of a pipeline, whose schedule runs micro-batches in an order of its own; see `held.py`.

    def end_step(self, micro_batches: int) -> StepResult:
        """All micro-batches of a step have ended: update."""
        self._micro_batches = micro_batches
        self._scaled = False
        return self.step()

    def abandon_step(self) -> None:
        """Something was raised in a schedule: the step starts anew."""
        self._backward_failed()

    @property
    def micro_batches(self) -> int:
        """Of the step under way, so far; 0 between steps."""
        return self._micro_batches

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step: what is reduced once per step waits."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def is_boundary(self) -> bool:
        """Whether `step` would update now."""
        return self._micro_batches % self.accumulation == 0 if self.boundary is None else self.boundary

    # --- the step ---------------------------------------------------------------------------------------

    def step(
        self, error_if_nonfinite: bool = False, schedule_arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """End a micro-batch; after the last one of a step, update. The schedule gets `schedule_arguments`."""
        if self.updater is None:
            raise steps.needs_optimizer()
        self.require_open()
        self.attached.check()
        lr, loss_scale = self.updater.learning_rates(), self.scaler.scale
        if self._micro_batches == 0:
            self.gradients.end_unseen()
        if self._micro_batches == 0 or not self.is_boundary:
            return StepResult(False, False, None, loss_scale, lr, self.global_steps)
        if self.beside is not None:
            self.beside.check()
        with torch.no_grad():
            self.gradients.flush()
            if self.mesh.size("replicate") > 1:
                self.gradients.sum_over_replicas()
            if self.held is not None:
                self.held.sum_over_ends(self.comm)
            unscale = self.unscale
            counted = [segment for segment in self._trained if segment.spec.lead]
            gradients = [segment.reduced for segment in counted if segment.reduced is not None]
            norm = scale.global_norm(gradients, self.comm, unscale, self._walk.checksum)
            self._walk.checksum = 0
            self.grad_norm = norm.value
            skip = not norm.finite
            bad = tuple(scale.bad_parameters(scale.parts_of(self._trained), self.comm)) if skip else ()
            if not skip:
                self._update(norm.multiplier(unscale, self.plan.policy.clip))
        self._finish_step(skip, schedule_arguments or {})
        if skip and (error_if_nonfinite or not self._may_skip):
            raise steps.nonfinite(norm.value, bad)
        return StepResult(not skip, skip, norm.value, loss_scale, lr, self.global_steps, bad)

    @property
    def unscale(self) -> float:
        """From the sum that was accumulated to the gradient of the averaged, unscaled loss."""
        return steps.unscale(self.plan, self.scaler.scale, self.accumulation)

    def _update(self, multiplier: float) -> None:
        if self.updater is None:
            raise AssertionError("unreachable")
        for unit in self.units:
            unit.release()
        gradients: dict[int, torch.Tensor] = {}
        for segment in self._trained:
            if segment.reduced is not None:
                whole = segment.update is not None and not segment.update.axis
                gradients[segment.number] = segment.whole_gradient() if whole else segment.reduced
        self.updater.update(gradients, multiplier)
        for segment in self._trained:
            if segment.number in gradients:
                segment.give_back(gradients[segment.number])
        handles = [segment.spread() for segment in self._trained if segment.number in gradients]
        for handle in handles:
            handle.wait()
        for segment in self._trained:
            segment.changed()

    def _finish_step(self, skipped: bool, schedule_arguments: Mapping[str, Any]) -> None:
        self.zero_grad()
        self.scaler.update(skipped)
        if skipped:
            self.skipped_steps += 1
            return
        self.global_steps += 1
        if self.schedule is not None:
            self.schedule.step(**schedule_arguments)
        every = self.plan.policy.print_every
        if every and self.global_steps % every == 0 and self.mesh.rank() == 0:
            rates = self.updater.learning_rates() if self.updater else ()
            shown = steps.line(self.global_steps, self.grad_norm, rates, self.scaler, self.skipped_steps)
            print(shown, flush=True)

    @property
    def _may_skip(self) -> bool:
        return self.plan.policy.skip_nonfinite or self.scaler.active

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self.gradients.drop()
        self._pools.end_step()
        self.comm.release()
        self._micro_batches = 0

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

    def pieces(self) -> Iterator[shards.Piece]:
        """What this rank owns: for `Shards`."""
        return shards.pieces(self)

    def spread(self) -> None:
        """After pieces were filled: for `Shards`."""
        shards.spread(self)

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

    def destroy(self) -> None:
        """Take the hooks off and leave the process groups. The module keeps what it holds. Waits for what
        goes on beside training, unless an exception is on its way through this rank."""
        if self._closed:
            return
        try:
            if self.beside is not None:
                if sys.exc_info()[0] is None:
                    self.beside.finish()
                else:
                    self.beside.abandon()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._recover()
        self.zero_grad()
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self.gradients.watcher = None
        self.mesh.stop()
