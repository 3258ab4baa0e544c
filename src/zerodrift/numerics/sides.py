"""A trainer and a sampler: how far apart, and which difference between them it is.

Three questions in order. Is every tensor what was trained? In which cells do the sides differ? What does each
of them explain, alone and when it alone is made like the trainer's? The answers to the third are replays of
the trainer's model; nothing is estimated.

Invariant: sides that do not differ are exactly 0.0 apart, and the other side is run from its own tensors and
dtypes, not from the list of what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ConfigError
from zerodrift.numerics.apart import TokensApart, apart, share
from zerodrift.numerics.compared import ComparedTokens, FarToken, batched, require_tokens
from zerodrift.numerics.fates import TensorFate, fates_of, trained_tensors
from zerodrift.numerics.replayed import Replays
from zerodrift.numerics.roles import ROLES
from zerodrift.numerics.runs import REFUSED
from zerodrift.numerics.sampler import SamplerDtypes, sampler
from zerodrift.numerics.sent import SentTensor
from zerodrift.numerics.signals import Signals, flips_of
from zerodrift.numerics.tensors import distance
from zerodrift.numerics.token_files import Ids, Recorded, require_vocabulary
from zerodrift.numerics.trainer import Trainer
from zerodrift.numerics.unlike import UnlikeCell, sampler_dtypes, unlike_dtypes, unlike_values

BAR = 0.015
"""Mean absolute difference of log-probabilities that is let pass where nobody says."""

EXPLAINED = 0.1
"""Share of the squared difference above which what is left is looked for among dtypes that nobody gave."""

MOST = 48
"""Cells that are replayed: those of tensors with the largest changes, and every dtype."""


@dataclass(frozen=True, slots=True)
class OtherSide:
    """What is given of the sampler; each part may be left out, but not all of them."""

    sent: Path | None = None
    """The folder that the trainer wrote for it."""
    loaded: Path | None = None
    """The tensors that it has loaded, as a folder; where there is none, what was sent is what it has."""
    sampler: SamplerDtypes | None = None
    recorded: Recorded | None = None
    """Log-probabilities that it gave."""

    @property
    def is_empty(self) -> bool:
        return self.sent is self.loaded is self.sampler is self.recorded is None


@dataclass(frozen=True, slots=True)
class ExplainedCell:
    """A cell, and what replays showed of it."""

    cell: UnlikeCell
    alone: TokensApart | None
    """The trainer with this cell of the other side, from the trainer; None where it was not replayed."""
    explains: float
    """Share of the squared difference that the trainer's model has with this cell alone: 1 minus what is left
    between that replay and the other side."""
    removes: float
    """Share that is gone when the replay of the other side has the trainer's cell here."""
    flips: int
    """Choices of routers that are others with this cell alone."""

    @property
    def is_fault(self) -> bool:
        """Whether it is of a tensor that is not what was trained."""
        return self.cell.of == "tensor"


@dataclass(frozen=True, slots=True)
class TriedGuess:
    """A dtype of the sampler that nobody gave, and what of the recorded drift a replay with it has."""

    key: str
    dtype: DType
    explains: float


@dataclass(frozen=True, slots=True)
class SidesApart:
    """Everything that is told of two sides."""

    whole: TokensApart
    """The other side from the trainer."""
    fates: tuple[TensorFate, ...]
    """Tensors that are not what was trained, first those that explain most."""
    as_trained: tuple[TensorFate, ...]
    """The others that were read."""
    cells: tuple[ExplainedCell, ...]
    """Faults first, then by what they explain."""
    unexplained: float
    """Share of the squared difference that is left when the trainer's model has every given cell: 0 where
    nothing was recorded, for then the other side is that run."""
    router_flips: tuple[tuple[str, int], ...]
    """Router, and how many of its choices are others."""
    choices: int
    flipped_share: float
    """Share of the squared difference on tokens some router of which chose otherwise."""
    far: tuple[FarToken, ...]
    tried: tuple[TriedGuess, ...]
    """Where log-probabilities were recorded and no dtypes were given: one guess at a time, the best first."""
    kinds: tuple[tuple[str, int], ...]
    """(`same`, `rounded to bf16`, ...; tensors)."""
    bar: float
    notes: tuple[str, ...]

    @property
    def within(self) -> bool:
        near = not self.whole.not_finite and self.whole.mean_abs <= self.bar
        return near and not self.fates

    @property
    def first(self) -> str:
        """What is named first; empty where nothing differs."""
        if self.fates:
            return self.fates[0].name
        return self.cells[0].cell.key if self.cells else ""


