"""The three passes of the shortlist, each a forward and a backward of every micro-batch.

1. The reference, watched: its signals, its gradients, and what the model's own code narrows.
2. The plan, watched: its signals, its gradients, and what every operation rounds, times the gradient of the
   loss: by how much it moves the loss.
3. The plan, watched again: the same times the gradient of the targets' log-probabilities with random signs,
   and of what routers almost chose otherwise: how far it moves them.

What rounding the stored values is worth comes from the gradients of the parameters, in both. Between 2 and 3
there is a forward that nobody watches.

Whole gradients are taken one parameter at a time: the largest parameter is what is held beside two engines.

Invariant: the watched plan has the bits of that forward, or the audit ends with an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, ZerodriftError
from zerodrift.inspect.trace.places import paths_in
from zerodrift.mesh import MeshShape
from zerodrift.numerics import signals, variants
from zerodrift.numerics.nouns import Estimate, GradientLine, Place
from zerodrift.numerics.operations import Key, Rounding, Roundings, Watch, Widened
from zerodrift.numerics.runs import Batch, Subject, running
from zerodrift.numerics.signals import CloseCalls, Drift, Signals
from zerodrift.numerics.variants import Choice
from zerodrift.plan.table import Plan, Row
from zerodrift.policy.nouns import Policy


@dataclass(slots=True)
class ThreePasses:
    """What the three passes left."""

    reference: Signals
    """Without what the model's own code narrows."""
    own: Drift
    planned: Signals
    total: Drift
    narrowed: frozenset[tuple[str, str]]
    """Module and line, of what the model's own code narrows."""
    estimates: list[Estimate] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    own_places: list[tuple[Rounding, float]] = field(default_factory=list)
    """What the model's own code narrows, each with its estimate."""
    planned_places: list[Rounding] = field(default_factory=list)
    gradients: list[GradientLine] = field(default_factory=list)
    cosine: float = 1.0
    seconds: float = 0.0
    used: frozenset[str] = frozenset()
    """Parameters that some operation of the reference made something of with a gradient, by first name."""
    ran: frozenset[str] = frozenset()
    """Modules that did something."""
    coarse: Mapping[str, str] = field(default_factory=dict)
    """Parameter whose values need a whole fp32 -> the narrower dtype that holds them all, or `""`."""


@dataclass(frozen=True, slots=True)
class Bench:
    """A subject, the policy that it is audited under, and the micro-batches of this rank."""

    subject: Subject
    policy: Policy
    """Without an optimizer, with one step over all micro-batches."""
    mesh: MeshShape
    batches: Sequence[Batch]

    def signals(self, policy: Policy, widened: frozenset[tuple[str, str]] = frozenset()) -> Signals:
        """Of forwards under a policy, without what the model's own code narrows at some places."""
        with running(self.subject.frozen(), policy, self.mesh) as engine:
            return gathered(engine, signals.signals(engine, self.batches, widening(widened)))


def widening(places: frozenset[tuple[str, str]]) -> signals.Around:
    """Around a forward: what the model's own code narrows at these places is left out."""
    if not places:
        return signals.plainly
    return lambda path: Widened(path, places)


def gathered(engine: Engine, mine: Signals) -> Signals:
    """Of all ranks, in their order."""
    told = (mine.losses, mine.targets, mine.routes, mine.margins)
    whole = Signals()
    for losses, targets, routes, margins in engine.comm.all_gather_object(told, "data"):
        whole.losses += losses
        whole.targets += targets
        whole.routes += routes
        whole.margins += margins
    return whole


