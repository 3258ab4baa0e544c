"""Compare a trainer with a sampler: measure their drift, and attribute it to their differences.

Three questions in order: Is every tensor what was trained? In which cells do the sides differ? How much of
the drift does each cell cause alone, and how much is gone without it? Replays of the trainer's model answer
the last question. Nothing is estimated.

Invariant: the drift of equal sides is exactly 0.0. The sampler is run from its own tensors and dtypes, not
from the list of differences. A token without a finite log-probability is counted, never averaged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ConfigError, ModelError, NonFiniteError
from zerodrift.inspect import audit
from zerodrift.inspect.drift import replay
from zerodrift.inspect.drift.replay import DifferentCell
from zerodrift.inspect.drift.sampler import ACTIVATIONS, ROLES, SamplerDtypes, parse_sampler_dtypes
from zerodrift.inspect.drift.tensor_status import TensorStatus, distance, follow_tensors
from zerodrift.inspect.drift.trainer import TrainerSide

CLIPPED = 0.2  # distance of a probability ratio from 1 that PPO clips
TOKENS = 4096  # tokens of one forward


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """Statistics over tokens of the sampler's log-probabilities minus the trainer's."""

    tokens: int
    not_finite: int  # tokens without a finite log-probability of the sampler, left out of all other numbers
    mean: float
    mean_abs: float
    rms: float
    k3: float
    median: float  # median of absolute differences
    p99: float
    largest: float
    clipped: float  # share of tokens whose probability ratio is not within 0.2 of 1

    @property
    def square(self) -> float:
        return self.rms**2


def token_drift(other: Tensor, trainer: Tensor) -> TokenDrift:
    """Measure log-probabilities. Shape [tokens], fp64."""
    gaps = (other - trainer)[other.isfinite()]
    far, count = gaps.abs().sort().values, len(gaps)
    if not count:
        gaps = far = torch.full((1,), math.nan)
    return TokenDrift(
        **audit.measure_gaps(gaps),
        tokens=len(other),
        not_finite=len(other) - count,
        mean_abs=float(far.mean()),
        median=float(far[max(0, count - 1) // 2]),
        p99=float(far[max(0, math.ceil(0.99 * count) - 1)]),
        clipped=float((gaps.expm1().abs() > CLIPPED).double().mean()) if count else math.nan,
    )


def share(part: TokenDrift, whole: TokenDrift) -> float:
    """Return a share of the tokens that are not finite if there are any, or else of the squared drift."""
    if whole.not_finite:
        return part.not_finite / whole.not_finite
    if part.not_finite:
        return math.inf
    return part.square / whole.square if whole.square else 0.0


def make_batches(sequences: audit.Ids) -> tuple[list[audit.Batch], list[list[int]]]:
    """Make micro-batches of sequences of one length. Return also the numbers of their sequences."""
    groups: dict[int, list[int]] = {}
    for number, sequence in enumerate(sequences):
        groups.setdefault(len(sequence), []).append(number)
    batches: list[audit.Batch] = []
    order = []
    for length, numbers in groups.items():
        at_once = max(1, TOKENS // length)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            ids = torch.tensor([sequences[number] for number in part])
            batches.append({"input_ids": ids, "labels": ids})
            order.append(part)
    return batches, order


def recorded_values(recorded: audit.Recorded, order: Sequence[Sequence[int]]) -> Tensor:
    """Return recorded values of all tokens in the order of the micro-batches. Unrecorded ones are NaN."""
    values = (value for part in order for number in part for value in recorded[number])
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def require_tokens(own: audit.Signals, sequences: audit.Ids, order: Sequence[Sequence[int]]) -> None:
    """Require a finite log-probability for every token except the first of a sequence."""
    for part, targets in zip(order, own.targets, strict=True):
        wanted = sum(len(sequences[number]) - 1 for number in part)
        if len(targets) != wanted:
            must = "must take its loss from `cross_entropy` over the next tokens of `labels`"
            got = f"{len(targets):,} targets for {wanted:,} tokens that have one before them"
            do = "Shift labels inside of the model, as models of `transformers` do."
            raise ModelError("model", must, got=got, do=do)
        bad = (~targets.isfinite()).nonzero().flatten().tolist()
        if bad:
            sequence = part[bad[0] // (len(sequences[part[0]]) - 1)]
            must = "must have finite log-probabilities on the trainer's side"
            do = "Check the trainer's mode: its values are beyond the range of its compute dtype."
            raise NonFiniteError(f"tokens[{sequence}]", must, got=f"{len(bad):,} inf or nan", do=do)


BAR = 0.015  # mean absolute difference of log-probabilities that passes by default
EXPLAINED = 0.1  # unexplained share of the squared drift above which dtypes are guessed
MOST = 48  # most cells that are replayed: first dtypes, then tensors with the largest changes


@dataclass(frozen=True, slots=True)
class SamplerSide:
    """Known facts about the sampler, at least one."""

    sent: Path | None = None  # folder that the trainer wrote for the sampler
    loaded: Path | None = None  # tensors that the sampler loaded, by default those of `sent`
    sampler: SamplerDtypes | None = None
    recorded: audit.Recorded | None = None  # log-probabilities of the sampler


@dataclass(frozen=True, slots=True)
class ExplainedCell:
    cell: DifferentCell
    alone: TokenDrift | None = None
    """Drift of the trainer with this cell of the sampler, or None if it was not replayed."""
    explains: float = 0.0  # share of the squared drift that this cell causes alone
    removes: float = 0.0  # share that is gone if the sampler has the trainer's cell
    flips: int = 0  # routing choices that differ with this cell alone


@dataclass(frozen=True, slots=True)
class DtypeGuess:
    """A guessed dtype of the sampler, and the share of the recorded drift that it explains."""

    key: str
    dtype: DType
    explains: float


@dataclass(frozen=True, slots=True)
class SideComparison:
    whole: TokenDrift  # drift of the sampler from the trainer
    faults: tuple[TensorStatus, ...]  # tensors that are not what was trained, by what they explain
    as_trained: tuple[TensorStatus, ...]
    cells: tuple[ExplainedCell, ...]  # faults first, then by what they explain
    unexplained: float
    """Share of the squared drift that remains with all cells, or 0 if nothing was recorded."""
    router_flips: tuple[tuple[str, int], ...]
    choices: int  # routing choices
    flipped_share: float  # share of the squared drift on tokens with a flipped choice
    tried: tuple[DtypeGuess, ...]
    """Guesses, the best first. Only if log-probabilities were recorded and no dtypes were given."""
    kinds: tuple[tuple[str, int], ...]  # (`same`, `rounded to bf16`, ...; tensors)
    bar: float
    notes: tuple[str, ...]

    @property
    def within(self) -> bool:
        return not self.whole.not_finite and self.whole.mean_abs <= self.bar and not self.faults


def compare_sides(
    trainer: TrainerSide, other: SamplerSide, sequences: audit.Ids, bar: float = BAR
) -> SideComparison:
    if other == SamplerSide():
        do = "Give the folder it loads, its table of dtypes, or the log-probabilities it recorded."
        got = "neither tensors, nor dtypes, nor log-probabilities"
        raise ConfigError("the other side", "must be given", got=got, do=do)
    if trainer.vocabulary:
        audit.require_vocabulary(sequences, trainer.vocabulary)
    batches, order = make_batches(sequences)
    table = other.sampler or SamplerDtypes()
    compute = replay.sampler_compute(table, trainer.plan, trainer.roles)
    statuses, held, kinds, notes = follow_tensors(trainer, other.sent, other.loaded)
    trained = trainer.tensors()
    verdicts = {status.name: status.verdict for status in statuses}
    values = replay.different_values(trainer, trained, held, verdicts)
    cells = [*values, *_table_cells(trainer, table, compute)]
    valued = {name for cell in values for name in cell.names}
    replays = replay.SideReplays(trainer, table, held, compute, batches, valued)
    own = replays.run(())
    require_tokens(own, sequences, order)
    cells += _activation_cells(replays, cells)
    sampler = replays.run_sampler(cells)
    given = torch.cat(sampler.targets)
    is_compared: slice | Tensor = slice(None)
    if other.recorded is not None:
        given = recorded_values(other.recorded, order)
        is_compared = ~given.isnan()

    def compared(run: audit.Signals) -> Tensor:
        return torch.cat(run.targets)[is_compared]

    mine, theirs = compared(own), given[is_compared]
    whole, replayable = token_drift(theirs, mine), token_drift(compared(sampler), mine)

    def size_of(cell: DifferentCell) -> float:
        if cell.kind != "tensor":
            return float("inf")
        return distance(held[cell.key].values.float().nan_to_num(), trained[cell.key].float())

    replayed = sorted(cells, key=size_of, reverse=True)[:MOST]
    if len(cells) > MOST:
        notes.append(f"{len(cells) - MOST:,} more cells differ and were not replayed one by one.")

    def left(run: audit.Signals) -> float:
        """Return the share of the squared drift that a replay does not explain."""
        return share(token_drift(theirs, compared(run)), whole) if whole.square else 0.0

    def explain(cell: DifferentCell) -> ExplainedCell:
        alone = replays.run([cell])
        drift = token_drift(compared(alone), mine)
        explains = 1 - left(alone) if whole.square else 0.0
        if whole.not_finite:
            explains = share(drift, whole)
        rest = compared(replays.run([each for each in cells if each != cell]))
        removes = share(replayable, whole) - share(token_drift(rest, mine), whole)
        flips = sum(count for count, _ in audit.router_flips(alone, own).values())
        return ExplainedCell(cell, drift, explains, removes, flips)

    explained = [explain(cell) for cell in cells if cell in replayed]
    explained += [ExplainedCell(cell) for cell in cells if cell not in replayed]
    explained.sort(key=lambda each: (each.cell.kind != "tensor", -max(each.explains, each.removes)))
    rank = {each.cell.key: number for number, each in enumerate(explained) if each.cell.kind == "tensor"}
    faults = [status for status in statuses if not status.verdict.is_as_trained]
    faults.sort(key=lambda status: rank.get(status.name, -1))
    unexplained = left(sampler) if other.recorded is not None else 0.0
    asks = unexplained > EXPLAINED and other.sampler is None
    guesses = _guesses(replays, values) if asks else ()
    tried = [DtypeGuess(key, dtype, 1 - left(run)) for key, dtype, run in guesses]
    tried = [guess for guess in tried if guess.explains > EXPLAINED]
    squares = (theirs - mine).square().nan_to_num(posinf=0.0)
    flipped = float(squares[_flipped_tokens(sampler, own, batches)[is_compared]].sum())
    flips = ((name, count) for name, (count, _) in audit.router_flips(sampler, own).items() if count)
    return SideComparison(
        whole=whole,
        faults=tuple(faults),
        as_trained=tuple(status for status in statuses if status.verdict.is_as_trained),
        cells=tuple(explained),
        unexplained=unexplained,
        router_flips=tuple(sorted(flips, key=lambda pair: -pair[1])),
        flipped_share=flipped / float(squares.sum()) if squares.any() else 0.0,
        choices=sum(chosen.shape[0] for routes in own.routes for chosen in routes.values()),
        tried=tuple(sorted(tried, key=lambda guess: -guess.explains)),
        kinds=kinds,
        bar=bar,
        notes=tuple(notes),
    )


def _table_cells(
    trainer: TrainerSide, table: SamplerDtypes, compute: dict[str, DType]
) -> list[DifferentCell]:
    cells = replay.different_dtypes(table, trainer.plan, trainer.roles, compute)
    if (rounded := table.keys.get("buffers")) is not None:
        floating = {n: b for n, b in trainer.module.named_buffers() if b.is_floating_point()}
        if not floating:
            raise ConfigError("buffers", "must be of the model", got="a model without floating-point buffers")
        dtype = rounded.torch
        changed = tuple(n for n, b in floating.items() if not torch.equal(b.to(dtype).to(b.dtype), b))
        told = f"rounded to {rounded}"
        cells += [DifferentCell("buffers", "buffers", told, changed)] if changed else []
    return cells


def _activation_cells(replays: replay.SideReplays, cells: Sequence[DifferentCell]) -> list[DifferentCell]:
    """Return the activations that a side computes in another dtype than the table says."""
    found = []
    asked = replays.table.keys
    for key, dtype in ((key, asked[key]) for key in ACTIVATIONS if key in asked):
        seen = {*replays.seen(()).seen.get(key, ()), *replays.seen(cells).seen.get(key, ())}
        if not seen:
            must, got = "must be a difference that the model's run shows", "its forward"
            do = "Leave the key out; docs/drift.md says where each is looked for."
            raise ConfigError(f"sampler.{key}", must, got=f"nothing of that kind in {got}", do=do)
        known = {from_torch(each) for each in seen}
        same = all(each is not None and dtype.holds(each) for each in known)
        if not (seen == {dtype.torch} if key in ("softmax", "logprobs") else same):
            here = " and ".join(sorted(str(each) for each in known if each is not None))
            found.append(DifferentCell("activation", key, f"{here}, there {dtype}"))
    return found


GUESSES: tuple[tuple[str, tuple[DType, ...]], ...] = (
    *((role, (DType.FP32, DType.BF16, DType.FP16)) for role in ("compute", *ROLES)),
    ("kv", (DType.FP8_E4M3, DType.FP8_E5M2, DType.BF16, DType.FP16)),
    *((key, (DType.BF16, DType.FP16)) for key in ("softmax", "rotary", "logits", "logprobs", "buffers")),
)
"""Dtypes in which samplers usually differ from trainers."""


def _guesses(
    given: replay.SideReplays, values: Sequence[DifferentCell]
) -> Iterator[tuple[str, DType, audit.Signals]]:
    """Replay each guess in addition to the given facts. Skip those that do not fit the model."""
    trainer = given.trainer
    for key, dtype in ((key, dtype) for key, dtypes in GUESSES for dtype in dtypes):
        table = parse_sampler_dtypes({key: str(dtype)})
        try:
            compute = replay.sampler_compute(table, trainer.plan, trainer.roles)
            cells = _table_cells(trainer, table, compute)
            replays = replace(given, table=table, compute=compute, done={})
            cells += _activation_cells(replays, values)
        except audit.REFUSED:
            continue
        if cells:
            yield key, dtype, replays.run_sampler([*values, *cells])


def _flipped_tokens(run: audit.Signals, other: audit.Signals, batches: Sequence[audit.Batch]) -> Tensor:
    """Mark the tokens with a different routing choice, in the order of log-probabilities."""
    flipped = [torch.zeros(batch["input_ids"].shape, dtype=torch.bool) for batch in batches]
    for number, _, changed in audit.changed_routes(run, other):
        if changed.numel() == flipped[number].numel():
            flipped[number] |= changed.view_as(flipped[number])
    return torch.cat([tokens[:, :-1].reshape(-1) for tokens in flipped])
