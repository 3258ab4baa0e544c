"""The engine of a pipeline: a step over micro-batches, run by one of torch's schedules on every rank's
pieces.

Each rank has an `Engine` over its own pieces, whose plan is its part of the plan of all (`plan/stages.py`).
A schedule of torch calls the pieces (`stage.py`); when it is through, the engine's own step reduces what is
left, forms one norm, one decision to skip and one loss scale over all stages, and updates.

Invariant: every rank of a pipeline is given the same micro-batches, and returns the same result; whatever is
wrong with them is found on all ranks before the first message; and what raises on one rank after it, ends all
of them (`comm/alarm.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zerodrift.comm.alarm import Alarm
from zerodrift.comm.collectives import Collectives
from zerodrift.comm.mesh import Mesh
from zerodrift.comm.pairs import missing
from zerodrift.engine import compute
from zerodrift.engine.engine import Engine
from zerodrift.engine.progress import StepResult
from zerodrift.errors import ModelError, UnsupportedError, ZerodriftError
from zerodrift.pipeline import schedules
from zerodrift.pipeline.batches import Signature, batch_on, difference, given, signature
from zerodrift.pipeline.cut import Cut
from zerodrift.pipeline.deferred import defer_in_piece
from zerodrift.pipeline.stage import Draws, Piece, Stage
from zerodrift.plan.boundaries import of_piece
from zerodrift.plan.stages import pieces_of, rank_of, shared_with_another
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Action
from zerodrift.policy.pipelining import SPLIT
from zerodrift.report.explain import Explanation, explain


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a step of a pipeline did."""

    losses: tuple[float, ...]
    """Of each micro-batch, without its weight and the loss scale; those of this rank's data."""
    step: StepResult
    """The same on every stage."""
    weights: tuple[float, ...] = ()
    """By which each loss was multiplied; empty where all count 1."""

    @property
    def loss(self) -> float:
        """The mean over micro-batches, each with its weight: what the gradients are of."""
        weights = self.weights or (1.0,) * len(self.losses)
        return sum(map(operator.mul, weights, self.losses)) / len(self.losses)


@dataclass(frozen=True, slots=True)
class _Learnt:
    """A schedule of torch, and what it has learnt the shapes of."""

    shapes: tuple[Signature, ...]
    micro_batches: int
    schedule: Any
    draws: bool | None = None
    """Whether a forward of any stage draws random numbers; None before its first run."""