def three_passes(bench: Bench) -> tuple[ThreePasses, Plan]:
    """See above; also the plan that was run."""
    began = time.perf_counter()
    wide = variants.reference(bench.policy)
    own = Roundings()
    with running(bench.subject, wide, bench.mesh) as reference:
        plain = signals.trained_signals(reference, bench.batches, _watching(reference, own))
        plain = gathered(reference, plain)
        true, places = plain, _whole(reference, own)
        narrowed = frozenset((place.module, place.line) for place in places)
        if narrowed:
            true = gathered(reference, signals.signals(reference, bench.batches, widening(narrowed)))
        _require_finite(true, reference)
        count = len(plain.values)
        with running(bench.subject, bench.policy, bench.mesh) as engine:
            constants, charged = _buffers(engine, reference), Roundings()
            watching = _watching(engine, charged, constants)
            planned = gathered(engine, signals.trained_signals(engine, bench.batches, watching))
            total = signals.drift(planned, true)
            passes = ThreePasses(true, signals.drift(plain, true), planned, total, narrowed)
            passes.gradients, passes.cosine = _gradients(engine, reference)
            scale = ToTargets(len(bench.batches), bench.mesh.data, count, engine.scaler.scale)

            def true_of(name: str) -> torch.Tensor:
                return reference.parameter(name).value.float()

            moves = _moves(engine, true_of, charged, scale)
            engine.zero_grad()
            alone = gathered(engine, signals.signals(engine, bench.batches, gradients=True))
            found = Roundings()
            calls = signals.close_calls(planned, true)
            again = gathered(engine, signed(engine, bench.batches, found, constants, calls))
            if not (_same(planned, alone) and _same(again, alone)):
                raise ZerodriftError(
                    "the audit",
                    "must leave the bits of a run as they are",
                    got="other log-probabilities where the same forward was watched",
                    do="Does the model draw from generators of its own, or keep state in a forward?",
                )
            estimate(passes, engine, true_of, found, scale, moves)
            values = ((row.name, true_of(row.name)) for row in engine.plan.rows if _holds_fp32(row))
            passes.coarse = {name: held for name, value in values if (held := held_by(value)) is not None}
            everyone = reference.comm.all_gather_object((own.used, own.ran), "data")
            passes.used = frozenset().union(*(used for used, _ in everyone))
            passes.ran = frozenset().union(*(ran for _, ran in everyone))
            passes.own_places = [(place, scale.of_own(place)) for place in places]
            passes.seconds = time.perf_counter() - began
            return passes, engine.plan


def _require_finite(seen: Signals, engine: Engine) -> None:
    """An error that names a parameter that is not finite, or the micro-batch whose loss is not."""
    if not all(map(math.isfinite, seen.losses)):
        for row in engine.plan.rows:
            if (
                row.columns.storage.dtype.is_floating
                and not engine.parameter(row.name).value.isfinite().all()
            ):
                raise ModelError(row.name, "must be finite", got="inf or nan")
    signals.require_finite(seen, "in the fp32 reference")


@dataclass(frozen=True, slots=True)
class ToTargets:
    """From squares of gradients, as a backward leaves them, to squares of log-probabilities."""

    batches: int
    ranks: int
    count: int
    """Targets of all ranks."""
    loss_scale: float

    @property
    def per_batch(self) -> float:
        return self.count / (self.batches * self.ranks)

    def of(self, square: float) -> float:
        """Of a gradient without a loss scale: every micro-batch's backward begins at a mean over its
        targets."""
        return square * self.per_batch**2 / self.count

    def of_place(self, place: Rounding) -> float:
        """Of a watched operation of the plan."""
        return self.of(place.square / self.loss_scale**2)

    def of_loss(self, place: Rounding) -> float:
        """By how much a watched operation of the plan moves the mean of all losses."""
        return place.signed / (self.loss_scale * self.batches * self.ranks)

    def of_own(self, place: Rounding) -> float:
        return math.sqrt(self.of(place.square))

    def of_parameter(self, square: float) -> float:
        """Of a parameter's gradient, which is a mean over micro-batches and ranks."""
        return self.of(square * (self.batches * self.ranks) ** 2)


def _holds_fp32(row: Row) -> bool:
    return row.source is DType.FP32 and row.columns.storage.dtype.is_floating


def held_by(values: torch.Tensor) -> str | None:
    """The narrower dtype that holds all of these values, as if they had been rounded to it once; `""` where
    none does, and None for values such as ones and powers of two, which tell nothing."""
    bits = values.float().contiguous().view(torch.int32)
    for dtype, kept in (("bf16", 16), ("fp16", 13)):
        if not bool((bits & ((1 << kept) - 1)).any()):
            # Of rounded values about half have the last bit that is kept.
            return dtype if float((bits >> kept & 1).float().mean()) > 1 / 3 else None
    return ""


def _watching(
    engine: Engine, found: Roundings, constants: dict[int, torch.Tensor] | None = None
) -> signals.Around:
    names = names_of(engine)
    return lambda path: Watch(engine.module, names, path, found, constants or {})


