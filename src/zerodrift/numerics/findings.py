"""What is not as it should be, by name, what weighs most first.

A low-precision run rounds everywhere, and that is what its mode is for. A finding is what the mode does not
explain: the model's own code that narrows although nobody asked, numbers that leave a dtype's range, cells
narrower than the mode, a small tensor that is worth a large part of the drift, gradients and updates that
rounding takes away.

Invariant: pure over what was measured, and each finding says what, where, how much, and how to mend it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from zerodrift.numerics.measure import ThreePasses
from zerodrift.numerics.nouns import (
    AuditFinding,
    FindingKind,
    GradientLine,
    Replayed,
    UpdateCost,
)
from zerodrift.numerics.operations import HALF, Rounding
from zerodrift.numerics.runs import Subject
from zerodrift.plan.table import Plan, Row
from zerodrift.report.figures import percent

VANISHED = 0.25
"""Of the norm of what an operation should leave: what may be lost where numbers become zero. A softmax has
small numbers that vanish, and loses nothing by it."""

NOISE = 2e-6
"""Drift below this is that of fp32 itself."""

GRADIENT = 1e-3
"""Of a gradient's norm: what `accumulate` may take. It is fp32 in every mode."""

FAINT = 1e-4
"""Of the norm of all gradients: below it a gradient is what rounding left of zero, as of a key's bias."""

LOST = 0.05
"""Of the elements that were to change: what may be lost."""

STUCK = 0.5
"""Of the elements of a moment: what may not shrink."""

SMALL = 0.05
"""Of the model's elements: what is small."""

LARGE = 0.25
"""Of the squared drift, or of the flips: what is a large part."""

ROUTED = 0.002
"""Of all choices of routers: flips that one cell may cause."""


def findings(
    plan: Plan,
    subject: Subject,
    passes: ThreePasses,
    gradients: Sequence[GradientLine],
    updates: Sequence[UpdateCost],
    replayed: Sequence[Replayed],
) -> list[AuditFinding]:
    """All of a plan that was audited."""
    found = [
        *_overflow(passes),
        *_underflow(passes),
        *_own(passes),
        *_buffers(plan, subject),
        *_rounded_before(passes),
        *_narrower_than_mode(plan, passes, replayed),
        *_routing(plan, passes, replayed),
        *_outliers(plan, passes, replayed),
        *_columns(plan, gradients),
        *_scaled(plan, subject, gradients),
        *_updates(updates),
        *_no_gradient(plan, gradients, passes),
        *_untied(plan, subject),
    ]
    return sorted(_first_of_each(found), key=lambda finding: -finding.weight)


def _first_of_each(found: Sequence[AuditFinding]) -> Iterator[AuditFinding]:
    """What weighs most of what is said of the same parameter's forward, or of the same place."""
    seen: set[tuple[str, str]] = set()
    for finding in sorted(found, key=lambda finding: -finding.weight):
        kind = "forward" if finding.kind in ("rounded", "routing") else finding.kind
        key = (kind, finding.where)
        if key not in seen:
            seen.add(key)
            yield finding


# --- the model's own code ------------------------------------------------------------------------------


def _overflow(passes: ThreePasses) -> Iterator[AuditFinding]:
    own = [place for place, _ in passes.own_places]
    for place in (*own, *passes.planned_places):
        if place.saturated:
            yield AuditFinding(
                "overflow",
                _where(place),
                f"{place.saturated} of {place.numel} numbers of `{place.operation}` are beyond the range of "
                f"{place.dtype}, and finite in fp32",
                "Compute it in fp32 or bf16: pin what it computes with, or leave out the cast before it.",
                1e6 + place.saturated / max(1, place.numel),
                (place.parameter,) if place.parameter else (),
            )


