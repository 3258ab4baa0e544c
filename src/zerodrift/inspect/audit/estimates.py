"""Estimate the worth of every cell in three passes, each a forward and a backward of every micro-batch.

The first pass runs the reference. The second runs the plan and multiplies the errors of each operation by the
gradient of the loss. The third multiplies them by the gradient of the targets' log-probabilities with random
signs, and of close calls of routers. The worth of rounding stored values comes from the gradients of
parameters. `probe` is the third pass alone, between two steps of training.

Invariant: recording does not change the bits of a forward, or the audit ends with an error. A probe does not
change the bits of a training run.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from zerodrift.dtypes import DType
from zerodrift.engine import Engine, generators_kept
from zerodrift.errors import ModelError, UnsupportedError, ZerodriftError
from zerodrift.inspect.audit import runs
from zerodrift.inspect.audit.results import Estimate, GradientLine, Place
from zerodrift.inspect.audit.rounding import Key, Rounding, RoundingRecorder, Roundings, Widener
from zerodrift.inspect.audit.runs import Around, Drift, Signals, Subject, running
from zerodrift.inspect.audit.tokens import Batch
from zerodrift.inspect.audit.variants import Choice, narrow_cells, reference_policy
from zerodrift.kernels import narrow
from zerodrift.mesh import MeshShape
from zerodrift.plan import Plan, Row
from zerodrift.policy import LossScale, Policy

Values = Callable[[str], Tensor]  # parameter -> its values before they are rounded


@dataclass(slots=True)
class PassResults:
    reference: Signals  # run in fp32, without the model's own casts to narrower dtypes
    own: Drift  # drift that the model's own casts cause
    planned: Signals
    total: Drift
    narrowed: frozenset[tuple[str, str]]  # (module, line) of the model's own casts
    estimates: list[Estimate] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    own_places: list[tuple[Rounding, float]] = field(default_factory=list)  # own casts, with estimated rms
    planned_places: list[Rounding] = field(default_factory=list)
    gradients: list[GradientLine] = field(default_factory=list)
    cosine: float = 1.0  # cosine of all gradients with the reference's
    seconds: float = 0.0
    used: frozenset[str] = frozenset()  # parameters that went into a result with a gradient
    ran: frozenset[str] = frozenset()  # modules that ran an operation
    coarse: dict[str, str] = field(default_factory=dict)
    """fp32 parameter -> the narrower dtype that holds all its values, or `""`."""


@dataclass(frozen=True, slots=True)
class AuditSetup:
    """A subject, its policy without an optimizer, and the micro-batches of this rank."""

    subject: Subject
    policy: Policy
    mesh: MeshShape
    batches: Sequence[Batch]

    def signals(self, policy: Policy, widened: frozenset[tuple[str, str]] = frozenset()) -> Signals:
        """Run forwards under a policy, without the model's own casts at `widened`."""
        with running(self.subject, policy, self.mesh) as engine:
            around = (lambda path: Widener(path, widened)) if widened else None
            return runs.forward_signals(engine, self.batches, around)


def settle_loss_scale(setup: AuditSetup, scale: LossScale) -> LossScale:
    """Return a dynamic loss scale that begins where no gradient of the micro-batches overflows, as a run
    reaches it by skipping steps."""
    with running(setup.subject, setup.policy, setup.mesh) as engine:
        trained = [row.name for row in engine.plan.rows if row.trained]
        while engine.scaler.scale > scale.minimum:
            seen = runs.backward_signals(engine, setup.batches)
            finite = all(bool(engine.parameter(name).gradient.isfinite().all()) for name in trained)
            if finite or not all(map(math.isfinite, seen.losses)):
                break
            engine.zero_grad()
            engine.scaler.scale = max(engine.scaler.scale / 2, scale.minimum)
        return replace(scale, initial=engine.scaler.scale)


