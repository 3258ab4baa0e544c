"""Find defects that the mode of a plan does not explain.

A low-precision run rounds everywhere, as its mode says. A finding is a loss of precision beyond that.

Invariant: nothing runs here. Each finding says what is wrong, where, by how much, and how to fix it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from zerodrift.dtypes import DType
from zerodrift.inspect.audit.advice import pattern_of
from zerodrift.inspect.audit.estimates import PassResults
from zerodrift.inspect.audit.results import AuditFinding, CellReplay, FindingKind, GradientLine, UpdateCost
from zerodrift.inspect.audit.rounding import NARROW, Rounding
from zerodrift.inspect.audit.runs import Subject
from zerodrift.inspect.audit.variants import Cell, Choice, narrowest
from zerodrift.plan import Plan, Row
from zerodrift.policy import Reduction, is_by_rule
from zerodrift.report import percent

VANISHED = 0.25
"""Share of an operation's norm that may be lost when numbers become zero. Small shares of a softmax often do,
which changes nothing."""

NOISE = 2e-6  # rms drift of fp32 itself
GRADIENT = 1e-3  # largest share of a gradient's norm that `accumulate` may lose; it is fp32 in every mode
FAINT = 0.01  # share of the norm of all gradients below which a gradient may be noise, as of the bias of keys
LOST = 0.05  # largest share of changing elements whose updates may be lost
STUCK = 0.5  # largest share of a moment's elements that may not decay
SMALL = 0.05  # largest share of the model's elements that a small tensor has
LARGE = 0.25  # smallest share of the squared drift, or of the flips, that counts as large
ROUTED = 0.002  # largest share of all routing choices that one cell may flip

CELLS: Mapping[Cell, set[str]] = {"storage": {"storage", "gather"}, "compute": {"compute", "products"}}
"""Cell of the forward -> its columns."""

Findings = Iterator[AuditFinding]


def find_defects(
    plan: Plan,
    subject: Subject,
    results: PassResults,
    gradients: Sequence[GradientLine],
    updates: Sequence[UpdateCost],
    replayed: Sequence[CellReplay],
) -> list[AuditFinding]:
    """Return the findings, the heaviest first. The forward of a parameter has at most one, and so has each
    kind at each place."""
    found = [
        *_out_of_range(results),
        *_narrow_code(results),
        *_buffers(plan),
        *_rounded(plan, results, replayed),
        *_routing(plan, results, replayed),
        *_columns(plan, gradients, updates),
        *_narrowed_by_rules(plan, gradients, updates),
        *_scaled(plan, subject, gradients),
        *_no_gradient(gradients, results),
        *_untied(plan, subject),
    ]
    first: dict[tuple[str, str], AuditFinding] = {}
    for finding in sorted(found, key=lambda finding: -finding.weight):
        kind = "forward" if finding.kind in ("rounded", "routing") else finding.kind
        first.setdefault((kind, finding.where), finding)
    return list(first.values())


def _at(kind: FindingKind, place: Rounding, what: str, do: str, weight: float) -> AuditFinding:
    module = place.module or "the model"
    where = f"{module} at {place.line}" if place.line else module
    return AuditFinding(kind, where, what, do, weight, (place.parameter,) if place.parameter else ())


def _out_of_range(results: PassResults) -> Findings:
    """Find numbers beyond the range of a dtype, and numbers that become zero where that loses much."""
    do = "Compute it in fp32 or bf16: pin its parameters, or remove the cast before it."
    for place in (*(place for place, _ in results.own_places), *results.planned_places):
        if place.saturated:
            what = f"{place.saturated} of {place.numel} numbers of `{place.operation}` are beyond the range "
            what += f"of {place.dtype}, and finite in fp32"
            yield _at("overflow", place, what, do, 1e6 + place.saturated / max(1, place.numel))
    for place in results.planned_places:
        if place.vanished and not place.saturated and place.relative > VANISHED:
            what = f"{place.vanished} of {place.numel} numbers of `{place.operation}` are too small for "
            what += f"{place.dtype} and become zero: {percent(min(place.relative, 1.0))} of the result"
            yield _at("underflow", place, what, do, 1e5 + place.relative)


def _narrow_code(results: PassResults) -> Findings:
    """Find casts in the model's own code that narrow an fp32 run. Later places of a module use the result of
    the first, so only the first counts, unless a later one has three times its estimate."""
    first: dict[str, tuple[Rounding, float]] = {}
    for place, estimated in results.own_places:
        rms = estimated if math.isfinite(estimated) else math.inf
        known = first.get(place.module)
        if place.error and (known is None or rms > 3 * known[1]):
            first[place.module] = (place, rms)
    for place, rms in sorted(first.values(), key=lambda pair: -pair[1]):
        what = f"the model itself computes `{place.operation}` in {place.dtype}, whatever the plan says: "
        what += f"{place.relative:.2g} of the result is lost, "
        share = f"an estimated {rms:.2g} of a log-probability"
        what += share if math.isfinite(rms) else "and its gradient is not finite"
        do = "Leave out the cast, or cast to the dtype of the input."
        yield _at("narrow code", place, what, do, 1e3 + min(rms, 1e3))


def _buffers(plan: Plan) -> Findings:
    """Find buffers that the model holds, or the plan casts, in a narrow dtype."""
    for row in plan.buffers:
        if row.source.is_floating and row.source.torch in NARROW:
            what = f"the model holds it in {row.source}, so that its exact values are lost"
            do = "Register it in fp32; modules use it in the dtype that it has."
            yield AuditFinding("narrow buffer", row.name, what, do, 900.0)
        elif row.storage.is_floating and row.storage.torch in NARROW:
            what = f"the plan casts it from {row.source} to {row.storage} ({row.why})"
            yield AuditFinding("narrow buffer", row.name, what, "Set `precision.buffers: keep`.", 800.0)


def _rounded(plan: Plan, results: PassResults, replayed: Sequence[CellReplay]) -> Findings:
    """Find parameters whose values were rounded before the run while most were not, cells that a rule made
    narrower than the mode, and small tensors that cause a large part of the drift."""
    before = {name: held for name, held in results.coarse.items() if held}
    whole = len(results.coarse) - len(before)
    for name, held in before.items() if len(before) < whole else ():
        what = f"its values are numbers of {held}, held in fp32: they were rounded before the run, and "
        what += f"those of {whole} other parameters were not"
        do = "Load the values in fp32: casting back does not restore lost bits."
        yield AuditFinding("rounded", name, what, do, 90.0, (name,))
    for (cells, why), choices in narrowed_choices(plan).items():
        names, kinds = choices[0].names, [choice.cell for choice in choices]
        runs = [each.alone for each in replayed if each.choice in choices]
        same = [e for e in results.estimates if e.choice.cell in kinds and set(e.choice.names) & set(names)]
        alone = max([run.rms for run in runs] or [e.rms for e in same], default=0.0)
        by_rule = is_by_rule(why)
        if by_rule or alone > NOISE or any(run.flips for run in runs):
            where = f", in {len(names)} parameters" if len(names) > 1 else ""
            what = f"{cells}, by `{why}`{where}: "
            what += f"{'' if runs else 'an estimated '}{alone:.2g} of a log-probability"
            more_bits = "Leave the column out of the rule" if by_rule else "Give it more bits by a rule"
            do = f"{more_bits}, unless that is meant, or pin the parameter."
            yield AuditFinding("rounded", names[0], what, do, 100.0 + alone, names)
    numel, square = sum(row.whole_numel for row in plan.rows), results.total.square
    for each in replayed if square else ():
        if each.widened is None:
            continue
        name = each.choice.names[0]
        size = sum(row.whole_numel for row in plan.rows if row.name in each.choice.names) / numel
        removed, share = 1 - each.widened.square / square, each.alone.square / square
        if size <= SMALL and removed > LARGE and share > LARGE and each.alone.rms > NOISE:
            what = f"`{each.choice.cell}` is worth {percent(min(1.0, share))} of the squared drift, with "
            what += f"{percent(size)} of the elements; in fp32 {percent(removed)} is gone"
            yield AuditFinding("rounded", name, what, _pin(plan, each), 20.0 + removed, (name,))


def narrowed_choices(plan: Plan) -> dict[tuple[str, str], list[Choice]]:
    """Group the parameters whose forward is narrower than the mode by (narrow columns, their reason). A group
    is a choice of its `storage` cell, one of its `compute` cell, or both."""
    groups: dict[tuple[str, str], tuple[list[Cell], list[str]]] = {}
    mode = plan.policy.mode
    for row in plan.rows:
        columns, why, asked = row.columns, row.columns.reasons(), dict(row.columns.asked)
        usual = DType.FP32 if mode.autocast and "storage" in asked else mode.dtype
        dtypes = {"storage": (columns.storage.dtype, usual), "gather": (columns.gather, mode.dtype)}
        dtypes["compute"] = columns.compute, mode.dtype
        pairs = ((cell, *pair) for cell, pair in dtypes.items())
        narrow = {cell: (dtype, of) for cell, dtype, of in pairs if dtype.is_floating and not dtype.holds(of)}
        text = {cell: f"`{cell}` {dtype}" for cell, (dtype, _) in narrow.items()}
        if columns.products is not None:
            text["products"] = f"`products` {columns.products.describe(columns.trained)}"
        if text:
            reason = next((asked[cell] for cell in text if cell in asked), why[next(iter(text))])
            has = next((wanted for _, wanted in narrow.values()), mode.dtype)
            cells = [cell for cell, of in CELLS.items() if of & {*text}]
            shown = f"{', '.join(text.values())} where the mode has {has}"
            groups.setdefault((shown, reason), (cells, []))[1].append(row.name)
    return {
        key: [Choice(pattern_of(plan, names), cell, tuple(names)) for cell in cells]
        for key, (cells, names) in groups.items()
    }


def _routing(plan: Plan, results: PassResults, replayed: Sequence[CellReplay]) -> Findings:
    """Find cells of routers that alone flip many choices."""
    routers = {key.rpartition("#")[0] for routes in results.reference.routes for key in routes}
    for each in replayed:
        name, alone = each.choice.names[0], each.alone
        module = name.rpartition(".")[0]
        many = alone.flips >= max(ROUTED * alone.choices, LARGE * results.total.flips, 1)
        if many and any(module == path or module.startswith(f"{path}.") for path in routers):
            share = alone.flips / max(1, alone.choices)
            what = f"`{each.choice.cell}` in 16 bits alone sends {alone.flips} of {alone.choices} choices to "
            what += f"other experts ({percent(share)})"
            yield AuditFinding("routing", name, what, _pin(plan, each), 50.0 + share, (name,))


def _pin(plan: Plan, replayed: CellReplay) -> str:
    """Write the rule that pins a parameter and all others of its module, which computes in one dtype."""
    if replayed.widened is None:
        return "Pin it together with what its results meet: the model does not run with it alone in fp32."
    name = replayed.choice.names[0]
    path, output = name.rpartition(".")[0], "" if replayed.output is None else f", output: {replayed.output}"
    floating = (row.name for row in plan.rows if row.columns.compute.is_floating)
    beside = [other for other in floating if other.rpartition(".")[0] == path]
    pattern = pattern_of(plan, beside) if len(beside) > 1 else name
    return f'Pin it: `{{match: "{pattern}", pin: fp32{output}}}`.'


def _together(kind: FindingKind, worth: Mapping[str, float], what: str, do: str, weight: float) -> Findings:
    """Yield one finding for all parameters with the same defect, under the name of the worst."""
    if worth:
        names = sorted(worth, key=lambda name: -worth[name])
        worst = worth[names[0]]
        what = what.format(percent(min(worst, 9.99)))
        what += f"; and {len(names) - 1} more parameters" if len(names) > 1 else ""
        yield AuditFinding(kind, names[0], what, do, weight + worst, tuple(names))


def _columns(plan: Plan, gradients: Sequence[GradientLine], updates: Sequence[UpdateCost]) -> Findings:
    """Find losses of gradients by `accumulate` and `reduce`, and losses of updates by rounding.

    Rounding the gradient of each rank once loses at most a known share of the norm. A larger loss means that
    gradients of ranks cancel.
    """
    once = {row.name: _rounding_once(row.columns.update.reduce) for row in plan.rows if row.columns.update}
    reduced = {line.name: line.reduce for line in gradients if line.reduce > once.get(line.name, 0.0)}
    accumulated = {line.name: line.accumulate for line in gradients if line.accumulate > GRADIENT}
    what, do = "`accumulate` takes {} of the gradient's norm", "Set `precision.accumulate: fp32`."
    yield from _together("accumulate", accumulated, what, do, 70.0)
    how = "" if plan.mesh.data > 1 else ", taking every micro-batch for another rank's"
    what = f"`reduce` takes {{}} of the gradient's norm{how}: gradients of ranks are rounded, and then cancel"
    do = "Set `precision.reduce: fp32`, or `{wire: fp32, sum: fp32}` for it."
    yield from _together("reduce", reduced, what, do, 70.0)
    lost = {cost.name: cost.lost for cost in updates if cost.lost > LOST}
    what = "{} of the elements to change keep their values: the update is below half a step of their dtype, "
    what += "and no master has it"
    do = "Give it a master: `precision.master: split`, or `fp32`."
    yield from _together("lost updates", lost, what, do, 65.0)
    stuck = {cost.name: cost.stuck for cost in updates if cost.stuck > STUCK}
    what = "a moment of {} of its elements does not decay: the decay of a step is below half a step of bf16"
    do = "Set `precision.state: fp32`, or `bf16-stochastic`."
    yield from _together("stuck state", stuck, what, do, 60.0)


def _narrowed_by_rules(
    plan: Plan, gradients: Sequence[GradientLine], updates: Sequence[UpdateCost]
) -> Findings:
    """Find columns of the update that a rule made narrower than fp32, however little that costs."""
    costs: dict[FindingKind, dict[str, float]] = {
        "accumulate": {line.name: line.accumulate for line in gradients},
        "reduce": {line.name: line.reduce for line in gradients},
        "stuck state": {cost.name: cost.underflow for cost in updates},
        "lost updates": {cost.name: cost.lost for cost in updates},
    }
    unit = {
        "stuck state": "elements have a moment that is stored as zero",
        "lost updates": "the elements to change keep their values",
    }
    groups: dict[tuple[FindingKind, str, str, str], list[str]] = {}
    for row in plan.rows:
        update, asked = row.columns.update, dict(row.columns.asked)
        if update is None:
            continue
        master = "fp32" if row.columns.storage.dtype is DType.FP32 else update.master
        cells: tuple[tuple[FindingKind, str, str, object], ...] = (
            ("accumulate", "accumulate", "accumulate", update.accumulate.dtype),
            ("reduce", "reduce.wire", "reduce", update.reduce.wire),
            ("stuck state", "state", "state", update.state),
            ("lost updates", "master", "master", master),
        )
        for kind, key, column, value in cells:
            if str(value) not in ("fp32", "split") and is_by_rule(asked.get(key, "")):
                groups.setdefault((kind, column, str(value), asked[key]), []).append(row.name)
    for (kind, column, value, rule), names in groups.items():
        worth = {name: costs[kind][name] for name in names if name in costs[kind]}
        of = unit.get(kind, "the gradient's norm")
        what = f"`{column}` {value} by `{rule}`: "
        what += f"{{}} of {of}" if worth else "its cost was not measured"
        do = "Leave the column out of the rule, unless that is meant."
        yield from _together(kind, worth or dict.fromkeys(names, 0.0), what, do, 99.0)


def _rounding_once(reduce: Reduction) -> float:
    """Return the largest share of a norm that rounding to the narrower dtype of a reduction loses."""
    wire = narrowest(reduce.wire, reduce.sum)
    form = wire.format
    if form is None:
        return torch.finfo(wire.torch).eps / 2
    if form.element.value.startswith("int"):  # each element may be off by half a step
        return math.sqrt(form.run) / (2 * form.element.largest)
    return 2.0**-wire.mantissa  # twice half an epsilon, because microscaling formats saturate


def _scaled(plan: Plan, subject: Subject, gradients: Sequence[GradientLine]) -> Findings:
    """Find gradients of another length than the reference's. Rounding alone turns a gradient a little, but
    neither halves nor doubles it."""
    whole = math.sqrt(sum(line.norm**2 for line in gradients))
    strong = (line for line in gradients if line.norm > FAINT * whole)
    wrong = {line.name: line for line in strong if not 0.5 < line.cosine * line.size / line.norm < 2}
    if wrong:
        last = [name for name, _ in subject.make().named_parameters() if name in wrong][-1]
        line, others, scale = wrong[last], len(wrong) - 1, plan.policy.loss_scale
        more = f"; {others} more are wrong too, which the backward reaches later" if others else ""
        times = line.size / line.norm
        what = f"its gradient is {times:.2g} times as long as in fp32, with cosine {line.cosine:.2g}{more}"
        do = "Look for a hook or a clip that works on gradients in the backward"
        if scale is not None:
            do += f", where they are multiplied by the loss scale, {scale.initial:g} at first"
        do += "; in fp16, gradients below 6e-8 vanish: a larger loss scale keeps them."
        yield AuditFinding("gradient", last, what, do, 80.0, tuple(wrong))


def _no_gradient(gradients: Sequence[GradientLine], results: PassResults) -> Findings:
    """Find parameters that get no gradient because the model uses a copy of them, or nothing. An expert
    without tokens is no finding: it did not run, and other experts have gradients."""

    def without_numbers(name: str) -> str:
        return re.sub(r"\d+", "*", name)

    others = {without_numbers(line.name) for line in gradients if line.norm}
    for line in gradients:
        if line.norm or line.name in results.used or not math.isfinite(results.total.rms):
            continue
        if line.name.rpartition(".")[0] in results.ran or without_numbers(line.name) not in others:
            what = "no micro-batch gives it a gradient: it is not used, or a copy of it is"
            do = "Use the parameter itself in the forward, or freeze it."
            yield AuditFinding("no gradient", line.name, what, do, 5.0, (line.name,))


def _untied(plan: Plan, subject: Subject) -> Findings:
    """Find embeddings that the model's config ties and the model does not."""
    model = subject.make()
    if getattr(getattr(model, "config", None), "tie_word_embeddings", None) is not True:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows: list[Row] = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get, lambda: None)()
        row = plan.row(names.get(id(getattr(module, "weight", None)), ""))
        rows += [row] if row is not None else []
    if len(rows) == 2 and rows[0] is not rows[1]:
        first, second = (row.name for row in rows)
        what = f"`tie_word_embeddings` is set, and it is another tensor than {first}"
        do = "Call `model.tie_weights()` after the model is built or loaded."
        yield AuditFinding("untied", second, what, do, 700.0, (first, second))
