"""What is not as it should be, by name, what weighs most first.

A low-precision run rounds everywhere, and that is what its mode is for. A finding is what the mode does not
explain: the model's own code that narrows although nobody asked, numbers that leave a dtype's range, cells
narrower than the mode, a small tensor that is worth a large part of the drift, gradients and updates that
rounding takes away.

Invariant: pure over what was measured, and each finding says what, where, how much, and how to mend it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zerodrift.drift.measure import ThreePasses
from zerodrift.drift.nouns import (
    AuditFinding,
    GradientLine,
    Recommendation,
    Replayed,
    UpdateCost,
)
from zerodrift.drift.operations import HALF, Rounding
from zerodrift.drift.runs import Subject
from zerodrift.plan.table import Plan, Row
from zerodrift.report.figures import percent

NOISE = 2e-6
"""Drift below this is that of fp32 itself."""

GRADIENT = 1e-3
"""Of a gradient's norm: what `accumulate` or `reduce` may take."""

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
    advice: Recommendation | None,
) -> list[AuditFinding]:
    """All of a plan that was audited."""
    found = [
        *_overflow(passes),
        *_own(passes),
        *_buffers(plan, subject),
        *_narrower_than_mode(plan, passes, replayed),
        *_routing(plan, passes, replayed),
        *_outliers(plan, passes, replayed),
        *_gradients(gradients),
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
            f"{place.relative:.2g} of what comes out is lost, an estimated {rms:.2g} of a log-probability",
            "Leave out the cast, or cast to the dtype of what comes in.",
            1e3 + rms,
            (place.parameter,) if place.parameter else (),
        )


def _by_line(passes: ThreePasses) -> list[tuple[Rounding, float]]:
    """The first place of every module that loses something: what comes after it works with what it left."""
    first: dict[str, tuple[Rounding, float]] = {}
    for place, rms in passes.own_places:
        if place.error == 0:
            continue
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


def _narrower_than_mode(
    plan: Plan, passes: ThreePasses, replayed: Sequence[Replayed]
) -> Iterator[AuditFinding]:
    """Cells that a rule has made narrower than the mode has them."""
    mode = plan.policy.mode.dtype
    for row in plan.rows:
        columns = row.columns
        narrow = [
            (cell, dtype)
            for cell, dtype in (("storage", columns.storage.dtype), ("compute", columns.compute))
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
            cells = " and ".join(f"`{cell}` {dtype}" for cell, dtype in narrow)
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


def _gradients(gradients: Sequence[GradientLine]) -> Iterator[AuditFinding]:
    for line in gradients:
        for column, lost, do in (
            ("accumulate", line.accumulate, "Set `precision.accumulate: fp32`."),
            ("reduce", line.reduce, "Set `precision.reduce: fp32`, or `{wire: fp32, sum: fp32}` for it."),
        ):
            if lost > GRADIENT:
                yield AuditFinding(
                    column,  # type: ignore[arg-type]
                    line.name,
                    f"`{column}` takes {percent(min(lost, 9.99))} of the gradient's norm",
                    do,
                    70.0 + lost,
                    (line.name,),
                )


def _updates(updates: Sequence[UpdateCost]) -> Iterator[AuditFinding]:
    for cost in updates:
        if cost.lost > LOST:
            yield AuditFinding(
                "lost updates",
                cost.name,
                f"{percent(cost.lost)} of the elements that were to change stay what they are: the update is "
                "below half a step of their dtype, and no master remembers it",
                "Give it a master: `precision.master: split`, or `fp32`.",
                65.0 + cost.lost,
                (cost.name,),
            )
        if cost.stuck > STUCK:
            yield AuditFinding(
                "stuck state",
                cost.name,
                f"the last moment of {percent(cost.stuck)} of its elements cannot shrink: what decay takes "
                "in a step is below half a step of bf16",
                "Set `precision.state: fp32`, or `bf16-stochastic`.",
                60.0 + cost.stuck,
                (cost.name,),
            )


def _no_gradient(
    plan: Plan, gradients: Sequence[GradientLine], passes: ThreePasses
) -> Iterator[AuditFinding]:
    """What is trained and never gets a gradient, though it could: something else is used in its stead."""
    for line in gradients:
        if line.norm == 0 and line.name not in passes.used and math.isfinite(passes.total.rms):
            yield AuditFinding(
                "no gradient",
                line.name,
                "no micro-batch gives it a gradient: it is not used, or a copy of it is",
                "Use the parameter itself in the forward, or freeze it.",
                5.0,
                (line.name,),
            )


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
