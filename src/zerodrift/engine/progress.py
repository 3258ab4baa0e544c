"""The course of training: which micro-batch of which step, at which loss scale, and how a step ends.

What every engine shares, whoever executes the plan. An engine says when a backward has ended and what norm
the gradients of a step have; here it is counted, it is decided whether a step is complete and whether it is
skipped, and the loss scale and the schedule go on. Gradients and parameters are the engine's.

Invariant: nothing here looks at the data of one rank, so ranks that are told the same decide the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from zerodrift.engine import steps
from zerodrift.engine.nested import tensors_in
from zerodrift.engine.scale import Norm, Scaler
from zerodrift.engine.unit import in_backward
from zerodrift.plan.dealing import makes_the_tree
from zerodrift.plan.table import Plan


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a call of `step`."""

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


class BackgroundWork(Protocol):
    """Work that goes on beside training on every rank alike, such as a checkpoint being written."""

    def check(self) -> None:
        """At the beginning of every step. May call collectives, and raise on all ranks what went wrong."""

    def finish(self) -> None:
        """Before the ranks part: end it, or raise."""

    def abandon(self) -> None:
        """An exception is ending this rank: let go of it without a collective."""


class Rates(Protocol):
    """What is asked of an optimizer."""

    def learning_rates(self) -> tuple[float, ...]:
        """Of each parameter group, now."""


class _Forward:
    """One forward, until a backward comes to it."""

    def __init__(self, progress: TrainingProgress) -> None:
        self._progress: TrainingProgress | None = progress

    def reached(self, gradient: torch.Tensor) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.answered = True
            progress.dropped = max(0, progress.dropped - 1)


