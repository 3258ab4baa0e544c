"""Run a step of a pipeline: micro-batches go through every rank's pieces by one of torch's schedules.

Each rank executes its part of the common plan (`plan/stages.py`). A schedule of torch calls the pieces
(`stage.py`). After it, the engine's own step reduces the remaining gradients, and decides on one norm, one
skip and one loss scale for all stages.

Invariant: all ranks of a pipeline are given the same micro-batches and return the same result. Problems with
micro-batches are found on all ranks before the first message; a later error on one rank ends all ranks.

[Note: descriptions] Ranks of a pipeline compare descriptions of their micro-batches: shapes, by which memory
for messages is laid out, and a checksum of all values. The first stage reads tokens and the last one labels,
so ranks with different data would train on pairs that do not belong together. Equal descriptions mean equal
results, except for objects that are neither containers, tensors, numbers nor text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zerodrift.comm import Alarm, Collectives
from zerodrift.engine import (
    NativeExecutor,
    ValueSources,
    WholeValues,
    batch_on,
    compute,
    numbers_of,
    tensors_in,
    wrong_number,
)
from zerodrift.errors import ModelError, Problem, UnsupportedError, ZerodriftError
from zerodrift.pipeline import schedules
from zerodrift.pipeline.cut import Cut
from zerodrift.pipeline.deferred import defer_in_piece
from zerodrift.pipeline.stage import Piece, PieceContext, RandomStreams, Stage
from zerodrift.pipeline.stage_units import StageUnits
from zerodrift.pipeline.values import StagedValues
from zerodrift.plan import Action, Plan, boundaries_of_piece, can_interleave, pieces_of, rank_of
from zerodrift.policy import queues

Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class BatchDescription:
    """The micro-batches of one rank; see [Note: descriptions]."""

    problem: Problem | None
    shapes: tuple[Signature, ...]
    """The signature that all micro-batches have; empty without a micro-batch."""
    weights: tuple[float, ...]
    checksums: tuple[int, ...]


@dataclass(slots=True)
class _LearnedShapes:
    """A schedule of torch, and the shapes that it has learnt."""

    shapes: tuple[Signature, ...]
    micro_batches: int
    schedule: Any
    draws: bool | None = None
    """Whether a forward of any stage draws random numbers; None before the first run."""


class PipelineExecutor(NativeExecutor):
    """Runs this rank's pieces of a model that is cut over the ranks of a pipeline."""

    def __init__(self, plan: Plan, tree: nn.Module, comm: Collectives, sources: ValueSources) -> None:
        """`tree` has the modules of this rank's pieces, which `cut_into` separates."""
        pipeline = plan.policy.pipeline
        assert pipeline is not None
        super().__init__(plan, tree, comm, None, sources)
        self.sum_over_ends = partial(self._units.sum_over_ends, comm)
        self._alarm = Alarm(comm.mesh)
        self._schedule = pipeline.schedule
        self._late = queues(pipeline)
        self._count = pipeline.chunks * plan.mesh.pipeline
        self._last = rank_of(pipeline, plan.mesh, self._count - 1)
        self._draws = RandomStreams(comm.mesh.device)
        self._cut: Cut
        self._pieces: tuple[Piece, ...] = ()
        self._schedules: dict[bool, _LearnedShapes] = {}
        """Schedules for training (True) and for forwards alone (False)."""
        self._begun = False
        self._weights: tuple[float, ...] = ()
        """Weights of the running micro-batches; empty where all count 1."""
        self.actions: list[Action] = []

    def _attach(self) -> list[Any]:
        """Attach no hooks: the schedule decides when units are gathered."""
        self._units: StageUnits = StageUnits(self.part, self.units, self.gradients)
        return []

    def cut_into(self, parts: Sequence[nn.Module], cut: Cut) -> None:
        """Run these pieces, in the order of the model, over the modules of the tree."""
        self._cut = cut
        tied = {
            row.name: parameter
            for segment in (self._trained if self.plan.policy.tree else [])
            for row, parameter in zip(segment.rows, segment.parameters, strict=True)
            if segment.spec.copies
        }
        shared = PieceContext(self._units, self.precision, self._draws, self.comm.mesh, tied)
        numbers = pieces_of(self.plan, self.comm.mesh.rank("pipeline"))
        self._pieces = tuple(
            Piece(number, self._count, part, cut, shared) for number, part in zip(numbers, parts, strict=True)
        )
        self.forwards = self._pieces
        for piece in self._pieces:
            self._handles += compute.attach(piece.module, boundaries_of_piece(self.plan, piece.number))
            if self._late:
                piece.queue = defer_in_piece(piece.module, self.gradients)
        self.gradients.is_scheduled = True

    # --- what differs from a rank that has the whole model ----------------------------------------------

    @property
    def runner(self) -> PipelineExecutor:
        return self

    def require_peers(self) -> None:
        self._alarm.check()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        with self._alarm.explain_failure(), super().step():
            yield

    @property
    def values(self) -> WholeValues:
        return StagedValues(self.plan, self.part, self.own_values, self.comm, self._units)

    def leave(self) -> None:
        for piece in self._pieces:
            if piece.queue is not None:
                piece.queue.clear()
                piece.queue.detach()
        self._schedules.clear()
        self._alarm.stop()
        super().leave()

    # --- all micro-batches of a step --------------------------------------------------------------------

    def prepare(
        self, micro_batches: Iterable[Any], weights: Sequence[float], count: int | None
    ) -> tuple[list[Any], tuple[float, ...]]:
        """Return the micro-batches as pieces take them. A problem is the same on every rank."""
        batches = list(micro_batches)
        training, mesh = count is not None, self.comm.mesh
        with self._alarm.explain_failure():
            mine = describe_batches(batches, tuple(weights), count, self._cut.problem)
            known = self._schedules.get(training)
            relearn = known is None or (known.shapes, known.micro_batches) != (mine.shapes, len(batches))
            descriptions = self.comm.all_gather_object((mine, relearn))
            problem = next((found.problem for found, _ in descriptions if found.problem), None)
            ranks, stages = len(descriptions), mesh.size("pipeline")
            for data in range(ranks // stages):
                line = range(data, ranks, ranks // stages)
                problem = problem or difference({rank: descriptions[rank][0] for rank in line})
            if problem is not None:
                raise ModelError.of([problem])
            if any(again for _, again in descriptions):
                self._schedules.pop(training, None)
            return [batch_on(batch, mesh.device, self.precision.of) for batch in batches], mine.weights

    def train(
        self, batches: list[Any], weights: tuple[float, ...], seeds: tuple[int, ...]
    ) -> tuple[float, ...]:
        self._weights = weights
        try:
            schedule = self._scheduled(batches, training=True)
            with self._alarm.raised("pipeline", "the schedule"), torch.enable_grad():
                self._run(schedule, batches, True, seeds)
                self._units.end()
                return self._losses_of_all(len(batches))
        except BaseException:
            self._schedules.pop(True, None)  # the next step must not find messages of this one
            raise

    def losses(self, batches: list[Any]) -> tuple[float, ...]:
        schedule = self._scheduled(batches, training=False)
        try:
            with self._alarm.raised("pipeline", "the schedule"), torch.no_grad():
                self._run(schedule, batches, False)
                return self._losses_of_all(len(batches))
        finally:
            self._units.release()

    def _run(self, schedule: Any, batches: list[Any], training: bool, seeds: tuple[int, ...] = ()) -> None:
        self._begun = False
        self.actions = []
        for piece in self._pieces:
            piece.batches, piece.failed = batches, None
            piece.losses.clear()
        if self._units.all_step or self._pieces[0].learning:
            self._units.gather()
        self._draws.begin(seeds)
        ended = self._scheduled_run(schedule, len(batches))
        for piece in self._pieces:
            piece.batches = []
        if ended is not None:
            raise ended
        if seeds:
            return
        # All stages advance their generators if any has drawn, so that their seeds stay alike.
        known = self._schedules[training]
        if known.draws is None:
            known.draws = any(self.comm.all_gather_object(self._draws.drew, "pipeline"))
        if known.draws:
            self._draws.advance()

    def _scheduled_run(self, schedule: Any, count: int) -> BaseException | None:
        """Run the schedule; return the exception that ended it. See [Note: whose error] of `stage.py`."""
        # A schedule passes numbers of micro-batches, which every rank has, instead of values.
        numbers = torch.arange(count)
        try:
            with schedules.quiet():
                schedule.step(number=numbers, target=numbers, return_outputs=False)
        except BaseException as error:
            own = next((piece.failed for piece in self._pieces if piece.failed is not None), None)
            causes = [own or error]
            while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
                causes.append(cause)
            if any("use_reentrant=True" in str(cause) for cause in causes):
                must = "must be called with `use_reentrant=False` in a pipeline, which splits backwards"
                do = "Change the call, or pass `{'use_reentrant': False}` to `gradient_checkpointing_enable`."
                refused = UnsupportedError("checkpoint", must, got="True", do=do)
                refused.__cause__ = own or error
                return refused
            if own is not None or isinstance(error, ZerodriftError) or not isinstance(error, RuntimeError):
                return own or error
            lost = self.comm.mesh.axis("pipeline").missing("message", error)
            lost.__cause__ = error
            return lost
        return None

    def _begin(self) -> None:
        """Begin a step before its first action: see [Note: learning shapes]."""
        if self._begun:
            return
        self._begun = True
        if self._pieces[0].learning:
            for piece in self._pieces:
                piece.end_learning()
            if not self._units.all_step:
                self._units.release()
        for piece in self._pieces:
            if piece.queue is not None:
                piece.queue.clear()
        if torch.is_grad_enabled():
            self._units.begin(len(self._pieces[0].batches))

    def _scaled(self, output: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        weight = self._weights[int(number)] if self._weights else 1.0
        return self._progress.scale(output if weight == 1.0 else output * weight)

    def _losses_of_all(self, count: int) -> tuple[float, ...]:
        losses = torch.zeros(count, dtype=torch.float64)
        for number, loss in self._pieces[-1].losses.items():
            losses[number] = loss.double()
        losses = losses.to(self.comm.mesh.device)
        self.comm.broadcast(losses, self._last, "pipeline")
        return tuple(losses.tolist())

    def _scheduled(self, batches: list[Any], training: bool) -> Any:
        """Return the schedule for micro-batches of these shapes; a new one has to learn the messages."""
        known = self._schedules.get(training)
        if known is not None:
            return known.schedule
        for piece in self._pieces:
            piece.before = {name: buffer.clone() for name, buffer in piece.module.named_buffers()}
        stages = [Stage(piece, self._begin, self._record) for piece in self._pieces]
        if training:
            schedule = schedules.training(self._schedule, stages, len(batches), self._scaled)
            if self._schedule == "dualpipev":
                schedules.run_pairs(schedule, self.turns.run, partial(can_interleave, self.plan))
        else:
            schedule = schedules.forwards(self._schedule, stages, len(batches))
        self._schedules[training] = _LearnedShapes((signature(batches[0]),), len(batches), schedule)
        return schedule

    def _record(self, kind: str, piece: int, micro_batch: int) -> None:
        self._alarm.check()
        self.actions.append(Action(kind, piece, micro_batch))


# --- descriptions of micro-batches; see [Note: descriptions] ---------------------------------------------


def signature(batch: Any) -> Signature:
    return tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors_in(batch))


def describe_batches(
    batches: Sequence[Any],
    weights: Sequence[Any],
    wanted: int | None,
    problem_of: Callable[[Any], Problem | None],
) -> BatchDescription:
    """Describe the micro-batches. A step has `wanted` of them (None: any number); `problem_of` returns why no
    piece can run one."""
    shapes = [signature(batch) for batch in batches]
    numbers, wrong = numbers_of(weights, len(batches))
    problem = wrong_number(len(batches), wanted) or _unlike(shapes)
    problem = problem or next(filter(None, map(problem_of, batches)), None) or wrong
    return BatchDescription(problem, tuple(shapes[:1]), numbers, tuple(map(checksum, batches)))


def _unlike(signatures: list[Signature]) -> Problem | None:
    other = next((number for number, signature in enumerate(signatures) if signature != signatures[0]), None)
    if other is None:
        return None
    must = "must have the same shapes, because memory for messages is laid out once"
    got = f"{signatures[0]} and, in micro-batch {other}, {signatures[other]}"
    return Problem("micro_batches", must, got=got, do="Pad them to one length.")


def difference(given_by_rank: Mapping[int, BatchDescription]) -> Problem | None:
    """Return the first difference between the micro-batches of ranks, given by world rank."""
    (first, mine), *others = given_by_rank.items()
    for rank, other in others:
        where, pair = "micro_batches", ("", "")
        if len(mine.checksums) != len(other.checksums):
            pair = str(len(mine.checksums)), str(len(other.checksums))
        elif mine.shapes != other.shapes:
            pair = f"shapes {mine.shapes[0]}", str(other.shapes[0])
        elif mine.weights != other.weights:
            where, pair = "weights", (str(list(mine.weights)), str(list(other.weights)))
        elif mine.checksums != other.checksums:
            pairs = enumerate(zip(mine.checksums, other.checksums, strict=True))
            number = next(number for number, (one, two) in pairs if one != two)
            pair = f"one micro-batch {number}", "one with different contents"
        if any(pair):
            got = f"{pair[0]} on rank {first}, {pair[1]} on rank {rank}"
            do = "Give the data of one data rank to all of its stages."
            return Problem(where, "must be the same on every stage of a pipeline", got=got, do=do)
    return None


def checksum(batch: Any) -> int:
    """Return a checksum of all values and their paths, whatever the order of keys."""
    total = 0
    for path, leaf in _leaves(batch, ""):
        if isinstance(leaf, torch.Tensor):
            total = zlib.crc32(f"{path} {tuple(leaf.shape)} {leaf.dtype}".encode(), total)
            whole = leaf.detach().to_dense() if leaf.layout is not torch.strided else leaf.detach()
            flat = whole.cpu().contiguous().reshape(-1)
            total = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", total)
        else:
            known = isinstance(leaf, str | bytes | bool | int | float | complex | None)
            shown = repr(leaf) if known else type(leaf).__qualname__
            total = zlib.crc32(f"{path} {shown}".encode(), total)
    return total


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value