def _underflow(passes: ThreePasses) -> Iterator[AuditFinding]:
    """Where numbers become zero, and much of what should come out is lost by it."""
    for place in passes.planned_places:
        if place.vanished and not place.saturated and place.relative > VANISHED:
            yield AuditFinding(
                "underflow",
                _where(place),
                f"{place.vanished} of {place.numel} numbers of `{place.operation}` are too small for "
                f"{place.dtype} and become zero: {percent(min(place.relative, 1.0))} of what comes out",
                "Compute it in fp32 or bf16: pin what it computes with, or leave out the cast before it.",
                1e5 + place.relative,
                (place.parameter,) if place.parameter else (),
            )


def _own(passes: ThreePasses) -> Iterator[AuditFinding]:
    """What the model's code narrows in the fp32 reference, where nothing else does."""
    if not passes.own_places:
        return
    for place, rms in _by_line(passes):
        if place.error == 0:
            continue
        yield AuditFinding(
            "narrow code",
            _where(place),
            f"the model itself computes `{place.operation}` in {place.dtype}, whatever the plan says: "
            f"{place.relative:.2g} of what comes out is lost, {_estimated(rms)}",
            "Leave out the cast, or cast to the dtype of what comes in.",
            1e3 + min(rms, 1e3),
            (place.parameter,) if place.parameter else (),
        )


def _estimated(rms: float) -> str:
    if math.isfinite(rms):
        return f"an estimated {rms:.2g} of a log-probability"
    return "and its gradient is not finite"


def _by_line(passes: ThreePasses) -> list[tuple[Rounding, float]]:
    """The first place of every module that loses something: what comes after it works with what it left."""
    first: dict[str, tuple[Rounding, float]] = {}
    for place, estimated in passes.own_places:
        if place.error == 0:
            continue
        rms = estimated if math.isfinite(estimated) else math.inf
        if place.module not in first or rms > 3 * first[place.module][1]:
            first[place.module] = (place, rms)
    return sorted(first.values(), key=lambda pair: -pair[1])


def _where(place: Rounding) -> str:
    module = place.module or "the model"
    return f"{module} at {place.line}" if place.line else module


def _buffers(plan: Plan, subject: Subject) -> Iterator[AuditFinding]:
    for row in plan.buffers:
        if row.source.is_floating and row.source.torch in HALF:
            yield AuditFinding(
                "narrow buffer",
                row.name,
                f"the model holds it in {row.source}: what it was before cannot be had back",
                "Register it in fp32; a module computes with it as it is.",
                900.0,
            )
        elif row.storage.is_floating and row.storage.torch in HALF:
            yield AuditFinding(
                "narrow buffer",
                row.name,
                f"the plan casts it from {row.source} to {row.storage} ({row.why})",
                "Set `precision.buffers: keep`.",
                800.0,
            )


# --- cells of a forward --------------------------------------------------------------------------------


def _rounded_before(passes: ThreePasses) -> Iterator[AuditFinding]:
    """Values that were rounded before the run, among others that were not."""
    before = [name for name, held in passes.coarse.items() if held]
    if 2 * len(before) >= len(passes.coarse):
        return
    for name in before:
        held = passes.coarse[name]
        yield AuditFinding(
            "rounded",
            name,
            f"its values are numbers of {held}, held in fp32: they were rounded before the run, and those of "
            f"{len(passes.coarse) - len(before)} other parameters were not",
            "Take them from where they are whole: a cast and a cast back lose what lies between.",
            90.0,
            (name,),
        )


def _narrower_than_mode(
    plan: Plan, passes: ThreePasses, replayed: Sequence[Replayed]
) -> Iterator[AuditFinding]:
    """Cells that a rule has made narrower than the mode has them."""
    mode = plan.policy.mode.dtype
    for row in plan.rows:
        columns = row.columns
        narrow = [
            (cell, dtype)
            for cell, dtype in (
                ("storage", columns.storage.dtype),
                ("gather", columns.gather),
                ("compute", columns.compute),
            )
            if dtype.is_floating and not dtype.holds(mode)
        ]
        if not narrow:
            continue
        alone = max(
            [each.alone.rms for each in replayed if row.name in each.choice.names]
            + [e.rms for e in passes.estimates if row.name in e.choice.names],
            default=0.0,
        )
        if alone > NOISE or any(each.alone.flips for each in replayed if row.name in each.choice.names):
            cells = ", ".join(f"`{cell}` {dtype}" for cell, dtype in narrow)
            yield AuditFinding(
                "rounded",
                row.name,
                f"{cells} where the mode has {mode}: {alone:.2g} of a log-probability",
                "Leave the column out of the rule, or pin the parameter.",
                100.0 + alone,
                (row.name,),
            )


