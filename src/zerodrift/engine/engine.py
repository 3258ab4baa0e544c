"""The engine: a plan, a model and an optimizer, and the step as a recipe of a few lines.

It owns the parts and decides nothing: what is gathered, cast, reduced and updated in which dtype is in the
plan's rows, when each happens is in `unit.py` and `grads.py`. A micro-batch is `engine(...)` and
`engine.backward(loss)`; `engine.step()` ends it and, at the last one of a step, updates.

Invariant: after an exception, in the model's forward or in a backward, the engine is as good as before. A
forward that failed costs nothing else; a backward that failed costs the micro-batches of its step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.engine import compute, scale
from zerodrift.engine.attached import Attached
from zerodrift.engine.grads import Gradients, Watcher
from zerodrift.engine.place import place
from zerodrift.engine.segment import FlatSegment, Pools
from zerodrift.engine.unit import LiveUnit, guard
from zerodrift.engine.values import Values
from zerodrift.engine.walk import Walk
from zerodrift.errors import NonFiniteError, RankError, UnsupportedError
from zerodrift.optim.update import Updater, make_updater
from zerodrift.plan.table import Plan
from zerodrift.report.explain import Explanation, explain


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


class Engine:
    """Runs a plan. Made by `zerodrift.initialize`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: Any = None,
    ) -> None:
        if plan.policy.backend != "native" or plan.mesh.pipeline > 1:
            what = f"`backend: {plan.policy.backend}`" if plan.policy.backend != "native" else "`pipeline`"
            raise UnsupportedError(
                f"{what}: can be planned but not yet run; got it in the plan. Use `backend: native` without "
                f"a pipeline."
            )
        self.plan = plan
        self.module = model
        self.mesh = mesh
        self.comm = Collectives(mesh)
        self.comm.agree(plan.digest, lambda: _row_texts(plan))
        policy = plan.policy
        self.segments: list[FlatSegment]
        self.units: list[LiveUnit]
        self._pools = Pools(keep=not policy.sharding.free_accumulator)
        originals = {id(parameter): name for name, parameter in model.named_parameters()}
        with torch.no_grad():
            self.segments, self.units, masters = place(plan, model, self.comm, self._pools)
        self._walk = Walk(self.units)
        self.gradients = Gradients(self._walk, policy.averaging.before)
        self._precision = compute.Precision(plan, mesh.device)
        self._handles = [handle for unit in self.units for handle in unit.attach(self.gradients)]
        self._handles += compute.attach(model, compute.boundaries(plan, model))
        self._handles += guard(model, self.segments)
        self.attached = Attached(model, self.segments)
        self._handles += self.attached.attach()
        self._trained = [segment for segment in self.segments if segment.update is not None]
        self.updater: Updater | None = None
        if self._trained and (optimizer is not None or policy.optimizer is not None):
            owned = [segment.piece(masters.pop(segment.number)) for segment in self._trained]
            self.updater = make_updater(plan, owned, optimizer, originals)
        self.schedule = self._make_schedule(schedule)
        self.scaler = scale.Scaler(policy.loss_scale)
        self.gradients.watcher = Watcher(self._is_last, self._backward_ended, self._backward_failed)
        self.global_steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        """Of the last complete step, before clipping."""
        self._micro_batches = 0
        """Backwards since the last step."""
        self._sync = True
        self._scaled = False
        self._closed = False

    # --- a micro-batch ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the plan's precision."""
        self._require_open()
        self.attached.check()
        args, kwargs = self._precision.inputs(args, kwargs)
        try:
            with self._precision.forward():
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
        self._require_open()
        before = self._micro_batches
        try:
            with self._precision.backward():
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
        last = (self._micro_batches + 1) % self.plan.policy.batch.accumulation == 0
        return last and self._sync

    def _backward_ended(self) -> None:
        self._micro_batches += 1
        scaled, self._scaled = self._scaled, False
        if self.scaler.active and not scaled:
            self.zero_grad()
            raise UnsupportedError(
                f"`backward`: the loss must be scaled in mode {self.plan.policy.mode}; got a plain "
                f"`loss.backward()`. Call `engine.backward(loss)` or `engine.scale(loss).backward()`."
            )

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

    def _require_open(self) -> None:
        if self._closed:
            raise UnsupportedError("`engine`: must not be used after `destroy`. Make another one.")

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
        return self._micro_batches % self.plan.policy.batch.accumulation == 0

    # --- the step ---------------------------------------------------------------------------------------

    def step(self, error_if_nonfinite: bool = False) -> StepResult:
        """End a micro-batch; after the last one of a step, update."""
        if self.updater is None:
            raise UnsupportedError(
                "`step`: needs an optimizer; got none. Pass one to `initialize`, or write an `optimizer` "
                "block."
            )
        self._require_open()
        self.attached.check()
        lr, loss_scale = self.updater.learning_rates(), self.scaler.scale
        if self._micro_batches == 0:
            self.gradients.end_unseen()
        if self._micro_batches == 0 or not self.is_boundary:
            return StepResult(False, False, None, loss_scale, lr, self.global_steps)
        with torch.no_grad():
            self.gradients.flush()
            if self.mesh.size("replicate") > 1:
                self.gradients.sum_over_replicas()
            unscale = self.unscale
            norm = scale.global_norm(self._trained, self.comm, unscale, self._walk.checksum)
            self._walk.checksum = 0
            self.grad_norm = norm.value
            skip = not norm.finite
            bad = tuple(scale.bad_parameters(self._trained, self.comm)) if skip else ()
            if not skip:
                self._update(norm.multiplier(unscale, self.plan.policy.clip))
        self._finish_step(skip)
        if skip and (error_if_nonfinite or not self._may_skip):
            raise NonFiniteError(
                f"`gradient`: must be finite; got {norm.value}, first in "
                f"{', '.join(bad) or 'no parameter alone'}. Nothing was updated. Look at "
                f"the batch, lower the learning rate, or clip."
            )
        return StepResult(not skip, skip, norm.value, loss_scale, lr, self.global_steps, bad)

    @property
    def unscale(self) -> float:
        """From the sum that was accumulated to the gradient of the averaged, unscaled loss."""
        averaging = self.plan.policy.averaging
        ranks = self.plan.mesh.data / averaging.before if averaging.mean else 1.0
        return 1.0 / (self.scaler.scale * self.plan.policy.batch.accumulation * ranks)

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

    def _finish_step(self, skipped: bool) -> None:
        self.zero_grad()
        self.scaler.update(skipped)
        if skipped:
            self.skipped_steps += 1
            return
        self.global_steps += 1
        if self.schedule is not None:
            self.schedule.step()
        every = self.plan.policy.print_every
        if every and self.global_steps % every == 0 and self.mesh.rank() == 0:
            print(self._line(), flush=True)

    def _line(self) -> str:
        """What `steps_per_print` shows."""
        rates = ", ".join(f"{rate:.6g}" for rate in self.updater.learning_rates()) if self.updater else "-"
        text = f"step {self.global_steps}  grad norm {self.grad_norm:.6g}  lr {rates}"
        if self.scaler.active:
            text += f"  loss scale {self.scaler.scale:g}"
        return text + (f"  skipped {self.skipped_steps}" if self.skipped_steps else "")

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

    def _make_schedule(self, given: Any) -> Any:
        from zerodrift.optim.schedules import make_schedule

        if given is not None or self.updater is None or self.plan.policy.schedule is None:
            return given(self.optimizer) if callable(given) and not hasattr(given, "step") else given
        return make_schedule(self.plan.policy.schedule, self.updater.groups)

    @property
    def values(self) -> Values:
        """Full values out and in."""
        # Made anew: one that was kept would hold the engine, and the engine it, until Python looks for
        # cycles, and their memory with them.
        return Values(self)

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

    def destroy(self) -> None:
        """Take the hooks off and leave the process groups. The module keeps what it holds."""
        if self._closed:
            return
        self._recover()
        self.zero_grad()
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self.gradients.watcher = None
        self.mesh.stop()


def _row_texts(plan: Plan) -> list[str]:
    """One line per row, for ranks that disagree."""
    lines = [f"mesh {plan.mesh}, mode {plan.policy.mode}, stage {plan.policy.sharding.stage}"]
    lines += [f"{decision.key} = {decision.value}" for decision in plan.policy.decisions]
    for row in plan.rows:
        cells = " ".join(f"{column}={text}" for column, text in row.columns.cells().items())
        lines.append(f"{row.name} {list(row.shape)} {cells} segment {row.segment} at {row.offset}")
    return lines