def run_three_passes(setup: AuditSetup) -> tuple[PassResults, Plan]:
    """Run the passes, and return their results and the plan that was run."""
    began = time.perf_counter()
    own, batches = Roundings(), setup.batches
    with running(setup.subject, reference_policy(setup.policy), setup.mesh) as reference:
        plain = true = runs.backward_signals(reference, batches, _recording(reference, own))
        places = _sum_over_ranks(reference, own)
        narrowed = frozenset((place.module, place.line) for place in places)
        if narrowed:
            true = runs.forward_signals(reference, batches, lambda path: Widener(path, narrowed))
        _require_finite(true, reference)
        with running(setup.subject, setup.policy, setup.mesh) as engine:
            by_loss, buffers = Roundings(), dict(reference.module.named_buffers())
            constants = {  # buffers that the plan casts, and their values in the reference
                id(buffer): buffers[name]
                for name, buffer in engine.module.named_buffers()
                if buffer.is_floating_point() and buffer.dtype is not buffers.get(name, buffer).dtype
            }
            planned = runs.backward_signals(engine, batches, _recording(engine, by_loss, constants))
            total = runs.drift(planned, true)
            results = PassResults(true, runs.drift(plain, true), planned, total, narrowed)
            results.gradients, results.cosine = _compare_gradients(engine, reference)
            scale = TargetScale(len(batches), setup.mesh.data, len(plain.values), engine.scaler.scale)

            def true_values(name: str) -> Tensor:
                return reference.parameter(name).value.float()

            stored = {row.name: float(effect.sum()) for row, effect in _effects(engine, true_values)}
            moved = {place.key: scale.loss(place) for place in _sum_over_ranks(engine, by_loss)}
            engine.zero_grad()
            alone = runs.forward_signals(engine, batches, gradients=True)
            found = Roundings()
            begin = functools.partial(runs.signed_costs, calls=runs.close_calls(planned, true))
            again = runs.forward_signals(engine, batches, _recording(engine, found, constants), begin)
            if not (_is_same(planned, alone) and _is_same(again, alone)):
                must = "must not change the bits of a run"
                got = "other log-probabilities in a watched forward"
                do = "Does the model draw from generators of its own, or keep state in a forward?"
                raise ZerodriftError("the audit", must, got=got, do=do)
            estimated = _estimate(engine, true_values, found, scale, stored, moved)
            results.estimates, results.places, results.planned_places = estimated
            whole = (row.name for row in engine.plan.rows if row.source is DType.FP32)
            held = {name: narrower_dtype_of(true_values(name)) for name in whole}
            results.coarse = {name: dtype for name, dtype in held.items() if dtype is not None}
            everyone = reference.comm.all_gather_object((own.used, own.ran), "data")
            results.used = frozenset().union(*(used for used, _ in everyone))
            results.ran = frozenset().union(*(ran for _, ran in everyone))
            results.own_places = [(place, math.sqrt(scale.square(place.square))) for place in places]
            results.seconds = time.perf_counter() - began
            return results, engine.plan


def _require_finite(seen: Signals, engine: Engine) -> None:
    """Name a parameter that is not finite, or else the first micro-batch whose loss is not."""
    for number, loss in enumerate(seen.losses):
        if math.isfinite(loss):
            continue
        for row in engine.plan.rows:
            floating = row.columns.storage.dtype.is_floating
            if floating and not engine.parameter(row.name).value.isfinite().all():
                raise ModelError(row.name, "must be finite", got="inf or nan")
        must, do = "must have a finite loss in the fp32 reference", "Look at the batch and at the weights."
        raise ModelError(f"batches[{number}]", must, got=loss, do=do)


def narrower_dtype_of(values: Tensor) -> str | None:
    """Return the narrower dtype that values were rounded to before, or `""` if no narrower dtype holds them.
    Return None for values such as ones and powers of two, which every dtype holds."""
    bits = values.float().contiguous().view(torch.int32)
    for dtype, dropped in (("bf16", 16), ("fp16", 13)):
        if not bool((bits & ((1 << dropped) - 1)).any()):
            # In about half of rounded values the last bit of the narrower dtype is set.
            return dtype if float((bits >> dropped & 1).float().mean()) > 1 / 3 else None
    return ""


def _recording(engine: Engine, found: Roundings, constants: Mapping[int, Tensor] | None = None) -> Around:
    names = {
        id(parameter): row.name
        for name, parameter in engine.module.named_parameters()
        if (row := engine.plan.row(name)) is not None
    }
    return lambda path: RoundingRecorder(engine.module, names, path, found, constants or {})


def _is_same(one: Signals, other: Signals) -> bool:
    pairs = [(torch.tensor(one.losses), torch.tensor(other.losses))]
    pairs += zip(one.targets, other.targets, strict=True)
    return all(torch.equal(mine.nan_to_num(7e7), theirs.nan_to_num(7e7)) for mine, theirs in pairs)