def names_of(engine: Engine) -> dict[int, str]:
    """Parameters by id."""
    return {
        id(parameter): row.name
        for name, parameter in engine.module.named_parameters()
        if (row := engine.plan.row(name)) is not None
    }


def _buffers(engine: Engine, reference: Engine) -> dict[int, torch.Tensor]:
    """What the plan has cast: buffers by id, and what they are in the reference."""
    true = dict(reference.module.named_buffers())
    return {
        id(buffer): true[name]
        for name, buffer in engine.module.named_buffers()
        if name in true and buffer.is_floating_point() and buffer.dtype is not true[name].dtype
    }


def signed(
    engine: Engine,
    batches: Sequence[Batch],
    found: Roundings,
    constants: dict[int, torch.Tensor],
    calls: CloseCalls | None = None,
) -> Signals:
    """The third pass."""
    seen, names = Signals(), names_of(engine)
    with paths_in(engine.module) as path:
        for number, batch in signals.numbered(engine, batches):
            with Watch(engine.module, names, path, found, constants):
                judged = signals.forward(engine, batch, number, path, seen)
                cost = signals.signed_costs(judged, number, calls)
            engine.backward(cost)
    return seen


def _same(one: Signals, other: Signals) -> bool:
    pairs = [(torch.tensor(one.losses), torch.tensor(other.losses))]
    pairs += zip(one.targets, other.targets, strict=True)
    return all(torch.equal(mine.nan_to_num(7e7), theirs.nan_to_num(7e7)) for mine, theirs in pairs)


# --- gradients ------------------------------------------------------------------------------------------


def _gradients(engine: Engine, reference: Engine) -> tuple[list[GradientLine], float]:
    """Of every trained parameter, and the cosine of all of them together."""
    lines, dot, mine, theirs = [], 0.0, 0.0, 0.0
    for row in engine.plan.rows:
        if not row.trained:
            continue
        gradient = engine.parameter(row.name).gradient.double()
        true = reference.parameter(row.name).gradient.double()
        inner, norm, size = float((gradient * true).sum()), float(true.norm()), float(gradient.norm())
        apart = float((gradient - true).norm())
        cosine = inner / (norm * size) if norm and size else float(norm == size)
        relative = apart / norm if norm else float(size > 0)
        lines.append(GradientLine(row.name, cosine, relative, norm, size))
        dot, mine, theirs = dot + inner, mine + size**2, theirs + norm**2
    return lines, dot / math.sqrt(mine * theirs) if mine and theirs else 1.0


def gradient_apart(bench: Bench, policy: Policy, other: Policy) -> dict[str, float]:
    """Parameter -> how far its gradient under one policy is from that under another, beside the other's."""
    with running(bench.subject, other, bench.mesh) as second:
        signals.trained_signals(second, bench.batches)
        with running(bench.subject, policy, bench.mesh) as first:
            signals.trained_signals(first, bench.batches)
            lines, _ = _gradients(first, second)
    return {line.name: line.relative for line in lines}


def rounded_on_the_wire(bench: Bench, wires: Mapping[str, torch.dtype]) -> dict[str, float]:
    """Parameter -> what the wire would take of its gradient if every micro-batch were another rank's."""
    whole: dict[str, torch.Tensor] = {}
    errors: dict[str, torch.Tensor] = {}
    with running(bench.subject, bench.policy, bench.mesh) as engine:
        for batch in bench.batches:
            signals.trained_signals(engine, [batch])
            for name, wire in wires.items():
                gradient = engine.parameter(name).gradient
                error = gradient.to(wire).to(gradient.dtype) - gradient
                whole[name] = whole[name] + gradient if name in whole else gradient
                errors[name] = errors[name] + error if name in errors else error
            engine.zero_grad()
    norms = {name: float(total.double().norm()) for name, total in whole.items()}
    return {name: float(errors[name].double().norm()) / norm for name, norm in norms.items() if norm}


# --- estimates ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moves:
    """By how much the mean loss is moved, to first order."""

    stored: Mapping[str, float]
    """Parameter -> by the rounding of its values."""
    places: Mapping[Key, float]
    """By what is rounded at one place."""