def compare(trainer: Trainer, other: OtherSide, sequences: Ids, bar: float = BAR) -> SidesApart:
    """Both sides on these tokens."""
    if other.is_empty:
        raise ConfigError(
            "the other side",
            "must be given",
            got="neither tensors, nor dtypes, nor log-probabilities",
            do="Give the folder it loads, its table of dtypes, or the log-probabilities it recorded.",
        )
    if trainer.vocabulary:
        require_vocabulary(sequences, trainer.vocabulary)
    batches, order = batched(sequences)
    table = other.sampler or SamplerDtypes()
    dtypes = sampler_dtypes(table, trainer.plan, trainer.roles)
    fates, sent, kinds, notes = fates_of(trainer, other.sent, other.loaded)
    trained = trained_tensors(trainer)
    verdicts = {fate.name: fate.verdict for fate in fates}
    values = unlike_values(trainer.plan, trained, sent, verdicts, trainer.roles)
    cells = [*values, *unlike_dtypes(table, trainer.plan, trainer.roles, dtypes)]
    cells += _unlike_buffers(trainer, table)
    replays = Replays(trainer, table, sent, dtypes, batches, {n for cell in values for n in cell.names})
    own = replays.of(())
    require_tokens(own, sequences, order)
    cells += _unlike_activations(replays, cells)
    seen, _ = replays.whole(cells)
    taken = ComparedTokens(order, sequences, other.recorded)
    theirs = taken.recorded() if other.recorded is not None else taken(seen)
    mine = taken(own)
    whole = apart(theirs, mine)
    replayed, left = _most(cells, trained, sent)
    if left:
        notes.append(f"{left:,} more cells differ and were not replayed one by one.")
    measured = _Measured(mine, theirs, taken(seen), whole)
    explained = [_explained(cell, cells, replays, taken, measured) for cell in replayed]
    explained += [ExplainedCell(cell, None, 0.0, 0.0, 0) for cell in cells if cell not in replayed]
    explained.sort(key=lambda each: (not each.is_fault, -max(each.explains, each.removes)))
    rank = {each.cell.key: number for number, each in enumerate(explained) if each.is_fault}
    faults = [fate for fate in fates if not fate.verdict.is_precision]
    faults.sort(key=lambda fate: rank.get(fate.name, -1))
    flips = flips_of(seen, own)
    unexplained = _left(theirs, taken(seen), whole) if other.recorded is not None else 0.0
    tried: tuple[TriedGuess, ...] = ()
    if unexplained > EXPLAINED and other.sampler is None:
        tried = _tried(replays, values, taken, theirs, whole)
    return SidesApart(
        whole=whole,
        fates=tuple(faults),
        as_trained=tuple(fate for fate in fates if fate.verdict.is_precision),
        cells=tuple(explained),
        unexplained=unexplained,
        router_flips=tuple(sorted(((name, n) for name, n in flips.items() if n), key=lambda pair: -pair[1])),
        choices=sum(chosen.shape[0] for routes in own.routes for chosen in routes.values()),
        flipped_share=_flipped_share(seen, own, taken, mine, theirs),
        far=taken.furthest(mine, theirs),
        tried=tried,
        kinds=kinds,
        bar=bar,
        notes=tuple(notes),
    )


# --- cells --------------------------------------------------------------------------------------------


def _unlike_buffers(trainer: Trainer, table: SamplerDtypes) -> list[UnlikeCell]:
    if table.buffers is None:
        return []
    floating = {n: b for n, b in trainer.module.named_buffers() if b.is_floating_point()}
    if not floating:
        raise ConfigError("buffers", "must be of the model", got="a model without floating-point buffers")
    dtype = table.buffers.torch
    changed = [n for n, b in floating.items() if not torch.equal(b.to(dtype).to(b.dtype), b)]
    told = f"rounded to {table.buffers}"
    return [UnlikeCell("buffers", "buffers", told, tuple(changed))] if changed else []


def _unlike_activations(replays: Replays, cells: Sequence[UnlikeCell]) -> list[UnlikeCell]:
    """What the table asks of activations and a side does otherwise."""
    found = []
    for key, dtype in replays.table.activations:
        does = replays.does(()).dtypes.get(key, set()) | replays.does(cells).dtypes.get(key, set())
        if not does:
            raise ConfigError(
                f"sampler.{key}",
                "must be something that the model does where it can be seen",
                got="nothing of that kind in its forward",
                do="Leave the key out; docs/drift.md says where each is looked for.",
            )
        here = sorted(str(known) for each in does if (known := from_torch(each)) is not None)
        if _changes(key, dtype, does):
            found.append(UnlikeCell("activation", key, f"{' and '.join(here)}, there {dtype}"))
    return found