class PipelineEngine:
    """Trains a model that is cut over the ranks of a pipeline. Made by `zerodrift.initialize_pipeline`."""

    def __init__(self, plan: Plan, engine: Engine, parts: Sequence[nn.Module], cut: Cut) -> None:
        """`parts` are the pieces of this rank, in the order of the model, over the modules of `engine`."""
        pipeline = plan.policy.pipeline
        if pipeline is None or engine.scheduled is None:
            raise AssertionError("a plan without a pipeline")
        self.plan = plan
        self.stage = engine
        """This rank's own engine; what checkpoints take."""
        self.comm: Collectives = engine.comm
        self.mesh: Mesh = engine.mesh
        self._units = engine.scheduled
        self._alarm = Alarm(engine.mesh)
        self._schedule = pipeline.schedule
        count = pipeline.chunks * plan.mesh.pipeline
        self._cut = cut
        self._draws = Draws(engine.mesh.device)
        numbers = pieces_of(plan, engine.mesh.rank("pipeline"))
        self.pieces = [
            Piece(number, count, part, cut, engine, self._draws)
            for number, part in zip(numbers, parts, strict=True)
        ]
        engine.scheduled.forwards = tuple(self.pieces)
        self._handles: list[Any] = []
        for piece in self.pieces:
            self._handles += compute.attach(piece.module, of_piece(plan, piece.number))
            if pipeline.schedule in SPLIT and pipeline.weight_grads == "queue":
                piece.queue = defer_in_piece(piece.module, engine.gradients)
        engine.gradients.count()
        self._last = rank_of(pipeline, plan.mesh, count - 1)
        self._learnt: dict[bool, _Learnt] = {}
        """By whether it trains."""
        self._waiting = 0
        """Micro-batches that have been accumulated and not updated with."""
        self._begun = False
        self._weights: tuple[float, ...] = ()
        """Of the micro-batches under way; empty where all count 1."""
        self._before: list[dict[str, torch.Tensor]] = []
        """Buffers of each piece: see [Note: learning shapes] of `stage.py`."""
        self.actions: list[Action] = []
        """What this rank has done in the last step, in order."""

    # --- a step -----------------------------------------------------------------------------------------

    def step(self, micro_batches: Iterable[Any], weights: Sequence[float] = ()) -> BatchResult:
        """Train on the micro-batches of one step, of which every rank of a pipeline is given the same, and
        update. As many as `pipeline.micro_batches` says; with `weights`, the loss of each is multiplied by
        its own before its backward."""
        losses = self.accumulate(micro_batches, weights)
        return BatchResult(losses, self.update(), self._weights)

    def accumulate(self, micro_batches: Iterable[Any], weights: Sequence[float] = ()) -> tuple[float, ...]:
        """The first half of `step`: the gradients of a step's micro-batches, and their losses."""
        engine = self.stage
        engine.require_open()
        if self._waiting:
            raise UnsupportedError(
                "accumulate",
                "must be followed by `update`, which ends its step, or `zero_grad`",
                got="another",
                do="A pipeline's step has all of its micro-batches together.",
            )
        with self._alarm.explain_failure():
            batches = self._taken(micro_batches, True, weights)
        schedule = self._scheduled(batches, training=True)
        try:
            with self._alarm.raised("pipeline", "the schedule"), torch.enable_grad():
                self._run(schedule, batches, True)
                self._units.end()
                losses = self._told(len(batches))
        except BaseException:
            self._learnt.pop(True, None)  # what torch had under way is not to be found by the next step
            engine.abandon_step()
            raise
        self._waiting = len(batches)
        return losses

    def update(self) -> StepResult:
        """The second half: one norm and one decision over all stages, and the update."""
        count, self._waiting = self._waiting, 0
        with self._alarm.explain_failure():
            return self.stage.end_step(count)

    def zero_grad(self) -> None:
        """Drop what has been accumulated: the step starts anew."""
        if self._waiting:
            self._waiting = 0
            self.stage.abandon_step()

    def evaluate(self, micro_batches: Iterable[Any]) -> float:
        """The mean loss of micro-batches, without gradients; the same on every rank of a pipeline."""
        losses = self.losses(micro_batches)
        return sum(losses) / len(losses)

    def losses(self, micro_batches: Iterable[Any]) -> tuple[float, ...]:
        """The loss of each micro-batch, without gradients."""
        self.stage.require_open()
        with self._alarm.explain_failure():
            batches = self._taken(micro_batches, False, ())
        schedule = self._scheduled(batches, training=False)
        try:
            with self._alarm.raised("pipeline", "the schedule"), torch.no_grad():
                self._run(schedule, batches, False)
                losses = self._told(len(batches))
        finally:
            self._units.release()
        return losses

    def _run(self, schedule: Any, batches: list[Any], training: bool) -> None:
        self._begun = False
        self.actions = []
        for piece in self.pieces:
            piece.batches, piece.failed = batches, None
            piece.losses.clear()
        if self.pieces[0].learning:
            self._before = [piece.buffers_now() for piece in self.pieces]
        if self._units.all_step or self.pieces[0].learning:
            self._units.gather()
        self._draws.begin()
        ended = self._scheduled_run(schedule, len(batches))
        for piece in self.pieces:
            piece.batches = []
        if ended is not None:
            raise ended
        self._end_of_draws(training)

    def _scheduled_run(self, schedule: Any, count: int) -> BaseException | None:
        """Runs it; what ended it, if anything did: see [Note: whose error] of `stage.py`."""
        # Numbers alone: what they mean, every rank has. The target is what a schedule hands to the loss.
        numbers = torch.arange(count)
        try:
            with schedules.quiet():
                schedule.step(number=numbers, target=numbers, return_outputs=False)
        except BaseException as error:
            own = next((piece.failed for piece in self.pieces if piece.failed is not None), None)
            if _is_reentrant(own or error):
                refused = UnsupportedError(
                    "checkpoint",
                    "must be called with `use_reentrant=False` in a pipeline, whose backwards "
                    "ask for gradients of inputs by themselves",
                    got="True",
                    do=(
                        "Change the call, or pass `{'use_reentrant': False}` to "
                        "`gradient_checkpointing_enable`."
                    ),
                )
                refused.__cause__ = own or error
                return refused
            if own is not None or isinstance(error, ZerodriftError) or not isinstance(error, RuntimeError):
                return own or error
            lost = missing("message", self.mesh.axis("pipeline"), error)
            lost.__cause__ = error
            return lost
        return None

    def _end_of_draws(self, training: bool) -> None:
        """The generator of every stage goes on if any stage has drawn, so that seeds stay alike."""
        known = self._learnt[training]
        if known.draws is None:
            draws = any(self.comm.all_gather_object(self._draws.drew, "pipeline"))
            known = self._learnt[training] = replace(known, draws=draws)
        if known.draws:
            self._draws.advance()

    def _begin(self) -> None:
        """Before the first action of a step: see [Note: learning shapes]."""
        if self._begun:
            return
        self._begun = True
        if self.pieces[0].learning:
            for piece in self.pieces:
                piece.learning = False
            for piece, saved in zip(self.pieces, self._before, strict=True):
                piece.put_buffers(saved)
            self._before = []
            if not self._units.all_step:
                self._units.release()
        for piece in self.pieces:
            if piece.queue is not None:
                piece.queue.clear()
        if torch.is_grad_enabled():
            self._units.begin(len(self.pieces[0].batches))

    def _scaled(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        weight = self._weights[int(number)] if self._weights else 1.0
        return self.stage.scale(output if weight == 1.0 else output * weight)

    def _told(self, count: int) -> tuple[float, ...]:
        """The losses, from the last stage to all."""
        told = torch.zeros(count, dtype=torch.float64)
        for number, loss in self.pieces[-1].losses.items():
            told[number] = loss.double()
        told = told.to(self.mesh.device)
        self.comm.broadcast(told, self._last, "pipeline")
        return tuple(told.tolist())

    # --- micro-batches and schedules --------------------------------------------------------------------

    def _taken(self, micro_batches: Iterable[Any], training: bool, weights: Sequence[float]) -> list[Any]:
        """The micro-batches as pieces take them; the same problem on every rank, if there is one."""
        batches = list(micro_batches)
        wanted = self.stage.accumulation if training else None
        mine = given(batches, tuple(weights), wanted, self._cut.problem)
        known = self._learnt.get(training)
        relearn = known is None or (known.shapes, known.micro_batches) != (mine.shapes, len(batches))
        told = self.comm.all_gather_object((mine, relearn))
        problem = next((each.problem for each, _ in told if each.problem), None)
        ranks, stages = len(told), self.mesh.size("pipeline")
        for data in range(ranks // stages):
            line = range(data, ranks, ranks // stages)
            problem = problem or difference({rank: told[rank][0] for rank in line})
        if problem is not None:
            raise ModelError.of([problem])
        if any(again for _, again in told):
            self._learnt.pop(training, None)
        if training:
            self._weights = mine.weights
        device = self.mesh.device
        return [batch_on(batch, device, self.stage.precision.of) for batch in batches]

    def _scheduled(self, batches: list[Any], training: bool) -> Any:
        """The schedule for micro-batches of these shapes; a new one has to learn what travels."""
        known = self._learnt.get(training)
        if known is not None:
            return known.schedule
        for piece in self.pieces:
            piece.learning = True
        stages = [Stage(piece, self._begin, self._record) for piece in self.pieces]
        if training:
            made = schedules.training(self._schedule, stages, len(batches), self._scaled)
        else:
            made = schedules.forwards(self._schedule, stages, len(batches))
        self._learnt[training] = _Learnt((signature(batches[0]),), len(batches), made)
        return made

    def _record(self, kind: str, piece: int, micro_batch: int) -> None:
        self._alarm.check()
        self.actions.append(Action(kind, piece, micro_batch))

    # --- the rest of an engine --------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """This stage's parameter groups."""
        return self.stage.optimizer

    @property
    def global_steps(self) -> int:
        return self.stage.global_steps

    def train(self, mode: bool = True) -> PipelineEngine:
        self.stage.train(mode)
        for piece in self.pieces:
            piece.train(mode)
        return self

    def eval(self) -> PipelineEngine:
        return self.train(False)

    def explain(self, name: str) -> Explanation:
        """Every column of a parameter, with its reason."""
        return explain(self.plan, name)

    def full_master(self, name: str) -> torch.Tensor:
        """What the optimizer updates, in fp32, on every rank, wherever the parameter is."""
        return self._from_owner(name, self.stage.full_master)

    def full_gradient(self, name: str) -> torch.Tensor:
        """The gradient accumulated so far in this step, averaged and unscaled, in fp32; between `accumulate`
        and `update`. One that is tied across the pipeline is the sum of both ends."""
        row = self.plan.row(name)
        segment = None if row is None else self.plan.segments[row.segment]
        whole = self._from_owner(name, self.stage.full_gradient)
        if row is not None and segment is not None and shared_with_another(self.plan, segment):
            here = self.mesh.rank("pipeline") == self._last
            known = next((name for name in row.names if self.stage.part.row(name) is not None), "")
            other = self.stage.full_gradient(known) if here else torch.empty_like(whole)
            self.comm.broadcast(other, self._last, "pipeline")
            whole = whole + other
        return whole

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's moments, by torch's names for them, in fp32."""
        rank, known = self._home(name)
        mine = self.stage.full_state(known) if known else {}
        keys = self.comm.broadcast_object(list(mine), rank, "pipeline")
        return {key: self._from_owner(name, partial(_of, mine, key)) for key in keys}

    def _home(self, name: str) -> tuple[int, str]:
        """The pipeline rank whose copy of a parameter counts, and its name on this rank, `""` elsewhere."""
        row = self.plan.row(name)
        if row is None:
            raise ModelError(name, "must be a parameter of the model", got="no such name")
        pipeline = self.plan.policy.pipeline
        rank = rank_of(pipeline, self.plan.mesh, self.plan.units[row.unit].stage)
        return rank, row.name if rank == self.mesh.rank("pipeline") else ""

    def _from_owner(
        self, name: str, read: Callable[[str], torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """What `read` finds, by the name there, on the ranks that hold a parameter; on all ranks."""
        rank, known = self._home(name)
        row = self.plan.row(name)
        shape = () if row is None else row.whole_shape
        value = read(known) if known else torch.empty(shape, dtype=dtype, device=self.mesh.device)
        value = value.contiguous()
        self.comm.broadcast(value, rank, "pipeline")
        return value

    def destroy(self) -> None:
        """Take the hooks off and leave the process groups."""
        for piece in self.pieces:
            if piece.queue is not None:
                piece.queue.clear()
                piece.queue.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stage.gradients.expect(None)
        self._learnt.clear()
        self._alarm.stop()
        self.stage.destroy()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            "call",
            "must not be used on a pipeline, whose stages run together",
            do="Call `step` with the micro-batches of a step, or `evaluate`.",
        )


def _of(state: dict[str, torch.Tensor], key: str, known: str) -> torch.Tensor:
    return state[key]


def _is_reentrant(error: BaseException | None) -> bool:
    """Whether it began with activation checkpointing of the kind that runs a backward inside of another."""
    while error is not None:
        if "use_reentrant=True" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
