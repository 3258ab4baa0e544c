"""Count micro-batches and steps, adjust the loss scale, and end a step, on every backend.

An engine reports the end of each backward and the norm of a step's gradients. This file decides whether the
step is complete and whether it is skipped, and advances the loss scale and the schedule.

Invariant: decisions depend only on what the engine reports, so ranks that report the same decide the same.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zerodrift.engine.nested import in_backward, tensors_in
from zerodrift.engine.step.norm import Norm
from zerodrift.errors import NonFiniteError, UnsupportedError
from zerodrift.optim import OptimizerState, learning_rates
from zerodrift.plan import Plan, sums_by_tree
from zerodrift.policy import LossScale


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a call of `step`."""

    updated: bool
    """Whether parameters were updated: false between the micro-batches of a step, and for a skipped step."""
    skipped: bool
    """Whether the update was skipped because a gradient is not finite."""
    grad_norm: float | None
    """Global norm before clipping; None if the step is not complete."""
    loss_scale: float
    """The multiplier of the loss in this step; 1 without one."""
    lr: tuple[float, ...]
    """Learning rate of each parameter group in this step."""
    step: int
    """Optimizer steps taken so far, skipped ones not counted."""
    bad: tuple[str, ...] = ()
    """The first parameters whose gradient is not finite."""