def _moves(
    engine: Engine, true_of: Callable[[str], torch.Tensor], found: Roundings, scale: ToTargets
) -> Moves:
    """From the gradients that the loss left."""
    stored = {row.name: float(effect.sum()) for row, effect in _effects(engine, true_of)}
    return Moves(stored, {place.key: scale.of_loss(place) for place in _whole(engine, found)})


def _effects(engine: Engine, true_of: Callable[[str], torch.Tensor]) -> Iterator[tuple[Row, torch.Tensor]]:
    """Of every parameter with a narrow forward: its gradient times what is rounded of its values."""
    for row in engine.plan.rows:
        cells = variants.narrow_cells(row.columns)
        if row.trained and {"storage", "compute"} & set(cells):
            handle, true = engine.parameter(row.name), true_of(row.name)
            seen = handle.value if "storage" in cells else true.to(row.columns.compute.torch)
            yield row, (handle.gradient * (seen.float() - true)).double()


def estimate(
    passes: ThreePasses,
    engine: Engine,
    true_of: Callable[[str], torch.Tensor],
    found: Roundings,
    scale: ToTargets,
    moves: Moves | None = None,
) -> None:
    """What every cell and every place is worth; `true_of` has a parameter's values before they are
    rounded."""
    plan = engine.plan
    owners = _owners(engine.module, plan)
    computing: dict[str, float] = {}
    computed: dict[str, float] = {}
    for place in _whole(engine, found):
        passes.planned_places.append(place)
        charged = place.parameter or owners.get(place.module, "")
        square = scale.of_place(place)
        loss = None if moves is None else moves.places.get(place.key, 0.0)
        if charged and not place.constant:
            computing[charged] = computing.get(charged, 0.0) + square
            computed[charged] = computed.get(charged, 0.0) + (loss or 0.0)
        elif square:
            where = place.module, place.operation, place.line, place.dtype
            passes.places.append(Place(*where, math.sqrt(square), place.relative, place.typical, loss))
    passes.places.sort(key=lambda place: -place.rms)
    stored: dict[str, float] = {}
    for row, effect in _effects(engine, true_of):
        stored[row.name] = scale.of_parameter(float(effect.square().sum()))
        if "storage" in variants.narrow_cells(row.columns):
            loss = None if moves is None else moves.stored[row.name]
            choice = Choice(row.name, "storage", (row.name,))
            passes.estimates.append(Estimate(choice, stored[row.name], loss))
    for names in _modules(plan):
        # What goes in is rounded like what comes out, and so are the values.
        square = sum(stored.get(name, 0.0) + 2 * computing.get(name, 0.0) for name in names)
        loss = None
        if moves is not None:
            loss = sum(moves.stored.get(name, 0.0) + computed.get(name, 0.0) for name in names)
        passes.estimates.append(Estimate(Choice(names[0], "compute", names), square, loss))
    passes.estimates.sort(key=lambda estimate: -estimate.square)


def _modules(plan: Plan) -> list[tuple[str, ...]]:
    """The parameters of each module that computes in a narrow dtype, the largest first."""
    owned: dict[str, list[Row]] = {}
    for row in plan.rows:
        if "compute" in variants.narrow_cells(row.columns):
            owned.setdefault(row.name.rpartition(".")[0], []).append(row)
    return [
        tuple(row.name for row in sorted(rows, key=lambda row: -row.whole_numel)) for rows in owned.values()
    ]


def _owners(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Path of a module that has parameters of its own -> the first name of its largest."""
    owners = {}
    for path, module in model.named_modules():
        own = sorted(module.named_parameters(path, recurse=False), key=lambda pair: -pair[1].ndim)
        row = plan.row(own[0][0]) if own else None
        if row is not None:
            owners[path] = row.name
    return owners


def _whole(engine: Engine, found: Roundings) -> list[Rounding]:
    """The places of all ranks, added up."""
    everyone: list[dict[Any, Rounding]] = engine.comm.all_gather_object(found.places, "data")
    whole = Roundings()
    for places in everyone:
        for place in places.values():
            into = whole.at(place.module, place.operation, place.line, place.parameter)
            into.dtype, into.constant = place.dtype, place.constant
            for name in ("calls", "square", "signed", "error", "size", "saturated", "vanished", "numel"):
                setattr(into, name, getattr(into, name) + getattr(place, name))
    return list(whole.places.values())
