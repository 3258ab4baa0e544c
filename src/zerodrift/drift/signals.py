"""What two runs are compared by: losses, the log-probability of every target, and who was routed where.

Log-probabilities are taken where the model takes its loss: from the arguments of `cross_entropy`, so that
shifts and ignored positions are the model's own. A model that has its loss from something else is compared by
its losses. Routes are the indices that `topk` returns.

Invariant: looking changes nothing: what is recorded is computed beside the model, without gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerodrift.drift.runs import Batch, called, loss_of, seeded
from zerodrift.drift.where import Path, path_in
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError

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

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.negative: list[torch.Tensor] = []
        """Of each call of the loss: what every target costs, with its gradient."""
        self.routes: dict[str, torch.Tensor] = {}

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
        return result

    def taken(self) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """What a micro-batch has left: costs of its targets, and routes."""
        negative, routes = self.negative, self.routes
        self.negative, self.routes = [], {}
        return (torch.cat(negative) if negative else None), routes


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


Around = Callable[[Path], AbstractContextManager[Any]]
"""What is done around each forward."""


def plainly(path: Path) -> AbstractContextManager[Any]:
    """Nothing."""
    return nullcontext()


def numbered(engine: Engine, batches: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
    """Each with its number over all ranks."""
    return enumerate(batches, engine.mesh.rank("data") * len(batches))


def signals(engine: Engine, batches: Sequence[Batch], around: Around = plainly) -> Signals:
    """Of the forwards of some micro-batches, without gradients."""
    seen = Signals()
    with path_in(engine.module) as path, torch.no_grad():
        for number, batch in numbered(engine, batches):
            with around(path):
                forward(engine, batch, number, path, seen)
    return seen


def trained_signals(engine: Engine, batches: Sequence[Batch], around: Around = plainly) -> Signals:
    """The same, with a backward of each from its loss: the gradients stay in the engine, the step is not
    taken."""
    seen = Signals()
    with path_in(engine.module) as path:
        for number, batch in numbered(engine, batches):
            with around(path):
                loss, _ = forward(engine, batch, number, path, seen)
            engine.backward(loss)
    return seen


def forward(
    engine: Engine, batch: Batch, number: int, path: Path, seen: Signals
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss, and what every target costs."""
    seeded(number)
    recorder = Recorder(path)
    with recorder:
        output = called(engine, batch)
    loss = loss_of(output, batch)
    negative, routes = recorder.taken()
    value = float(loss.detach())
    seen.losses.append(value)
    none = torch.zeros(0, dtype=torch.float64)
    seen.targets.append(none if negative is None else -negative.detach().cpu())
    seen.routes.append(routes)
    return loss, negative


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


def signed_costs(negative: torch.Tensor, number: int) -> torch.Tensor:
    """What every target costs, added up with random signs: squares of its gradients are, on average, sums of
    squares over the targets."""
    generator = torch.Generator().manual_seed(7_000_003 + number)
    signs = torch.randint(0, 2, negative.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return (negative * signs.to(negative.device, negative.dtype)).sum() / len(negative)