class TrainingProgress:
    """Where one engine is in its training."""

    def __init__(self, plan: Plan, rates: Rates | None, schedule: Any, *, shows: bool) -> None:
        """`rates` is None where nothing is trained; `shows` says whether this rank prints."""
        self._plan = plan
        self._rates = rates
        self._shows = shows
        self.schedule = schedule
        self.scaler = Scaler(plan.policy.loss_scale)
        self.global_steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        """Of the last complete step, before clipping."""
        self.accumulation = plan.policy.batch.accumulation
        """Micro-batches per step, which gradients are divided by; may be changed between steps."""
        self.boundary: bool | None = None
        """Whether the micro-batch that is under way ends its step; None where they are counted."""
        self.micro_batches = 0
        """Backwards since the last step."""
        self.dropped = 0
        """Forwards in training since the last step that no backward has come back to."""
        self.answered = False
        """Whether the micro-batch under way has come back to one."""
        self._sync = True
        self._scaled = False
        """Whether the loss of the backward that comes, or is under way, has been through `scale`."""
        self.closed = False
        self.background: BackgroundWork | None = None
        """What else the ranks are doing; at most one thing at a time."""

    # --- a micro-batch ----------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on: multiplied by the loss scale where there is one."""
        self._scaled = True
        return loss.float() * self.scaler.scale if self.scaler.active else loss

    def is_last(self) -> bool:
        """Whether the coming backward is the last micro-batch of its step."""
        counted = (self.micro_batches + 1) % self.accumulation == 0
        return (counted if self.boundary is None else self.boundary) and self._sync

    def end_backward(self) -> bool:
        """Count a micro-batch. Returns whether its loss has the scale that the plan asks for."""
        self.micro_batches += 1
        if not self.answered:  # the loss of a batch may be a constant, on one rank only
            self.dropped = max(0, self.dropped - 1)
        self.answered = False
        scaled, self._scaled = self._scaled, False
        return scaled or not self.scaler.active

    def end_backwards(self, count: int) -> None:
        """All micro-batches of a step have ended, run by a schedule of its own."""
        self.micro_batches = count
        self._scaled = False

    def unwind(self) -> None:
        """Something was raised in a forward or a backward."""
        self._scaled = False

    def restart(self) -> None:
        """The step begins anew: there are no gradients."""
        self.micro_batches = 0

    def watch(self, model: nn.Module) -> list[Any]:
        """Count the forwards that no backward comes back to; returns the handles of hooks. See
        `scale.global_norm`."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is not model or not module.training or not torch.is_grad_enabled() or in_backward():
                return
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if outputs:
                self.dropped += 1
                forward = _Forward(self)
                for tensor in outputs:
                    tensor.register_hook(forward.reached)

        return [model.register_forward_hook(after)]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    # --- the step ---------------------------------------------------------------------------------------

    @property
    def is_boundary(self) -> bool:
        """Whether a step would update now."""
        return self.micro_batches % self.accumulation == 0 if self.boundary is None else self.boundary

    def now(self) -> StepResult:
        """What a step says that is not complete; the rates and the loss scale of one that will be."""
        if self._rates is None:
            raise steps.needs_optimizer()
        self.require_open()
        rates = self._rates.learning_rates()
        return StepResult(False, False, None, self.scaler.scale, rates, self.global_steps)

    def begin_step(self) -> bool:
        """Whether all micro-batches of a step are there. Then what goes on beside training is looked at."""
        if self.micro_batches == 0 or not self.is_boundary:
            return False
        if self._plan.policy.tree and not makes_the_tree(self._plan, self.micro_batches):
            raise steps.not_dealt(self.micro_batches, self._plan.mesh.data)
        if self.background is not None:
            self.background.check()
        return True

    @property
    def unscale(self) -> float:
        """From the sum that was accumulated to the gradient of the averaged, unscaled loss."""
        averaging = self._plan.policy.averaging
        ranks = self._plan.mesh.data / averaging.before if averaging.mean else 1.0
        # The micro-batches of all ranks first: a whole number, the same on any number of ranks.
        return 1.0 / (self.scaler.scale * (self.accumulation * ranks))

    def unscale_of(self, complete: bool) -> float:
        """The same of a sum of all ranks, or of what one rank has."""
        averaging = self._plan.policy.averaging
        return (
            self.unscale if complete or not averaging.mean else 1.0 / (self.scaler.scale * self.accumulation)
        )

    def require_whole_sum(self, name: str) -> None:
        """Before somebody looks at a gradient: under the tree nothing is summed in the middle."""
        if self._plan.policy.tree and self.micro_batches and not self.is_boundary:
            raise steps.not_yet(name)

    def multiplier(self, norm: Norm) -> float:
        """What the update multiplies the summed gradient by: average, loss scale and clip."""
        return norm.multiplier(self.unscale, self._plan.policy.clip)

    def end_step(
        self,
        before: StepResult,
        norm: Norm,
        bad: Sequence[str],
        schedule_arguments: Mapping[str, Any] | None,
        error_if_nonfinite: bool,
    ) -> StepResult:
        """A step has updated, or could not: `before` is what was there when it began, `bad` the parameters
        that are in the way. Raises where a skipped step is an error."""
        self.dropped = 0
        skipped = not norm.finite
        self.grad_norm = norm.value
        self.scaler.update(skipped)
        if skipped:
            self.skipped_steps += 1
        else:
            self._count_step(schedule_arguments or {})
        may_skip = self._plan.policy.skip_nonfinite or self.scaler.active
        if skipped and (error_if_nonfinite or not may_skip):
            raise steps.nonfinite(norm.value, bad)
        return replace(
            before,
            updated=not skipped,
            skipped=skipped,
            grad_norm=norm.value,
            step=self.global_steps,
            bad=tuple(bad),
        )

    def _count_step(self, schedule_arguments: Mapping[str, Any]) -> None:
        self.global_steps += 1
        if self.schedule is not None:
            self.schedule.step(**schedule_arguments)
        every = self._plan.policy.print_every
        if self._shows and self._rates is not None and every and self.global_steps % every == 0:
            rates = self._rates.learning_rates()
            shown = steps.line(self.global_steps, self.grad_norm, rates, self.scaler, self.skipped_steps)
            print(shown, flush=True)

    # --- the end ----------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise if the engine was destroyed."""
        if self.closed:
            raise steps.closed()

    def finish_background(self) -> None:
        """Before the ranks part: wait for what goes on beside training, unless an exception is on its way
        through this rank."""
        if self.background is None:
            return
        if sys.exc_info()[0] is None:
            self.background.finish()
        else:
            self.background.abandon()