def _routing(plan: Plan, passes: ThreePasses, replayed: Sequence[Replayed]) -> Iterator[AuditFinding]:
    """A router that is computed in 16 bits and chooses other experts for it."""
    routers = {key.rpartition("#")[0] for routes in passes.reference.routes for key in routes}
    for each in replayed:
        name = each.choice.names[0]
        module = name.rpartition(".")[0]
        many = each.alone.flips >= max(ROUTED * each.alone.choices, LARGE * passes.total.flips, 1)
        if many and any(module == path or module.startswith(f"{path}.") for path in routers):
            share = each.alone.flips / max(1, each.alone.choices)
            yield AuditFinding(
                "routing",
                name,
                f"`{each.choice.cell}` in 16 bits alone sends {each.alone.flips} of {each.alone.choices} "
                f"choices to other experts ({percent(share)})",
                'Pin it: `{match: "' + name + '", pin: fp32}`.',
                50.0 + share,
                (name,),
            )


def _outliers(plan: Plan, passes: ThreePasses, replayed: Sequence[Replayed]) -> Iterator[AuditFinding]:
    """Small, and worth a large part of the drift."""
    whole = sum(row.whole_numel for row in plan.rows)
    for each in replayed:
        row = plan.row(each.choice.names[0])
        if row is None or row.whole_numel > SMALL * whole or not passes.total.square:
            continue
        removed = 1 - each.widened.square / passes.total.square
        share = each.alone.square / passes.total.square
        if removed > LARGE and share > LARGE and each.alone.rms > NOISE:
            yield AuditFinding(
                "rounded",
                row.name,
                f"`{each.choice.cell}` is worth {percent(min(1.0, share))} of the squared drift, with "
                f"{percent(row.whole_numel / whole)} of the elements; in fp32 {percent(removed)} is gone",
                f'Pin it: `{{match: "{row.name}", pin: fp32}}`.',
                20.0 + removed,
                (row.name,),
            )


# --- gradients and updates -----------------------------------------------------------------------------


def _columns(plan: Plan, gradients: Sequence[GradientLine]) -> Iterator[AuditFinding]:
    """What `accumulate` and `reduce` take of gradients."""
    accumulated = {line.name: line.accumulate for line in gradients if line.accumulate > GRADIENT}
    yield from _together(
        "accumulate",
        accumulated,
        lambda worst: f"`accumulate` takes {percent(min(worst, 9.99))} of the gradient's norm",
        "Set `precision.accumulate: fp32`.",
        70.0,
    )
    reduced = {line.name: line.reduce for line in gradients if line.reduce > _once(plan, line.name)}
    how = "" if plan.mesh.data > 1 else ", taking every micro-batch for another rank's"
    yield from _together(
        "reduce",
        reduced,
        lambda worst: (
            f"`reduce` takes {percent(min(worst, 9.99))} of the gradient's norm{how}: "
            "gradients of ranks are rounded, and then cancel"
        ),
        "Set `precision.reduce: fp32`, or `{wire: fp32, sum: fp32}` for it.",
        70.0,
    )


def _once(plan: Plan, name: str) -> float:
    """What rounding the gradient of every rank once takes at most, of gradients that do not cancel."""
    row = plan.row(name)
    update = None if row is None else row.columns.update
    if update is None:
        return 0.0
    wire = min((update.reduce.wire, update.reduce.sum), key=lambda dtype: dtype.size)
    return torch.finfo(wire.torch).eps / 2