class Scaler:
    """The loss scale, static or dynamic, with DeepSpeed's keys.

    The first overflows only count down `hysteresis`; after that every overflow halves the scale, down to
    `minimum`. After `window` good steps in a row, which follow a good one, the scale doubles and the count
    begins anew. With `consecutive` the count begins anew after every good step.
    """

    def __init__(self, spec: LossScale | None) -> None:
        self._spec = spec
        self.scale = spec.initial if spec else 1.0
        self._left = spec.hysteresis if spec else 0
        self._good = 0

    @property
    def active(self) -> bool:
        return self._spec is not None

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, skipped or not."""
        spec = self._spec
        if spec is None or not spec.dynamic:
            return
        if overflow:
            self._good = 0
            if self._left > 1:
                self._left -= 1
                return
            if self.scale <= spec.minimum:
                must = "must allow a lower loss scale"
                got = f"gradients that overflow at the minimum, {spec.minimum:g}"
                do = "Lower the learning rate, lower `fp16.min_loss_scale`, or use bf16."
                raise NonFiniteError("fp16.min_loss_scale", must, got=got, do=do)
            self.scale = max(self.scale / 2, spec.minimum)
            return
        self._good += 1
        if spec.consecutive:
            self._left = spec.hysteresis
        stable = self._good - 1  # DeepSpeed does not count the first good step
        if stable > 0 and stable % spec.window == 0:
            self._left = spec.hysteresis
            self.scale *= 2

    def state_dict(self) -> dict[str, float | int]:
        return {"scale": self.scale, "left": self._left, "good": self._good}

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale = float(state["scale"])
        self._left, self._good = int(state["left"]), int(state["good"])


class TrainingProgress:
    """The counters of an engine, its loss scale and its schedule."""

    def __init__(self, plan: Plan, rates: OptimizerState | None, schedule: Any, *, shows: bool) -> None:
        """`rates` is the optimizer, or None if nothing is trained."""
        self._plan = plan
        self._rates = rates
        self._shows = shows
        self.schedule = schedule
        self.scaler = Scaler(plan.policy.loss_scale)
        self.global_steps = 0
        self.skipped_steps = 0
        self.grad_norm: float | None = None
        self.accumulation = plan.policy.batch.accumulation
        """Micro-batches per step, by which gradients are divided; may be changed between steps."""
        self.boundary: bool | None = None
        """Whether the current micro-batch ends its step; None if micro-batches are counted."""
        self.micro_batches = 0
        """Backwards since the last step."""
        self.dropped = 0
        """Forwards in training since the last step whose backward has not come."""
        self.answered = False
        """Whether the current backward has reached the output of a forward."""
        self.syncs = True
        """Whether a backward may be the last of its step."""
        self.is_scaled = False
        """Whether the loss of the current backward has been through `scale`."""
        self.ended: Callable[[], None] = _nothing
        """Called after every backward that adds to gradients, when they are collected."""
        self.failed: Callable[[], None] = _nothing
        """Called after a backward that the engine did not call has raised."""
        self.closed = False
        self.background: Any = None
        """Work beside training on every rank, such as writing a checkpoint, or None. Its `check` is called in
        every step and may raise on all ranks. `destroy` calls `finish`, or `abandon` during an exception."""

    # --- a micro-batch ----------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale, if there is one."""
        self.is_scaled = True
        return loss.float() * self.scaler.scale if self.scaler.active else loss

    def is_last(self) -> bool:
        """Return whether the coming backward is the last micro-batch of its step."""
        counted = (self.micro_batches + 1) % self.accumulation == 0
        return (counted if self.boundary is None else self.boundary) and self.syncs

    def end_backward(self) -> bool:
        """Count a micro-batch. Return False if its loss was not scaled and should be."""
        self.micro_batches += 1
        if not self.answered:  # on one rank, the loss of a batch may be a constant
            self.dropped = max(0, self.dropped - 1)
        self.answered = False
        scaled, self.is_scaled = self.is_scaled, False
        return scaled or not self.scaler.active

    def watch(self, model: nn.Module) -> list[Any]:
        """Count forwards without a backward, for `norm.RankAgreement`; returns hook handles."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module is not model or not module.training or not torch.is_grad_enabled() or in_backward():
                return
            outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if not outputs:
                return
            self.dropped += 1
            waiting = [self]

            def reached(gradient: torch.Tensor) -> None:
                while waiting:
                    progress = waiting.pop()
                    progress.answered = True
                    progress.dropped = max(0, progress.dropped - 1)

            for tensor in outputs:
                tensor.register_hook(reached)

        return [model.register_forward_hook(after)]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    # --- the step ---------------------------------------------------------------------------------------

    @property
    def steps_tried(self) -> int:
        """Steps so far, with those that were skipped."""
        return self.global_steps + self.skipped_steps

    @property
    def is_boundary(self) -> bool:
        return self.micro_batches % self.accumulation == 0 if self.boundary is None else self.boundary

    def now(self) -> StepResult:
        """Return the result of a call of `step` that does not update."""
        if self._rates is None:
            raise refusal("no optimizer")
        self.require_open()
        rates = learning_rates(self._rates)
        return StepResult(False, False, None, self.scaler.scale, rates, self.global_steps)

    def begin_step(self, schedule_arguments: Mapping[str, Any]) -> bool:
        """Return whether the step is complete. If it is, check arguments and background work."""
        if self.micro_batches == 0 or not self.is_boundary:
            return False
        if self.schedule is not None:
            signature = inspect.signature(self.schedule.step)
            try:
                signature.bind(**schedule_arguments)
            except TypeError as error:
                call = f"{type(self.schedule).__name__}.step{signature}"
                raise refusal("schedule arguments", call=call, found=error) from None
        if self._plan.policy.requires_tree and not sums_by_tree(self._plan, self.micro_batches):
            raise refusal("no whole tree", count=self.micro_batches, ranks=self._plan.mesh.data)
        if self.background is not None:
            self.background.check()
        return True

    @property
    def unscale(self) -> float:
        """The factor from the accumulated sum to the gradient of the averaged, unscaled loss."""
        averaging = self._plan.policy.averaging
        ranks = self._plan.mesh.data / averaging.before if averaging.mean else 1.0
        # First the number of all ranks' micro-batches, which is the same on any number of ranks.
        return 1.0 / (self.scaler.scale * (self.accumulation * ranks))

    def unscale_of(self, complete: bool) -> float:
        """Return `unscale` for a sum over all ranks (`complete`), or the factor for the sum of one rank."""
        if complete or not self._plan.policy.averaging.mean:
            return self.unscale
        return 1.0 / (self.scaler.scale * self.accumulation)

    def require_whole_sum(self, name: str) -> None:
        """Refuse to read a gradient in the middle of a step if the plan requires the tree: there is no sum
        yet."""
        if self._plan.policy.requires_tree and self.micro_batches and not self.is_boundary:
            raise refusal("sum not formed", name=name)

    def end_step(
        self,
        before: StepResult,
        norm: Norm,
        bad: Sequence[str],
        schedule_arguments: Mapping[str, Any],
        error_if_nonfinite: bool,
    ) -> StepResult:
        """Count a step that has updated or was skipped. Raise if a skipped step is an error."""
        self.dropped = 0
        skipped = not norm.finite
        self.grad_norm = norm.value
        self.scaler.update(skipped)
        if skipped:
            self.skipped_steps += 1
        else:
            self.global_steps += 1
            if self.schedule is not None:
                self.schedule.step(**schedule_arguments)
            every = self._plan.policy.print_every
            if self._shows and self._rates is not None and every and self.global_steps % every == 0:
                shown = ", ".join(f"{rate:.6g}" for rate in learning_rates(self._rates)) or "-"
                text = f"step {self.global_steps}  grad norm {self.grad_norm:.6g}  lr {shown}"
                if self.scaler.active:
                    text += f"  loss scale {self.scaler.scale:g}"
                print(text + (f"  skipped {self.skipped_steps}" if self.skipped_steps else ""), flush=True)
        may_skip = self._plan.policy.skip_nonfinite or self.scaler.active
        if skipped and (error_if_nonfinite or not may_skip):
            must = "must be finite"
            got = f"{norm.value}, first in {', '.join(bad) or 'no single parameter'}"
            do = "Nothing was updated. Look at the batch, lower the learning rate, or clip."
            raise NonFiniteError("gradient", must, got=got, do=do)
        return replace(
            before,
            updated=not skipped,
            skipped=skipped,
            grad_norm=norm.value,
            step=self.global_steps,
            bad=tuple(bad),
        )

    # --- the end ----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drop the engine's callbacks, and refuse further use."""
        self.closed, self.ended, self.failed = True, _nothing, _nothing

    def require_open(self) -> None:
        if self.closed:
            raise refusal("closed")


