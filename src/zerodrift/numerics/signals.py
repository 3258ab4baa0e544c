"""What two runs are compared by: losses, the log-probability of every target, and who was routed where.

Log-probabilities are taken where the model takes its loss: from the arguments of `cross_entropy`, so that
shifts and ignored positions are the model's own. A model that has its loss from something else is compared by
its losses. Routes are the indices that `topk` returns.

Invariant: looking changes nothing: what is recorded is computed beside the model, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError
from zerodrift.inspect.trace.places import ModulePaths, paths_in
from zerodrift.numerics.runs import Batch, called, loss_of, seeded

ROUTES = frozenset(("topk",))
LOSSES = frozenset(("cross_entropy", "nll_loss"))


@dataclass(slots=True)
class Signals:
    """Of some micro-batches, in their order, on one rank."""

    losses: list[float] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    """Log-probabilities of each micro-batch's targets, fp64, `[tokens]`."""
    routes: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Per micro-batch: the module that chose, and its choices, `[tokens, k]`, ascending."""
    margins: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """The same: by how much the last choice is before the first that was not made, fp32, `[tokens]`."""

    @property
    def values(self) -> torch.Tensor:
        """All that is compared, in one vector."""
        if any(len(targets) for targets in self.targets):
            return torch.cat(self.targets)
        return torch.tensor(self.losses, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class Drift:
    """How far a run is from another, over tokens, or over losses where there are no tokens."""

    rms: float
    mean: float
    largest: float
    k3: float
    """Mean of `exp(d) - 1 - d`, an estimate of the divergence that is never negative."""
    count: int
    loss: float
    """Difference of the mean losses."""
    flips: int
    """Choices of a router that are other, over tokens and routers."""
    choices: int

    @property
    def square(self) -> float:
        return self.rms**2


def drift(run: Signals, other: Signals) -> Drift:
    """Of `run` from `other`."""
    mine, theirs = run.values, other.values
    if mine.shape != theirs.shape:
        must = "must have as many targets as the reference"
        raise ModelError("batches", must, got=f"{len(mine)} and {len(theirs)}")
    apart = mine - theirs
    flips, choices = flipped(run, other)
    return Drift(
        rms=float(apart.square().mean().sqrt()),
        mean=float(apart.mean()),
        largest=float(apart.abs().max()),
        k3=float((apart.exp() - 1 - apart).mean()),
        count=len(apart),
        loss=sum(run.losses) / len(run.losses) - sum(other.losses) / len(other.losses),
        flips=flips,
        choices=choices,
    )


def flipped(run: Signals, other: Signals) -> tuple[int, int]:
    """How many choices of routers are other, and of how many."""
    count = total = 0
    for mine, theirs in zip(run.routes, other.routes, strict=True):
        for router, chosen in mine.items():
            before = theirs.get(router)
            if before is None or before.shape != chosen.shape:
                continue
            count += int((chosen != before).any(-1).sum())
            total += chosen.shape[0]
    return count, total


def flips_of(run: Signals, other: Signals) -> dict[str, int]:
    """Router -> how many of its choices are other."""
    count: dict[str, int] = {}
    for mine, theirs in zip(run.routes, other.routes, strict=True):
        for router, chosen in mine.items():
            before = theirs.get(router)
            if before is not None and before.shape == chosen.shape:
                path = router.rpartition("#")[0]
                count[path] = count.get(path, 0) + int((chosen != before).any(-1).sum())
    return count


# --- recording -----------------------------------------------------------------------------------------


class Recorder(TorchFunctionMode):
    """Notes log-probabilities and routes of the forwards inside."""

    def __init__(self, path: ModulePaths) -> None:
        super().__init__()
        self._path = path
        self.negative: list[torch.Tensor] = []
        """Of each call of the loss: what every target costs, with its gradient."""
        self.routes: dict[str, torch.Tensor] = {}
        self.margins: dict[str, torch.Tensor] = {}
        """With their gradients."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in LOSSES:
            self.negative.append(_per_target(func, args, kwargs or {}))
        elif name in ROUTES:
            chosen = result[1].detach()
            key = f"{self._path.current}#{len(self.routes)}"
            self.routes[key] = chosen.reshape(-1, chosen.shape[-1]).sort(-1).values.cpu()
            self.margins[key] = _margins(args, kwargs or {}, chosen.shape[-1])
        return result


def _margins(args: tuple[Any, ...], kwargs: dict[str, Any], k: int) -> torch.Tensor:
    """Of a call of `topk`; none where it chooses everything, or something else than the largest of a row."""
    given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | kwargs
    scores, dim = given["input"], given.get("dim", -1)
    if dim % scores.ndim != scores.ndim - 1 or not given.get("largest", True) or scores.shape[-1] <= k:
        return scores.new_zeros(0)
    first = scores.float().topk(k + 1, dim=-1).values.reshape(-1, k + 1)
    return first[:, -2] - first[:, -1]


