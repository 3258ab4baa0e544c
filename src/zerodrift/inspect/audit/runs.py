"""Run one model under one policy with an engine, and record the signals by which two runs are compared.

The model is built anew for each run, with the same values and random numbers. The signals are the
log-probability of every target, from the arguments of `cross_entropy` and so with the model's own shifts and
ignored positions, or else the losses; and the indices that `topk` returns.

Invariant: the engine is the one that trains, at any ZeRO stage and on any number of ranks. The caller's model
is never touched, and recording changes no bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerodrift.comm import Collectives, start, started
from zerodrift.config import ConfigSource, load, without_torch_classes
from zerodrift.engine import Engine, NativeExecutor, batch_on
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.inspect.audit.tokens import Batch, draw_batches, read_batches
from zerodrift.inspect.trace import ModulePaths, paths_in
from zerodrift.mesh import MeshShape
from zerodrift.model import build_runnable, describe, empty, holds
from zerodrift.plan import Plan, build
from zerodrift.policy import Policy, mesh_for, resolve
from zerodrift.weights import initial_values, open_weights

REFUSED = (ConfigError, ModelError, UnsupportedError)
"""Errors of a variant that the plan or the model does not admit."""

LARGE = 10_000_000  # parameters of a model that is collected before the next one is built


@dataclass(frozen=True, slots=True)
class Subject:
    """A function that builds the model under audit, and the files of its values, or None for its own."""

    make: Callable[[], nn.Module]
    weights: str | os.PathLike[str] | None = None

    @staticmethod
    def of(model: nn.Module | Callable[[], nn.Module], weights: str | os.PathLike[str] | None) -> Subject:
        """Make a subject that copies a module for each run, or calls a function inside `empty()`."""
        if isinstance(model, nn.Module):
            bare = [name for name, parameter in model.named_parameters() if parameter.is_meta]
            if bare and weights is None:
                must = "must have values, or be a function that builds it"
                do = "Pass the function that builds it, or `weights`."
                raise ModelError("model", must, got=f"{bare[0]} on the meta device", do=do)
            return Subject(lambda: copy.deepcopy(model), weights)
        build_model = model

        def make() -> nn.Module:
            with empty():
                return build_model().train()

        return Subject(make, weights)


def this_rank() -> int:
    return started()[0]


def load_subject(
    config: ConfigSource,
    model: str,
    weights: Path | None,
    tokens: Path | None,
    count: int,
    overrides: list[str],
) -> tuple[Plan, Subject, list[Batch]]:
    """Load the plan, the model and `count` micro-batches of this rank that a command names. Without files,
    tokens and values are drawn."""
    rank, ranks = started()
    if weights is None and Path(model).is_dir() and holds(Path(model)):
        weights = Path(model)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return build_runnable(model)

    built = make()
    loaded = without_torch_classes(load(config, overrides))
    mesh = mesh_for(loaded, ranks)
    plan = build(resolve(loaded, mesh), describe(built), mesh)
    batches = draw_batches(built, count, rank) if tokens is None else read_batches(tokens, count, rank, ranks)
    return plan, Subject(make, weights), batches


@contextlib.contextmanager
def running(subject: Subject, policy: Policy, mesh: MeshShape) -> Iterator[Engine]:
    """Start an engine for the model under a policy. All ranks must call it."""
    if policy.pipeline is not None or policy.backend != "native":
        what = "a pipeline" if policy.pipeline is not None else f"backend {policy.backend}"
        must = "must run the whole model on each rank, on the native backend"
        do = "Audit the same config without it: the columns are the same."
        raise UnsupportedError("the audit", must, got=what, do=do)
    model = subject.make()
    for module in model.modules():  # recomputation in the backward would record a forward twice
        if getattr(module, "gradient_checkpointing", False) is True:
            setattr(module, "gradient_checkpointing", False)  # noqa: B010
    if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
        gc.collect()  # the last run's model and its hooks refer to each other
    joined = start(mesh)
    try:
        spec, files = open_weights(model, subject.weights, True, Collectives(joined))
        plan = build(policy, spec, mesh)
        sources = initial_values(plan, model, files, Collectives(joined))
        engine = Engine(plan, joined, lambda comm: NativeExecutor(plan, model, comm, None, sources))
        if files is not None:
            files.finish(model, engine.comm)
    except BaseException:
        joined.stop()
        raise
    try:
        yield engine
    finally:
        engine.destroy()


def plan_for(subject: Subject, policy: Policy, mesh: MeshShape) -> Plan:
    """Build the plan of a run without running it."""
    return build(policy, describe(subject.make()), mesh)


def loss_of(output: Any, batch: Batch) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        loss = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        must, got = "must return a loss: one number, or an object with `.loss`", type(output).__name__
        do = "A model of `transformers` returns a loss if the batch has `labels`."
        raise ModelError("model", must, got=f"{got} for {', '.join(batch)}", do=do)
    return loss.reshape(())


def call_model(engine: Engine, batch: Batch) -> Any:
    """Run the forward of one micro-batch. An error of the model names the shapes of the batch."""
    try:
        return engine(**batch_on(batch, engine.mesh.device, lambda tensor: tensor))
    except (TypeError, RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{key} {list(getattr(value, 'shape', ()))}" for key, value in batch.items())
        must = "must be inputs that the model accepts, in the dtypes of the plan"
        do = "If dtypes do not match, `zerodrift plan --trace` names the line of the model's code."
        raise ModelError("batch", must, got=f"{shapes}: {error}", do=do) from error


def check_batches(batches: Sequence[Any]) -> list[Batch]:
    """Require micro-batches that are dicts of finite values."""
    if not batches:
        raise ModelError("batches", "must be at least one", got="none")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            must = "must be a dict of the model's keyword arguments"
            raise ModelError(f"batches[{number}]", must, got=type(batch).__name__)
        for key, value in batch.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not value.isfinite().all():
                raise ModelError(f"batches[{number}][{key!r}]", "must be finite", got="inf or nan")
    return list(batches)


LOSSES = frozenset(("cross_entropy", "nll_loss"))

Around = Callable[[ModulePaths], AbstractContextManager[Any]]  # makes a context around each forward
Begin = Callable[[torch.Tensor, "Recorder", int], torch.Tensor]
"""Returns the number at which a backward begins, given the loss, the recorder and the batch's number."""