def _together(
    kind: FindingKind, worth: Mapping[str, float], what: Callable[[float], str], do: str, weight: float
) -> Iterator[AuditFinding]:
    """One finding of all parameters that have the same, by the name of the worst."""
    if worth:
        names = sorted(worth, key=lambda name: -worth[name])
        more = f"; and {len(names) - 1} more parameters" if len(names) > 1 else ""
        worst = worth[names[0]]
        yield AuditFinding(kind, names[0], what(worst) + more, do, weight + worst, tuple(names))


def _scaled(plan: Plan, subject: Subject, gradients: Sequence[GradientLine]) -> Iterator[AuditFinding]:
    """Gradients of another length than in the reference, of the same forward: rounding alone turns a gradient
    a little, and neither halves nor doubles it."""
    whole = math.sqrt(sum(line.norm**2 for line in gradients))
    wrong = {
        line.name: line
        for line in gradients
        if line.norm > FAINT * whole and not 0.5 < line.cosine * line.size / line.norm < 2
    }
    if not wrong:
        return
    last = [name for name, _ in subject.make().named_parameters() if name in wrong][-1]
    line = wrong[last]
    more = f"; so are {len(wrong) - 1} more, and a backward comes by this one first" if len(wrong) > 1 else ""
    scale = plan.policy.loss_scale
    do = "Look for a hook or a clip that works on gradients in the backward"
    if scale is not None:
        do += f", where they are multiplied by the loss scale, {scale.initial:g} at first"
    yield AuditFinding(
        "gradient",
        last,
        f"its gradient is {line.size / line.norm:.2g} times as long as in fp32, with cosine {line.cosine:.2g}"
        f"{more}",
        f"{do}; in fp16, gradients below 6e-8 vanish: a larger loss scale keeps them.",
        80.0,
        tuple(wrong),
    )


def _updates(updates: Sequence[UpdateCost]) -> Iterator[AuditFinding]:
    yield from _together(
        "lost updates",
        {cost.name: cost.lost for cost in updates if cost.lost > LOST},
        lambda worst: (
            f"{percent(worst)} of the elements that were to change stay what they are: the update is "
            "below half a step of their dtype, and no master remembers it"
        ),
        "Give it a master: `precision.master: split`, or `fp32`.",
        65.0,
    )
    yield from _together(
        "stuck state",
        {cost.name: cost.stuck for cost in updates if cost.stuck > STUCK},
        lambda worst: (
            f"a moment of {percent(worst)} of its elements cannot shrink: what decay takes in a step "
            "is below half a step of bf16"
        ),
        "Set `precision.state: fp32`, or `bf16-stochastic`.",
        60.0,
    )


def _no_gradient(
    plan: Plan, gradients: Sequence[GradientLine], passes: ThreePasses
) -> Iterator[AuditFinding]:
    """What is trained and never gets a gradient, though it could: something else is used in its stead. An
    expert that no token was sent to has none either: it did not run, and others of its kind have one."""
    others = {_numberless(line.name) for line in gradients if line.norm}
    for line in gradients:
        if line.norm or line.name in passes.used or not math.isfinite(passes.total.rms):
            continue
        if line.name.rpartition(".")[0] in passes.ran or _numberless(line.name) not in others:
            yield AuditFinding(
                "no gradient",
                line.name,
                "no micro-batch gives it a gradient: it is not used, or a copy of it is",
                "Use the parameter itself in the forward, or freeze it.",
                5.0,
                (line.name,),
            )


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _untied(plan: Plan, subject: Subject) -> Iterator[AuditFinding]:
    """A model whose config ties its embeddings, and whose embeddings are two."""
    model = subject.make()
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", None) is not True:
        return
    rows: list[Row] = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get, lambda: None)()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        name = names.get(id(getattr(module, "weight", None)))
        row = None if name is None else plan.row(name)
        if row is not None:
            rows.append(row)
    if len(rows) == 2 and rows[0] is not rows[1]:
        yield AuditFinding(
            "untied",
            rows[1].name,
            f"`tie_word_embeddings` is set, and it is another tensor than {rows[0].name}",
            "Call `model.tie_weights()` after the model is built or loaded.",
            700.0,
            (rows[0].name, rows[1].name),
        )