def _sum_over_ranks(engine: Engine, found: Roundings) -> list[Rounding]:
    whole = Roundings()
    for places in engine.comm.all_gather_object(found.places, "data"):
        for place in places.values():
            into = whole.at(*place.key)
            into.dtype, into.constant = place.dtype, place.constant
            into.add(place)
    return list(whole.places.values())


def _compare_gradients(engine: Engine, reference: Engine) -> tuple[list[GradientLine], float]:
    """Compare the gradient of each trained parameter. Return also the cosine of all of them together."""
    lines, dot, mine, theirs = [], 0.0, 0.0, 0.0
    for row in engine.plan.rows:
        if not row.trained:
            continue
        gradient = engine.parameter(row.name).gradient.double()
        true = reference.parameter(row.name).gradient.double()
        inner, norm, size = float((gradient * true).sum()), float(true.norm()), float(gradient.norm())
        gap = float((gradient - true).norm())
        cosine = inner / (norm * size) if norm and size else float(norm == size)
        relative = gap / norm if norm else float(size > 0)
        lines.append(GradientLine(row.name, cosine, relative, norm, size))
        dot, mine, theirs = dot + inner, mine + size**2, theirs + norm**2
    return lines, dot / math.sqrt(mine * theirs) if mine and theirs else 1.0


def gradient_distances(setup: AuditSetup, policy: Policy, other: Policy) -> dict[str, float]:
    """Return by parameter the distance between its gradients under two policies, over the norm of the
    second."""
    with running(setup.subject, other, setup.mesh) as second:
        runs.backward_signals(second, setup.batches)
        with running(setup.subject, policy, setup.mesh) as first:
            runs.backward_signals(first, setup.batches)
            lines, _ = _compare_gradients(first, second)
    return {line.name: line.relative for line in lines}


def wire_rounding(setup: AuditSetup, wires: Mapping[str, DType]) -> dict[str, float]:
    """Return by parameter the error of its gradient over the norm, if each micro-batch is sent by a rank of
    its own in the wire's dtype."""
    sums: dict[str, Tensor] = {}  # sums over micro-batches of a gradient and of its error. Shape [2, ...]
    with running(setup.subject, setup.policy, setup.mesh) as engine:
        for batch in setup.batches:
            runs.backward_signals(engine, [batch])
            for name, wire in wires.items():
                gradient = engine.parameter(name).gradient
                both = torch.stack([gradient, _rounded(gradient, wire) - gradient])
                sums[name] = sums[name] + both if name in sums else both
            engine.zero_grad()
    norms = {name: [float(one.double().norm()) for one in both] for name, both in sums.items()}
    return {name: error / norm for name, (norm, error) in norms.items() if norm}


def _rounded(values: Tensor, dtype: DType) -> Tensor:
    if dtype.format is not None:
        return narrow.round_trip(dtype, values)
    return values.to(dtype.torch).to(values.dtype)


@dataclass(frozen=True, slots=True)
class TargetScale:
    """Converts squares of gradients to squares of log-probabilities."""

    batches: int
    ranks: int
    targets: int  # targets of all ranks
    loss_scale: float

    def square(self, square: float) -> float:
        """Convert the square of a gradient of a mean over the targets of a micro-batch."""
        return square * (self.targets / (self.batches * self.ranks)) ** 2 / self.targets

    def loss(self, place: Rounding) -> float:
        """Return the change of the mean loss by a place of the plan."""
        return place.signed / (self.loss_scale * self.batches * self.ranks)


def _effects(engine: Engine, true_values: Values) -> Iterator[tuple[Row, Tensor]]:
    """Yield the parameters with a narrow forward, with gradient times rounding error."""
    for row in engine.plan.rows:
        cells = narrow_cells(row.columns)
        if row.trained and {"storage", "compute"} & set(cells):
            handle, true = engine.parameter(row.name), true_values(row.name)
            rounded = handle.value if "storage" in cells else true.to(row.columns.compute.torch)
            yield row, (handle.gradient * (rounded.float() - true)).double()


