"""How far an optimizer looks: what an element's update depends on, found out by trying.

A stand-in of the caller's optimizer takes some steps on small tensors, once whole and together, once as two
ranks would hold them: flat pieces cut where slices are cut, small tensors in their shape, each rank for
itself. Where an update differs by more than rounding, the optimizer is not elementwise. Tried again with
every tensor whole on one of the two, it turns out whether it looks at a tensor or at several.

It cannot see what begins later than `STEPS`, or above the sizes here: `admitted` knows some of these by name.

Invariant: the caller's optimizer, its state and all streams of random numbers are as they were.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from zerodrift.dtypes import BLOCK
from zerodrift.optim.stand_in import (
    CannotTellError,
    CommunicatesError,
    Watched,
    begin_again,
    line,
    stand_in,
    step,
    undisturbed,
)

SCALES = (3.0, 0.2, 1.0, 30.0, 0.5)
"""Of each step's gradients: a limit on a norm applies to some of them."""

STEPS = len(SCALES)


class Reach(enum.Enum):
    """What an element's update depends on."""

    ELEMENT = "itself"
    TENSOR = "others of its tensor, or that tensor's shape"
    GROUP = "other tensors"
    SENT = "what the optimizer itself sends between ranks"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TrialResult:
    reach: Reach
    why: str = ""
    """What was seen, for a person."""


@dataclass(frozen=True, slots=True)
class Portion:
    """What a rank holds of a tensor."""

    tensor: int
    part: slice
    whole: bool


Rank = Mapping[int, Sequence[Portion]]
"""Number of a group -> what a rank holds of it."""


def reach(
    optimizer: torch.optim.Optimizer, shapes: Mapping[int, Collection[Sequence[int]]], device: torch.device
) -> TrialResult:
    """Of an optimizer whose groups have parameters of these shapes; on `device` where a CPU will not do."""
    found = TrialResult(Reach.UNKNOWN, "it has no parameters")
    if not any(shapes.values()):
        return found
    for where in dict.fromkeys((torch.device("cpu"), device)):
        with undisturbed(where), torch.no_grad():
            found = _reach(optimizer, _chosen(optimizer, shapes), where)
        if found.reach is not Reach.UNKNOWN:
            break
    return found


def moves(optimizer: torch.optim.Optimizer, shapes: Mapping[int, Collection[Sequence[int]]]) -> bool:
    """Whether a step gives parameters other memory (`p.data = ...`); False where it cannot be tried."""
    chosen = _chosen(optimizer, shapes)
    if not chosen:
        return False
    device = torch.device("cpu")
    with undisturbed(device), torch.no_grad(), Watched(()):
        trial = _trial(optimizer, chosen, device)
        (rank,) = _whole(trial)
        try:
            made, views = _held(trial, rank)
            before = [view.data_ptr() for _, view in views]
            _bring(trial, views, 0)
            step(made)
        except Exception:
            return False
    return before != [view.data_ptr() for _, view in views]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot be called without an argument."""
    _, *rest = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(each.default is each.empty and each.kind not in kinds for each in rest)


# --- what is tried ------------------------------------------------------------------------------------


def _chosen(
    optimizer: torch.optim.Optimizer, shapes: Mapping[int, Collection[Sequence[int]]]
) -> dict[int, list[tuple[int, ...]]]:
    """Group -> shapes to try. Of groups that differ in nothing but how large numbers are, the first."""
    seen: dict[str, int] = {}
    chosen: dict[int, list[tuple[int, ...]]] = {}
    for number, real in shapes.items():
        options = optimizer.param_groups[number]
        small = [shape for one in _sizes(real) for shape in _tried(*one)]
        kind = {key: _kind(value) for key, value in options.items() if key not in ("params", "param_names")}
        like = f"{kind} {small}"
        if small and seen.setdefault(like, number) == number:
            chosen[number] = small
    return chosen


def _sizes(real: Collection[Sequence[int]]) -> list[tuple[int, bool]]:
    """Dimensions, and whether there is but one element."""
    return sorted({(len(shape), all(length == 1 for length in shape)) for shape in real})


def _tried(dimensions: int, single: bool) -> list[tuple[int, ...]]:
    if single:
        return [(1,) * dimensions] * 2
    if dimensions == 1:
        return [(40,), (5000,)]
    if dimensions == 2:
        return [(8, 6), (132, 136)]
    return [(6, 4) + (3,) * (dimensions - 2), (12, 10) + (3,) * (dimensions - 2)]


def _kind(value: object) -> str:
    """Of an option: numbers matter only as zero or not, and as none."""
    return str(value != 0.0) if isinstance(value, float) else repr(value)[:200]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tensors, and what each step brings."""

    optimizer: torch.optim.Optimizer
    groups: Mapping[int, Sequence[int]]
    """Group -> its tensors, by number."""
    shapes: Sequence[tuple[int, ...]]
    values: Sequence[torch.Tensor]
    """Flat, by tensor."""
    gradients: Sequence[Sequence[torch.Tensor]]
    """Flat, by step and tensor."""