def _nothing() -> None: ...


def refusal(kind: str, **values: object) -> UnsupportedError:
    """Return the error of a row of `_REFUSALS`."""
    where, must, got, do = (text.format(**values) for text in _REFUSALS[kind])
    return UnsupportedError(where, must, got=got, do=do)


_REFUSALS = {
    "no optimizer": (
        *("step", "must have an optimizer", "none"),
        "Pass one to `initialize`, or write an `optimizer` block.",
    ),
    "closed": ("engine", "must not be used after `destroy`", "", "Make another one."),
    "schedule arguments": (
        *("schedule_arguments", "must be the arguments of {call}", "{found}"),
        "Pass them to `engine.step` by name, as in `{{'metrics': loss}}` (`lr_kwargs` in the drop-in), the "
        "same on all ranks; or leave `schedule` out and call its `step` where it is due.",
    ),
    "pipeline": (
        *("{what}", "must not be called on a pipeline, whose stages run together", ""),
        "Call `engine.train_batch` with all micro-batches of a step, or `engine.evaluate`.",
    ),
    "step under way": (
        *("accumulate", "must be given all micro-batches of a step, at its beginning"),
        "a step that has micro-batches already",
        "Call `step` to update with them, or `zero_grad` to drop them.",
    ),
    "no loss": (
        *("loss", "must be a tensor", "{found}"),
        "A model of `transformers` returns a loss if it gets `labels`.",
    ),
    "loss not scaled": (
        *("backward", "the loss must be scaled in mode {mode}", "a plain `loss.backward()`"),
        "Call `engine.backward(loss)` or `engine.scale(loss).backward()`.",
    ),
    "gradient cleared": (
        *("{name}", "its gradient must be cleared through the engine, which has collected it"),
        "`param.grad` set to None or zero between `backward` and `step`, as by `zero_grad`",
        "Call `engine.zero_grad()`, or for one parameter `engine.parameter(name).gradient = zeros`.",
    ),
    "gradient too late": (
        *("{name}", "its gradient must come once in a backward under `reduce.order: tree`"),
        "a part that came after its unit's gradients were summed",
        "Call `checkpoint` with `use_reentrant=False`, or leave `order` out.",
    ),
    "backward too late": (
        "backward",
        "must not follow the last micro-batch of a step under `reduce.order: tree`, whose sum is complete",
        "a gradient of {name}",
        "Call `engine.step()`, or `engine.zero_grad()` to start over.",
    ),
    "gradient by hand": (
        "{name}",
        "its gradient must come only from backwards under `reduce.order: tree`, which adds micro-batches",
        "one that was set in `param.grad` after the last backward",
        "Add it to the loss, or assign `engine.parameter(name).gradient` before `engine.step()`.",
    ),
    "sum not formed": (
        "{name}.gradient",
        "must be read or assigned after the last micro-batch of a step under `reduce.order: tree`",
        "a step that is not complete",
        "Do it after the last backward, before `engine.step()`.",
    ),
    "not seeded": (
        "forward",
        "must draw random numbers by the number of its micro-batch under `reduce.order: tree`",
        "numbers from a generator that was not seeded for it",
        "Call `engine.seed_micro_batch(number)` before it, or leave `order` out.",
    ),
    "buffer written": (
        "{name}",
        "must not be written by a forward in training under `reduce.order: tree`: it is of one rank's data",
        "a buffer with other values than before",
        "Use a layer without running statistics, or leave `order` out.",
    ),
    "no whole tree": (
        "step",
        "must have micro-batches that make whole nodes of the tree on every rank under `reduce.order: tree`",
        "{count} on each of {ranks} ranks",
        "Use as many as the config says, or leave `order` out.",
    ),
    "copied": (
        "engine",
        "must not be copied or pickled, because it has connections to other ranks",
        "",
        "Copy `engine.module` inside `engine.gathered()`; save with `zerodrift.Checkpoints`.",
    ),
}
"""Kind -> (where, what must hold, what was found, what to do)."""