def _changes(key: str, dtype: DType, does: set[torch.dtype]) -> bool:
    if key in ("softmax", "logprobs"):
        return does != {dtype.torch}
    known = [from_torch(each) for each in does]
    return not all(each is not None and dtype.holds(each) for each in known)


def _most(
    cells: Sequence[UnlikeCell], trained: Mapping[str, Tensor], sent: Mapping[str, SentTensor]
) -> tuple[list[UnlikeCell], int]:
    """Those that are replayed, and how many are not."""

    def far(cell: UnlikeCell) -> float:
        if cell.of != "tensor":
            return float("inf")
        return distance(sent[cell.key].values.float().nan_to_num(), trained[cell.key].float())

    kept = sorted(cells, key=far, reverse=True)[:MOST]
    return [cell for cell in cells if cell in kept], len(cells) - len(kept)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The drift that cells are to explain."""

    mine: Tensor
    theirs: Tensor
    seen: Tensor
    """The replay of all cells: `theirs`, where nothing was recorded."""
    whole: TokensApart

    def explains(self, alone: Tensor) -> float:
        """Share of the squared drift that a replay has."""
        if self.whole.not_finite:
            return share(apart(alone, self.mine), self.whole)
        return 1 - _left(self.theirs, alone, self.whole) if self.whole.square else 0.0

    def removes(self, without: Tensor) -> float:
        """Share that is gone between the replay of all cells and this one."""
        before, after = apart(self.seen, self.mine), apart(without, self.mine)
        return share(before, self.whole) - share(after, self.whole)


def _explained(
    cell: UnlikeCell,
    cells: Sequence[UnlikeCell],
    replays: Replays,
    taken: ComparedTokens,
    measured: _Measured,
) -> ExplainedCell:
    alone = replays.of([cell])
    return ExplainedCell(
        cell,
        apart(taken(alone), measured.mine),
        measured.explains(taken(alone)),
        measured.removes(taken(replays.without(cell, cells))),
        sum(flips_of(alone, replays.of(())).values()),
    )


def _left(theirs: Tensor, seen: Tensor, whole: TokensApart) -> float:
    """What of the squared difference the other side's own run does not have."""
    return share(apart(theirs, seen), whole) if whole.square else 0.0


GUESSES: tuple[tuple[str, tuple[DType, ...]], ...] = (
    *((role, (DType.FP32, DType.BF16, DType.FP16)) for role in ("compute", *ROLES)),
    ("kv", (DType.FP8_E4M3, DType.FP8_E5M2, DType.BF16, DType.FP16)),
    *((key, (DType.BF16, DType.FP16)) for key in ("softmax", "rotary", "logits", "logprobs", "buffers")),
)
"""What samplers do otherwise than trainers."""


def _tried(
    given: Replays,
    values: Sequence[UnlikeCell],
    taken: Callable[[Signals], Tensor],
    theirs: Tensor,
    whole: TokensApart,
) -> tuple[TriedGuess, ...]:
    """Each guess on top of what was given, those that leave less than before."""
    trainer, found = given.trainer, []
    for key, dtypes in GUESSES:
        for dtype in dtypes:
            table = sampler({key: str(dtype)})
            try:
                there = sampler_dtypes(table, trainer.plan, trainer.roles)
                cells = [*unlike_dtypes(table, trainer.plan, trainer.roles, there)]
                cells += _unlike_buffers(trainer, table)
                replays = replace(given, table=table, dtypes=there, done={})
                cells += _unlike_activations(replays, values)
            except REFUSED:
                continue  # the model has nothing of the kind, or not in that dtype
            if cells:
                left = _left(theirs, taken(replays.whole([*values, *cells])[0]), whole)
                found.append(TriedGuess(key, dtype, 1 - left))
    found.sort(key=lambda guess: -guess.explains)
    return tuple(guess for guess in found if guess.explains > EXPLAINED)


def _flipped_share(seen: Signals, own: Signals, taken: ComparedTokens, mine: Tensor, theirs: Tensor) -> float:
    """Of tokens that are predicted where a router chose otherwise."""
    flipped = []
    for part, routes, before in zip(taken.order, seen.routes, own.routes, strict=True):
        rows, length = len(part), len(taken.sequences[part[0]])
        other = torch.zeros(rows, length, dtype=torch.bool)
        for router, chosen in routes.items():
            was = before.get(router)
            if was is not None and was.shape == chosen.shape and chosen.shape[0] == rows * length:
                other |= (chosen != was).any(-1).view(rows, length)
        flipped.append(other[:, :-1].reshape(-1))
    gaps = (theirs - mine).square()
    finite = gaps.isfinite()
    total = float(gaps[finite].sum())
    where = taken.kept(torch.cat(flipped))
    return float(gaps[finite & where].sum()) / total if total else 0.0