def _trial(
    optimizer: torch.optim.Optimizer, chosen: Mapping[int, Sequence[tuple[int, ...]]], device: torch.device
) -> _Trial:
    shapes: list[tuple[int, ...]] = []
    groups: dict[int, list[int]] = {}
    for number, mine in chosen.items():
        groups[number] = list(range(len(shapes), len(shapes) + len(mine)))
        shapes += mine
    generator = torch.Generator().manual_seed(7)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    # Of very different sizes, so that small updates show, and growing: no two pieces are alike.
    values = [_numbers(length, -4.0, generator) for length in lengths]
    first = [
        _numbers(length, -3.0, generator) * torch.linspace(0.3, 3.0, length) * (0.4 + index % 5)
        for index, length in enumerate(lengths)
    ]
    gradients = [
        [one.roll(7 * number).mul(scale).to(device) for one in first] for number, scale in enumerate(SCALES)
    ]
    return _Trial(optimizer, groups, shapes, [one.to(device) for one in values], gradients)


def _numbers(length: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """Between 10^exponent and 1, three in ten of them negative."""
    drawn = torch.rand(2, length, generator=generator)
    return torch.where(drawn[0] < 0.3, -1.0, 1.0) * 10.0 ** (drawn[1] * exponent)


def _whole(trial: _Trial) -> list[Rank]:
    return [{number: [_all(trial, tensor) for tensor in held] for number, held in trial.groups.items()}]


def _all(trial: _Trial, tensor: int) -> Portion:
    return Portion(tensor, slice(0, trial.values[tensor].numel()), True)


def _apart(trial: _Trial) -> list[Rank]:
    """Every tensor whole, on one of two ranks."""
    return [
        {number: [_all(trial, tensor) for tensor in held[rank::2]] for number, held in trial.groups.items()}
        for rank in range(2)
    ]


def _cut(trial: _Trial) -> list[Rank]:
    """As slices may end anywhere: what is longer than a block is cut between blocks, into flat pieces."""
    ranks: list[dict[int, list[Portion]]] = [{}, {}]
    for number, held in trial.groups.items():
        for place, tensor in enumerate(held):
            length = trial.values[tensor].numel()
            at = min(15, (length - 1) // BLOCK) * BLOCK
            if at:
                ranks[0].setdefault(number, []).append(Portion(tensor, slice(0, at), False))
                ranks[1].setdefault(number, []).append(Portion(tensor, slice(at, length), False))
            else:
                ranks[place % 2].setdefault(number, []).append(_all(trial, tensor))
    return [{number: rank.get(number, []) for number in trial.groups} for rank in ranks]


# --- how --------------------------------------------------------------------------------------------


def _reach(
    optimizer: torch.optim.Optimizer, chosen: Mapping[int, Sequence[tuple[int, ...]]], device: torch.device
) -> TrialResult:
    trial = _trial(optimizer, chosen, device)
    watch = Watched({one.numel() for one in trial.values})
    try:
        with watch:
            expected = _steps(trial, _whole(trial))
        if watch.random:
            several = {
                number: [shape for shape in shapes if torch.Size(shape).numel() > 1]
                for number, shapes in chosen.items()
            }
            trial = _trial(optimizer, {number: held for number, held in several.items() if held}, device)
            with Watched({one.numel() for one in trial.values}):
                expected = _steps(trial, _whole(trial))
    except CannotTellError as error:
        return TrialResult(Reach.UNKNOWN, str(error))
    except CommunicatesError as error:
        return TrialResult(Reach.SENT, f"it called `{error}`")
    except Exception as error:
        return TrialResult(Reach.UNKNOWN, f"a step of a copy of it on small tensors raised {line(error)}")
    if not any(
        bool((after != before).any()) for after, before in zip(expected[-1], trial.values, strict=True)
    ):
        return TrialResult(Reach.UNKNOWN, f"{STEPS} steps of a copy of it changed nothing")
    pieces = _differs(trial, expected, _cut(trial), watch.random)
    if not pieces:
        return TrialResult(Reach.ELEMENT)
    tensors = _differs(trial, expected, _apart(trial), watch.random)
    if not tensors:
        return TrialResult(Reach.TENSOR, f"on flat pieces {pieces}")
    return TrialResult(Reach.GROUP, f"where each rank has some of the tensors, {tensors}")


def _differs(
    trial: _Trial, expected: Sequence[list[torch.Tensor]], ranks: Sequence[Rank], random: bool
) -> str:
    """How these ranks' updates differ from those of whole tensors; `""` where only rounding could tell."""
    numels = {torch.Size(shape).numel() for shape in trial.shapes}
    numels |= {
        piece.part.stop - piece.part.start for rank in ranks for held in rank.values() for piece in held
    }
    try:
        with Watched(numels) if random else nullcontext():
            seen = _steps(trial, ranks)
    except Exception as error:
        return f"a step raised {line(error)}"
    before = torch.cat(list(trial.values))
    path, over = torch.zeros_like(before), torch.zeros_like(before, dtype=torch.bool)
    for wanted, found in zip(expected, seen, strict=True):
        whole, pieces = torch.cat(wanted), torch.cat(found)
        path += (whole - before).abs()
        before = whole
        allowed = path * 2.0**-12 + whole.abs() * (STEPS * 2.0**-22)
        # Not a number is beside nothing, and equal infinities have no difference.
        close = ((pieces - whole).abs() <= allowed) | (pieces == whole) | (pieces.isnan() & whole.isnan())
        over |= ~close
    if not bool(over.any()):
        return ""
    parts = [float(one.float().mean()) for one in over.split([one.numel() for one in trial.values])]
    worst = max(range(len(parts)), key=parts.__getitem__)
    return (
        f"{parts[worst]:.0%} of the elements of a tensor {list(trial.shapes[worst])} were updated otherwise"
    )


def _steps(trial: _Trial, ranks: Sequence[Rank]) -> list[list[torch.Tensor]]:
    """The flat values of every tensor after every step, each rank on its own."""
    after = [[torch.empty_like(values) for values in trial.values] for _ in range(STEPS)]
    for rank in ranks:
        begin_again()
        optimizer, views = _held(trial, rank)
        for number in range(STEPS):
            _bring(trial, views, number)
            step(optimizer)
            for piece, view in views:
                after[number][piece.tensor][piece.part] = view.detach().reshape(-1)
    return after


def _held(trial: _Trial, rank: Rank) -> tuple[torch.optim.Optimizer, list[tuple[Portion, nn.Parameter]]]:
    """A stand-in on a rank, and what it updates."""
    views = {
        number: [(piece, nn.Parameter(_shaped(trial, piece, trial.values).clone())) for piece in pieces]
        for number, pieces in rank.items()
    }
    groups = {number: [view for _, view in mine] for number, mine in views.items()}
    return stand_in(trial.optimizer, groups), [each for mine in views.values() for each in mine]


def _bring(trial: _Trial, views: Sequence[tuple[Portion, nn.Parameter]], number: int) -> None:
    for piece, view in views:
        view.grad = _shaped(trial, piece, trial.gradients[number]).clone()


def _shaped(trial: _Trial, piece: Portion, of: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `TorchViews` has it: in its shape where it is whole, and one of no dimension flat if others are."""
    flat = of[piece.tensor][piece.part]
    return flat.view(trial.shapes[piece.tensor]) if piece.whole else flat