@dataclass(slots=True)
class Signals:
    """Recorded signals, one item per micro-batch."""

    losses: list[float] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    """Log-probabilities of the targets of each micro-batch. Shape [tokens], fp64."""
    routes: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Router -> its choices per micro-batch, ascending. Shape [tokens, k]."""
    margins: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """Router -> score of the last choice minus the best score not chosen. Shape [tokens], fp32."""

    @property
    def values(self) -> torch.Tensor:
        """Log-probabilities of all targets, or else all losses, as one vector."""
        if any(len(targets) for targets in self.targets):
            return torch.cat(self.targets)
        return torch.tensor(self.losses, dtype=torch.float64)


def measure_gaps(gaps: torch.Tensor) -> dict[str, float]:
    """Measure differences of log-probabilities. `k3` is the mean of `exp(d) - 1 - d`, a non-negative estimate
    of the KL divergence."""
    rms, k3 = float(gaps.square().mean().sqrt()), float((gaps.expm1() - gaps).mean())
    return {"rms": rms, "mean": float(gaps.mean()), "largest": float(gaps.abs().max()), "k3": k3}


@dataclass(frozen=True, slots=True)
class Drift:
    """Difference of a run from another, over targets, or over losses if there are no targets."""

    rms: float
    mean: float
    largest: float
    k3: float
    count: int
    loss: float  # difference of the mean losses
    flips: int  # choices of routers that differ, over tokens and routers
    choices: int

    @property
    def square(self) -> float:
        return self.rms**2


def drift(run: Signals, other: Signals) -> Drift:
    mine, theirs = run.values, other.values
    if mine.shape != theirs.shape:
        must = "must have as many targets as the reference"
        raise ModelError("batches", must, got=f"{len(mine)} and {len(theirs)}")
    flips = router_flips(run, other).values()
    loss = sum(run.losses) / len(run.losses) - sum(other.losses) / len(other.losses)
    flipped, choices = sum(count for count, _ in flips), sum(total for _, total in flips)
    return Drift(**measure_gaps(mine - theirs), count=len(mine), loss=loss, flips=flipped, choices=choices)


def changed_routes(run: Signals, other: Signals) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield the micro-batch, the router's call, and which tokens have another choice. Shape [tokens]."""
    for number, (mine, theirs) in enumerate(zip(run.routes, other.routes, strict=True)):
        for call, chosen in mine.items():
            before = theirs.get(call)
            if before is not None and before.shape == chosen.shape:
                yield number, call, (chosen != before).any(-1)