def _estimate(
    engine: Engine,
    true_values: Values,
    found: Roundings,
    scale: TargetScale,
    stored_moves: Mapping[str, float],
    place_moves: Mapping[Key, float],
) -> tuple[list[Estimate], list[Place], list[Rounding]]:
    """Return the worth of every cell, of every place without a parameter to charge, and the roundings of all
    places.

    `stored_moves` and `place_moves` are first-order changes of the mean loss: by rounding the values of a
    parameter, and by the errors at a place.
    """
    plan, whole = engine.plan, _sum_over_ranks(engine, found)
    estimates: list[Estimate] = []
    places: list[Place] = []
    owners: dict[str, str] = {}
    for path, module in engine.module.named_modules():
        own = sorted(module.named_parameters(path, recurse=False), key=lambda pair: -pair[1].ndim)
        if own and (row := plan.row(own[0][0])) is not None:
            owners[path] = row.name
    computed: dict[str, tuple[float, float]] = {}
    for place in whole:
        parameter = place.parameter or owners.get(place.module, "")
        square = scale.square(place.square / scale.loss_scale**2)
        loss = place_moves.get(place.key, 0.0)
        if parameter and not place.constant:
            before, lost = computed.get(parameter, (0.0, 0.0))
            computed[parameter] = before + square, lost + loss
        elif square:
            where = place.module, place.operation, place.line, place.dtype
            places.append(Place(*where, math.sqrt(square), place.relative, place.typical, loss))
    places.sort(key=lambda place: -place.rms)
    stored: dict[str, float] = {}
    for row, effect in _effects(engine, true_values):
        # The gradient of a parameter is a mean over micro-batches and ranks.
        stored[row.name] = float(effect.square().sum()) * scale.targets
        if "storage" in narrow_cells(row.columns):
            choice = Choice(row.name, "storage", (row.name,))
            estimates.append(Estimate(choice, stored[row.name], stored_moves.get(row.name, 0.0)))
    modules: dict[str, list[Row]] = {}
    for row in plan.rows:
        if "compute" in narrow_cells(row.columns):
            modules.setdefault(row.name.rpartition(".")[0], []).append(row)
    for rows in modules.values():
        names = tuple(row.name for row in sorted(rows, key=lambda row: -row.whole_numel))
        square = loss = 0.0
        for name in names:
            operations, lost = computed.get(name, (0.0, 0.0))
            square += stored.get(name, 0.0) + 2 * operations  # as much again for rounding the inputs
            loss += stored_moves.get(name, 0.0) + lost
        estimates.append(Estimate(Choice(names[0], "compute", names), square, loss))
    estimates.sort(key=lambda estimate: -estimate.square)
    return estimates, places, whole


@dataclass(frozen=True, slots=True)
class PrecisionProbe:
    """Estimates at one step of a training run."""

    rms: float  # of all together, if they are independent of each other
    cells: tuple[tuple[str, str, float], ...]  # (parameter, cell, rms), the largest first
    places: tuple[tuple[str, str, str, float], ...]
    """(module, line, operation, rms) without a parameter to charge."""


def require_probe(plan: Plan) -> None:
    """Refuse a run that cannot be probed."""
    policy = plan.policy
    reasons = {
        "a pipeline": policy.pipeline is not None,
        f"backend {policy.backend}": policy.backend != "native",
        "`reduce.order: tree`": policy.requires_tree,
    }
    if got := next((reason for reason, holds in reasons.items() if holds), ""):
        must = "must be left out: it looks at whole micro-batches on the native backend"
        raise UnsupportedError("audit.at", must, got=got, do="Audit a checkpoint: `zerodrift audit`.")


_PROBED = 12
"""Most parameters in a probe, and most places."""


def probe(engine: Engine, batches: Sequence[Batch]) -> PrecisionProbe:
    """Estimate between two steps with the micro-batches of a step. All ranks must call it."""
    found = Roundings()
    before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    with generators_kept(engine.mesh.device):
        try:
            seen = runs.forward_signals(engine, batches, _recording(engine, found), runs.signed_costs)
            scale = TargetScale(len(batches), engine.plan.mesh.data, len(seen.values), engine.scaler.scale)
            masters: Values = lambda name: engine.parameter(name).master  # noqa: E731
            estimates, places, _ = _estimate(engine, masters, found, scale, {}, {})
        finally:
            engine.zero_grad()
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.copy_(before[name])
    # The estimate of `compute` includes that of `storage`.
    counted = [each for each in estimates if each.choice.cell == "compute"] or estimates
    square = sum(each.square for each in counted) + sum(place.rms**2 for place in places)
    return PrecisionProbe(
        math.sqrt(square) if math.isfinite(square) else math.inf,
        tuple((each.choice.names[0], each.choice.cell, each.rms) for each in estimates[:_PROBED]),
        tuple((place.module, place.line, place.operation, place.rms) for place in places[:_PROBED]),
    )
