"""The engine: a plan, an executor, and the calls of a training loop.

The plan's rows say what is gathered, cast, reduced and updated in which dtype, the executor (`executor.py`)
does it, and `progress.py` counts. A micro-batch is `engine(...)` and `engine.backward(loss)`. `engine.step()`
ends a micro-batch and, after the last one of a step, updates. `engine.train_batch` takes all micro-batches of
a step at once, as a pipeline needs.

Invariant: training can go on after an exception in the model's forward, in a backward or in an update. A
backward or an update that failed costs the micro-batches of its step.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Collectives, Mesh, raise_on_all_ranks
from zerodrift.engine.digest import Digest, gradient_digest, state_digest
from zerodrift.engine.executor import BatchResult, Executor, LossOf, SequentialRunner
from zerodrift.engine.habits import determinism
from zerodrift.engine.progress import Scaler, StepResult, TrainingProgress, refusal
from zerodrift.engine.shards import SegmentShard
from zerodrift.engine.values import ParameterHandle, WholeValues, row_of
from zerodrift.errors import RankError, kind_of
from zerodrift.optim import OptimizerState, make_schedule, schedule_of
from zerodrift.plan import Plan, rank_micro_batches
from zerodrift.policy import need_of
from zerodrift.report import Explanation, UpdateReport, explain


class Engine:
    """Trains a model as a plan says, on every backend, with or without a pipeline. Made by
    `zerodrift.initialize`."""

    def __init__(
        self,
        plan: Plan,
        mesh: Mesh,
        execute: Callable[[Collectives], Executor],
        schedule: Any = None,
        loss_of: LossOf | None = None,
    ) -> None:
        """`execute` makes the executor after the ranks have agreed on the plan. `loss_of` computes the loss
        of a micro-batch in `train_batch`; None for a model that takes its items and returns a loss."""
        self.plan = plan
        self.mesh = mesh
        self.comm = Collectives(mesh)
        self.comm.agree(plan.digest, lambda: _describe(plan))
        self.executor = execute(self.comm)
        """Executes the plan on one backend; not for users."""
        self._loss_of = loss_of
        self.before_update: Callable[[], None] | None = None
        """Called after the last micro-batch of a step, between the reduction and the update."""
        self.seed: int = self.comm.broadcast_object(torch.initial_seed(), 0)
        """Seed from which `seed_micro_batch` begins: at first, torch's on rank 0. May be set."""
        mine = {} if self.updater is None else dict(self.updater.group_of)
        stages = self.comm.all_gather_object(mine, "pipeline")
        self.group_of = {name: group for stage in stages for name, group in stage.items()}
        """Row name -> parameter group of the optimizer, for the rows of all stages."""
        if schedule is None and self.optimizer is not None and plan.policy.schedule is not None:
            schedule = make_schedule(plan.policy.schedule, self.optimizer)
        else:
            schedule = schedule_of(schedule, self.optimizer)
        self.progress = TrainingProgress(plan, self.updater, schedule, shows=mesh.rank() == 0)
        self.progress.ended, self.progress.failed = self._backward_ended, self._backward_failed
        self.executor.follow(self.progress)
        self.determinism = determinism.Determinism(mesh.device)
        self._release = weakref.finalize(self, self.determinism.release)
        needs = plan.policy.requires_tree
        self.determinism.ask(need_of(needs), self.module)
        self._state = determinism.MicrobatchState(self.module, mesh.device) if needs else None

    # --- a micro-batch ----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in the plan's precision."""
        self.require_open()
        self._require_alone("engine(...)")
        forward = self.executor.forward()
        precision = self.executor.precision
        with (
            self._recovering(self._recover),
            contextlib.nullcontext() if self._state is None else self._state.forward(),
            forward,
            precision.forward(),
            precision.cast((args, kwargs)) as (args, kwargs),
        ):
            return self.module(*args, **kwargs)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, if there is one: what to call `backward` on."""
        return self.progress.scale(loss)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of one micro-batch. Gradients are averaged over micro-batches in `step`."""
        self.require_open()
        self._require_alone("backward")
        if not isinstance(loss, torch.Tensor):
            raise refusal("no loss", found=kind_of(loss))
        scaled = self.scale(loss)
        precision = self.executor.precision
        with self._recovering(self._backward_failed), precision.backward(), self.executor.backward(scaled):
            scaled.backward(**kwargs)

    def micro_batches_of_this_rank(self) -> tuple[int, ...]:
        """The numbers, over all ranks, of the micro-batches of a step that this rank takes, in their order.

        If the plan sums by the tree, a step has the same bits on any number of ranks, provided that every
        micro-batch goes to the rank that has its number here.
        """
        return rank_micro_batches(self.plan, self.mesh.rank("data"), self.accumulation)

    def seed_micro_batch(self, number: int) -> None:
        """Seed torch's generators, of the host and of this device, before the forward of micro-batch
        `number`. The seed depends on `seed`, the step and `number`, not on the rank."""
        determinism.seed_generators(self._seed_of(number), self.mesh.device)
        if self._state is not None:
            self._state.is_seeded = True

    def _seed_of(self, number: int) -> int:
        return determinism.seed_of(self.seed, self.progress.steps_tried, number)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no backward is the last of its step, so that reductions wait."""
        return self.progress.no_sync()

    @contextlib.contextmanager
    def _recovering(self, recover: Callable[[], None]) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise  # running collectives cannot be finished
        except BaseException as error:
            recover()
            need = self.determinism.need
            refused = None if need is None else determinism.nondeterministic_operation(error, need)
            if refused is not None:
                raise refused from error
            raise

    def _backward_ended(self) -> None:
        if self._state is not None:
            self._state.is_seeded = False
        if not self.progress.end_backward():
            self._backward_failed()
            raise refusal("loss not scaled", mode=self.plan.policy.mode)

    def _backward_failed(self) -> None:
        """Begin the step anew, because a part of the micro-batch was added to the others."""
        self._recover()
        self.zero_grad()

    def _recover(self) -> None:
        self.executor.recover()
        self.progress.is_scaled = False

    def require_open(self) -> None:
        """Raise if the engine was destroyed, or ended by another rank."""
        self.progress.require_open()
        self.executor.require_peers()

    def _require_alone(self, what: str) -> None:
        if self.executor.runner is not None:
            raise refusal("pipeline", what=what)

    # --- all micro-batches of a step --------------------------------------------------------------------

    def train_batch(self, micro_batches: Iterable[Any], weights: Sequence[float] = ()) -> BatchResult:
        """Train on all micro-batches of a step, and update: `accumulate` and `step`. Each loss is multiplied
        by its weight before its backward, if there are `weights`.

        All ranks of a pipeline take the same micro-batches. If the plan sums by the tree, each rank takes
        those of `micro_batches_of_this_rank`, and they are seeded here. Without a pipeline a micro-batch is a
        dict of the model's keyword arguments, unless `initialize` was given `parts`."""
        losses = self.accumulate(micro_batches, weights)
        return BatchResult(losses, self.step(), tuple(map(float, weights)))

    def accumulate(self, micro_batches: Iterable[Any], weights: Sequence[float] = ()) -> tuple[float, ...]:
        """Compute the gradients of a step's micro-batches, the first half of `train_batch`, and return their
        losses. `step` updates with the gradients, `zero_grad` drops them."""
        self.require_open()
        if self.progress.micro_batches:
            raise refusal("step under way")
        runner = self._runner
        batches, factors = runner.prepare(micro_batches, weights, self.accumulation)
        numbers = self.micro_batches_of_this_rank() if self.plan.policy.tree else ()
        seeds = tuple(map(self._seed_of, numbers))
        # A pipeline's buffers are compared here; elsewhere every forward compares its own.
        state = self._state if self.executor.runner is not None else None
        before = None if state is None else state.copy_buffers()
        try:
            losses = runner.train(batches, factors, seeds)
            if state is not None and before is not None:
                with raise_on_all_ranks(self.comm):
                    state.require_unchanged(before)
        except BaseException:
            self._backward_failed()
            raise
        self.progress.micro_batches, self.progress.is_scaled = len(batches), False
        return losses

    def evaluate(self, micro_batches: Iterable[Any]) -> float:
        """The mean loss of micro-batches, without gradients."""
        losses = self.losses(micro_batches)
        return sum(losses) / len(losses)

    def losses(self, micro_batches: Iterable[Any]) -> tuple[float, ...]:
        """The loss of each micro-batch, without gradients."""
        self.require_open()
        runner = self._runner
        batches, _ = runner.prepare(micro_batches, (), None)
        return runner.losses(batches)

    @property
    def _runner(self) -> Any:
        # Made anew: the engine and its runner would be a cycle, which keeps their memory until Python
        # collects it.
        return self.executor.runner or SequentialRunner(self, self.comm, self._loss_of)

    # --- the step ---------------------------------------------------------------------------------------

    def step(
        self, error_if_nonfinite: bool = False, schedule_arguments: Mapping[str, Any] | None = None
    ) -> StepResult:
        """End a micro-batch, and update after the last one of a step.

        `schedule_arguments` are passed to the schedule. With `error_if_nonfinite`, a gradient that is not
        finite raises instead of skipping the step.
        """
        executor, progress, arguments = self.executor, self.progress, dict(schedule_arguments or {})
        before = progress.now()
        with executor.step():
            if not progress.begin_step(arguments):
                return before
            with torch.no_grad():
                norm = executor.norm()
                if self.before_update is not None:
                    self.before_update()
                bad = [] if norm.finite else executor.bad()
                if norm.finite:
                    with self._recovering(self.zero_grad):  # the update has changed the gradients
                        executor.update(norm.multiplier(progress.unscale, self.plan.policy.clip))
            self.zero_grad()
            return progress.end_step(before, norm, bad, arguments, error_if_nonfinite)

    def zero_grad(self) -> None:
        """Forget the gradients of this step."""
        self.executor.forget()
        self.comm.release()
        self.progress.micro_batches = 0

    # --- progress ---------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Optimizer steps taken, not counting skipped ones."""
        return self.progress.global_steps

    @property
    def skipped_steps(self) -> int:
        return self.progress.skipped_steps

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm of the last complete step, before clipping."""
        return self.progress.grad_norm

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the current step so far; 0 between steps."""
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
        """The learning-rate schedule, or None."""
        return self.progress.schedule

    # --- the model --------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model, or in a pipeline this rank's part of it."""
        return self.executor.module

    @property
    def whole(self) -> nn.Module:
        """The whole model; in a pipeline, without the values of other ranks."""
        return self.executor.whole

    @property
    def part(self) -> Plan:
        """The part of the plan that this rank executes: all of it, except in a pipeline."""
        return self.executor.part

    @property
    def updater(self) -> OptimizerState | None:
        """The state of the optimizer, by the plan's segments."""
        return self.executor.updater

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The torch optimizer with parameter groups and learning rates, for schedulers."""
        return None if self.updater is None else self.updater.groups

    def train(self, mode: bool = True) -> Engine:
        for module in dict.fromkeys((self.module, *self.executor.forwards)):
            module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    def explain(self, name: str) -> Explanation:
        """Every column of a parameter with its reason; printable."""
        return explain(self.plan, name)

    def update_statistics(self) -> UpdateReport:
        """Report the last update per parameter: shares lost to rounding, sizes, underflow. Needs
        `precision.statistics: true` in the config. Every rank calls it."""
        return self.executor.update_statistics()

    def digest(self) -> Digest:
        """Digest all weights, masters and moments. The digest is the same for the same bits, on any number of
        ranks and at any stage. Every rank calls it, between steps. It raises if copies on ranks differ."""
        return state_digest(self.plan, self.pieces(), self.comm)

    def gradient_digest(self) -> Digest:
        """Digest the gradients of a step, in `before_update`. Every rank calls it."""
        return gradient_digest(self.plan, self.executor.reduced(), self.comm)

    # --- values -----------------------------------------------------------------------------------------

    def parameter(self, name: str) -> ParameterHandle:
        """A handle on one parameter, to read and assign its whole value, master, gradient and moments."""
        return ParameterHandle(name, row_of(self.plan, name), self.values, self.progress, self.comm)

    def gathered(
        self, names: Iterable[str] | None = None, write: bool = False
    ) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """A context with the whole values of all or some parameters by name, in their compute dtype.

        A value that outlives the context does not change. With `write`, rank 0's values at the end of the
        context become those of all ranks, masters included. In a pipeline a rank has only its own parameters.
        """
        names = [names] if isinstance(names, str) else names
        known = [row.name for row in self.plan.rows] if names is None else names
        return self.values.gathered({name: row_of(self.plan, name) for name in known}, write)

    @property
    def values(self) -> WholeValues:
        """Read and write whole values, for `parameter` and `gathered`."""
        return self.executor.values

    def pieces(self) -> Iterator[SegmentShard]:
        """Yield this rank's piece of each segment, in the order of the plan; see `engine/shards.py`."""
        return self.executor.pieces()

    def sync_storage(self) -> None:
        """Gather other ranks' slices into whole storage, after pieces were filled. Every rank calls it."""
        self.executor.sync_storage()

    # --- the end ----------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("copied")

    def destroy(self) -> None:
        """Finish a running save, remove the hooks and leave the process groups.

        The module keeps its values, except those of sharded parameters, whose use is an error afterwards.
        Inside `gathered()` it keeps all values and becomes an ordinary module again. On backend fsdp2 torch's
        hooks stay, and the module cannot be run any more.
        """
        if self.progress.closed:
            return
        try:
            if self.progress.background is not None:
                if sys.exc_info()[0] is None:
                    self.progress.background.finish()
                else:
                    self.progress.background.abandon()
        finally:
            with contextlib.suppress(RankError):  # it was raised before
                self._recover()
            self.zero_grad()
            self.progress.close()
            self._release()
            self.executor.leave()
            self.mesh.stop()


def _describe(plan: Plan) -> list[str]:
    lines = [f"mesh {plan.mesh}, mode {plan.policy.mode}, stage {plan.policy.sharding.stage}"]
    lines += [f"{decision.key} = {decision.value}" for decision in plan.policy.decisions]
    for row in plan.rows:
        shown = row.columns.cells() | row.columns.options()
        cells = " ".join(f"{column}={text}" for column, text in shown.items())
        lines.append(f"{row.name} {list(row.shape)} {cells} segment {row.segment} at {row.offset}")
    for boundary in plan.boundaries:
        lines.append(f"{boundary.path} computes in {boundary.dtype}, returns {boundary.output}")
    return lines