def router_flips(run: Signals, other: Signals) -> dict[str, tuple[int, int]]:
    """Return by router how many choices differ, and how many there are."""
    found: dict[str, tuple[int, int]] = {}
    for _, call, changed in changed_routes(run, other):
        router = call.rpartition("#")[0]
        count, total = found.get(router, (0, 0))
        found[router] = count + int(changed.sum()), total + len(changed)
    return found


class Recorder(TorchFunctionMode):
    """Records the targets' costs and the routers' margins, both with gradients, and the routers' choices."""

    def __init__(self, path: ModulePaths) -> None:
        super().__init__()
        self._path = path
        self.negative: list[torch.Tensor] = []
        """Costs of targets per call of `cross_entropy` or `nll_loss`."""
        self.routes: dict[str, torch.Tensor] = {}
        self.margins: dict[str, torch.Tensor] = {}

    @property
    def costs(self) -> torch.Tensor:
        return torch.cat(self.negative) if self.negative else torch.zeros(0, dtype=torch.float64)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in LOSSES:
            self.negative.append(_target_costs(func, args, kwargs))
        elif name == "topk":
            chosen = result[1].detach()
            key = f"{self._path.current}#{len(self.routes)}"
            self.routes[key] = chosen.reshape(-1, chosen.shape[-1]).sort(-1).values.cpu()
            self.margins[key] = _margins(args, kwargs, chosen.shape[-1])
        return result


def _margins(args: tuple[Any, ...], kwargs: dict[str, Any], k: int) -> torch.Tensor:
    """Return the margins of a call of `topk`, or none unless it chooses some of the largest of a row."""
    given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | kwargs
    scores, dim = given["input"], given.get("dim", -1)
    if dim % scores.ndim != scores.ndim - 1 or not given.get("largest", True) or scores.shape[-1] <= k:
        return scores.new_zeros(0)
    first = scores.float().topk(k + 1, dim=-1).values.reshape(-1, k + 1)
    return first[:, -2] - first[:, -1]