def _per_target(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What each target costs in the same call: without reduction, weights and smoothing stay the model's."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs
    given |= {"reduction": "none"}
    given.pop("size_average", None)
    given.pop("reduce", None)
    costs = func(**given)
    target = given["target"]
    if target.is_floating_point():
        return costs.reshape(-1).double()
    return costs.reshape(-1)[(target != given.get("ignore_index", -100)).reshape(-1)].double()


Around = Callable[[ModulePaths], AbstractContextManager[Any]]
"""What is done around each forward."""


def plainly(path: ModulePaths) -> AbstractContextManager[Any]:
    """Nothing."""
    return nullcontext()


def numbered(engine: Engine, batches: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
    """Each with its number over all ranks."""
    return enumerate(batches, engine.mesh.rank("data") * len(batches))


def signals(
    engine: Engine, batches: Sequence[Batch], around: Around = plainly, *, gradients: bool = False
) -> Signals:
    """Of the forwards of some micro-batches, without gradients, or as if there came a backward."""
    seen = Signals()
    with paths_in(engine.module) as path, torch.set_grad_enabled(gradients):
        for number, batch in numbered(engine, batches):
            with around(path):
                forward(engine, batch, number, path, seen)
    return seen


def trained_signals(engine: Engine, batches: Sequence[Batch], around: Around = plainly) -> Signals:
    """The same, with a backward of each from its loss: the gradients stay in the engine, the step is not
    taken."""
    seen = Signals()
    with paths_in(engine.module) as path:
        for number, batch in numbered(engine, batches):
            with around(path):
                loss = forward(engine, batch, number, path, seen).loss
            engine.backward(loss)
    return seen


@dataclass(frozen=True, slots=True)
class Judged:
    """What a forward can be judged by, with gradients."""

    loss: torch.Tensor
    negative: torch.Tensor | None
    """What every target costs, where the model takes its loss from `cross_entropy`."""
    margins: dict[str, torch.Tensor]
    """Of routers."""


def forward(engine: Engine, batch: Batch, number: int, path: ModulePaths, seen: Signals) -> Judged:
    """Of a micro-batch, whose signals are noted."""
    seeded(number)
    recorder = Recorder(path)
    with recorder:
        output = called(engine, batch)
    loss = loss_of(output, batch)
    negative = torch.cat(recorder.negative) if recorder.negative else None
    seen.losses.append(float(loss.detach()))
    none = torch.zeros(0, dtype=torch.float64)
    seen.targets.append(none if negative is None else -negative.detach().cpu())
    seen.routes.append(recorder.routes)
    seen.margins.append({key: margin.detach().cpu() for key, margin in recorder.margins.items()})
    return Judged(loss, negative, recorder.margins)


def require_finite(seen: Signals, whose: str) -> None:
    """An error that names the first micro-batch whose loss is no number."""
    for number, loss in enumerate(seen.losses):
        if not math.isfinite(loss):
            raise ModelError(
                f"batches[{number}]",
                f"must have a finite loss {whose}",
                got=loss,
                do="Look at the batch and at the weights.",
            )


@dataclass(frozen=True, slots=True)
class CloseCalls:
    """Which margins of routers rounding may turn around, and what they are worth beside targets.

    What a flip does is no first-order effect: it is either there or not. But how often one happens grows with
    how far rounding moves the margins that are near zero, and that is one. So what flips cost all together is
    charged to each cell by its share of what moves these margins.
    """

    within: Mapping[str, float]
    """Of each router: three times how far its margins are moved."""
    weight: float
    """Log-probabilities for one of a margin."""


def close_calls(run: Signals, other: Signals) -> CloseCalls | None:
    """Of two runs of the same micro-batches; None where no flip costs anything."""
    apart = (run.values - other.values).abs()
    if not flipped(run, other)[0] or not bool(apart.isfinite().all()):
        return None
    # Flips make a few targets worse by much: what most of them have is rounding alone.
    cost = float(apart.square().mean()) - float(apart.median() / HALF_OF_NORMAL) ** 2
    moved: dict[str, list[torch.Tensor]] = {}
    for mine, theirs in zip(run.margins, other.margins, strict=True):
        for router, margin in mine.items():
            if router in theirs and theirs[router].shape == margin.shape:
                both = torch.stack([margin, theirs[router]])
                moved.setdefault(router, []).append(both[:, both.isfinite().all(0)])
    within, square = {}, 0.0
    for router, pairs in moved.items():
        margins, before = torch.cat(pairs, 1)
        if margins.numel():
            spread = float((margins - before).abs().median()) / HALF_OF_NORMAL
            within[router] = 3 * spread
            square += spread**2 * int((margins < 3 * spread).sum())
    if cost <= 0 or square == 0:
        return None
    return CloseCalls(within, math.sqrt(cost * len(apart) / square))


HALF_OF_NORMAL = 0.6745
"""Half of a normal distribution is within this many of its standard deviations."""


def signed_costs(judged: Judged, number: int, calls: CloseCalls | None) -> torch.Tensor:
    """What every target costs, added up with random signs: squares of its gradients are, on average, sums of
    squares over the targets. Close calls of routers are added in the same way."""
    if judged.negative is None:
        return judged.loss
    generator = torch.Generator().manual_seed(7_000_003 + number)
    whole = _signed(judged.negative, generator)
    for router, margins in judged.margins.items() if calls is not None else ():
        if calls is not None and router in calls.within and margins.requires_grad:
            close = margins[margins.detach() < calls.within[router]]
            whole = whole + calls.weight * _signed(close, generator)
    return whole / len(judged.negative)


def _signed(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return (values * signs.to(values.device, values.dtype)).sum()