def _target_costs(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Repeat a call of the loss without its reduction, with the model's weights and label smoothing."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given = dict(zip(names, args, strict=False)) | kwargs | {"reduction": "none"}
    costs = func(**{key: given[key] for key in given if key not in ("size_average", "reduce")}).reshape(-1)
    target = given["target"]
    if target.is_floating_point():
        return costs.double()
    return costs[(target != given.get("ignore_index", -100)).reshape(-1)].double()


def forward_signals(
    engine: Engine,
    batches: Sequence[Batch],
    around: Around | None = None,
    begin: Begin | None = None,
    *,
    gradients: bool = False,
) -> Signals:
    """Run forwards, and backwards with `begin`, and return the signals of all ranks.

    `begin` computes the number at which each backward begins. `gradients` records a graph without a backward.
    Gradients stay in the engine, and no step is taken.
    """
    seen = Signals()
    with paths_in(engine.module) as path, torch.set_grad_enabled(gradients or begin is not None):
        for number, batch in enumerate(batches, engine.mesh.rank("data") * len(batches)):
            recorder = Recorder(path)
            with around(path) if around else nullcontext():
                torch.manual_seed(1_000_003 + number)  # dropout is the same in every run
                with recorder:
                    output = call_model(engine, batch)
                loss = loss_of(output, batch)
                start = begin(loss, recorder, number) if begin else None
            seen.losses.append(float(loss.detach()))
            seen.targets.append(-recorder.costs.detach().cpu())
            seen.routes.append(recorder.routes)
            seen.margins.append({key: margin.detach().cpu() for key, margin in recorder.margins.items()})
            if start is not None:
                engine.backward(start)
    whole = Signals()
    for each in engine.comm.all_gather_object(seen, "data"):
        for signal in fields(Signals):
            getattr(whole, signal.name).extend(getattr(each, signal.name))
    return whole


def backward_signals(engine: Engine, batches: Sequence[Batch], around: Around | None = None) -> Signals:
    """Run forwards and backwards from the loss."""
    return forward_signals(engine, batches, around, lambda loss, recorder, number: loss)


HALF_OF_NORMAL = 0.6745  # half of a normal distribution is within this many of its standard deviations


@dataclass(frozen=True, slots=True)
class CloseCalls:
    """Router margins that rounding may reverse, and their weight beside targets.

    A flip is not a first-order effect. But the number of flips grows with the distance by which rounding
    moves the margins near zero, which is one. So the cost of all flips is divided among cells in proportion
    to how far each moves these margins.
    """

    within: Mapping[str, float]  # router -> three times the distance by which its margins move
    weight: float  # change of log-probabilities per unit of margin


def close_calls(run: Signals, other: Signals) -> CloseCalls | None:
    """Compare two runs of the same micro-batches. Return None if no flip costs anything."""
    gaps = (run.values - other.values).abs()
    if not any(count for count, _ in router_flips(run, other).values()) or not bool(gaps.isfinite().all()):
        return None
    # Flips change a few targets by much, so the median is rounding alone.
    cost = float(gaps.square().mean()) - float(gaps.median() / HALF_OF_NORMAL) ** 2
    pairs: dict[str, list[torch.Tensor]] = {}
    for mine, theirs in zip(run.margins, other.margins, strict=True):
        for router, margin in mine.items():
            if router in theirs and theirs[router].shape == margin.shape:
                both = torch.stack([margin, theirs[router]])
                pairs.setdefault(router, []).append(both[:, both.isfinite().all(0)])
    within, square = {}, 0.0
    for router, found in pairs.items():
        margins, before = torch.cat(found, 1)
        if margins.numel():
            spread = float((margins - before).abs().median()) / HALF_OF_NORMAL
            within[router] = 3 * spread
            square += spread**2 * int((margins < 3 * spread).sum())
    return CloseCalls(within, math.sqrt(cost * len(gaps) / square)) if cost > 0 and square else None


def signed_costs(
    loss: torch.Tensor, recorder: Recorder, number: int, calls: CloseCalls | None = None
) -> torch.Tensor:
    """Sum the costs of targets, and the margins of close calls, with random signs. Then the expected square
    of a gradient is the sum of squares over targets."""
    if not recorder.negative:
        return loss
    generator = torch.Generator().manual_seed(7_000_003 + number)

    def signed(values: torch.Tensor) -> torch.Tensor:
        drawn = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8, device="cpu")
        return (values * (2 * drawn - 1).to(values.device, values.dtype)).sum()

    costs = recorder.costs
    whole = signed(costs)
    for router, margins in recorder.margins.items() if calls else ():
        if calls and router in calls.within and margins.requires_grad:
            whole = whole + calls.weight * signed(margins[margins.detach() < calls.within[router]])
    return whole / len(costs)
