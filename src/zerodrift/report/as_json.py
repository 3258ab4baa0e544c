"""Plans, explanations, traces and support tables as JSON text.

Keys keep their order. Every item of a top-level list has its own line, so that `diff` can compare two plans.

Invariant: `Plan.from_json` reads the text of a plan and ignores the keys that are added here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from zerodrift.plan import Cost, Hidden, Plan, Timeline, Trace, TracedOperation
from zerodrift.policy import CARRIED, REFUSED, TRAVEL, UNFIT, StateCell, SupportCell, narrow_storages
from zerodrift.record import encode
from zerodrift.report.explanation import Explanation
from zerodrift.report.trace import traced_modules


def plan_json(plan: Plan, cost: Cost, timeline: Timeline | None = None) -> str:
    """Return a plan with its digest, its cost, and the timeline of its pipeline if it has one."""
    totals = {"rest": cost.rest.total, "peak": cost.peak.total, "wire": cost.wire}
    bill = encode(cost) | {"totals": totals, "padding_ratio": cost.padding_ratio}
    document = {"digest": plan.digest, **plan.to_json(), "cost": bill}
    if timeline is not None:
        document["timeline"] = {
            "ranks": [[str(action) for action in rank] for rank in timeline.ranks],
            "starts": timeline.starts,
            "length": timeline.length,
            "bubble": timeline.bubble,
            "most_alive": timeline.most_alive,
        }
    return _text(document)


def explanation_json(explanation: Explanation, plan: Plan) -> str:
    """Return one parameter of a plan."""
    return _text({"digest": plan.digest, "source": plan.source, "parameter": encode(explanation)})


def rows_json(explanations: Iterable[Explanation], plan: Plan) -> str:
    """Return some parameters of a plan."""
    return _text({"digest": plan.digest, "source": plan.source, "parameters": encode(list(explanations))})


def trace_json(plan: Plan, trace: Trace, found: Sequence[Hidden]) -> str:
    """Return the findings of a trace and its operations by module."""
    lines = []
    for line in traced_modules(trace):
        modules = {"module": line.pattern, "modules": list(line.paths), "class": line.klass}
        forward, backward = (list(map(_operation, each)) for each in (line.forward, line.backward))
        lines.append({**modules, "calls": line.calls, "forward": forward, "backward": backward})
    ran = {"device": trace.device, "inputs": trace.inputs, "loss": trace.loss}
    results = {"refused": encode(trace.refused), "findings": encode(list(found)), "trace": lines}
    return _text({"digest": plan.digest, "source": plan.source, **ran, **results})


def _operation(operation: TracedOperation) -> dict[str, Any]:
    written: dict[str, Any] = {
        "name": operation.name,
        "inputs": [tensor.dtype for tensor in operation.inputs],
        "outputs": [tensor.dtype for tensor in operation.outputs],
        "line": operation.line,
    }
    return {**written, "cast_by": operation.cast_by} if operation.cast_by else written


def support_json(cells: Sequence[SupportCell], states: Sequence[StateCell]) -> str:
    """Return the support tables, one cell per line, and what choices exclude with reasons and ways out."""
    storages = encode(list(narrow_storages()))
    choices = {"reduce.order: tree": REFUSED, "reduce.order: native": (CARRIED,), "compute: fp8": UNFIT}
    parts = [(one.column, one.what, one.reason, one.do) for one in TRAVEL]
    parts += [(by, one.what, one.reason, one.do) for by, group in choices.items() for one in group]
    excluded = [dict(zip(("by", "what", "reason", "do"), part, strict=True)) for part in parts]
    tables = {"cells": encode(list(cells)), "states": encode(list(states)), "storages": storages}
    return _text({**tables, "excluded": excluded})


def json_value(value: Any, not_finite: Callable[[float], Any]) -> Any:
    """Convert nested mappings and sequences. `not_finite` replaces inf and nan, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_value(item, not_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item, not_finite) for item in value]
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(document: Mapping[str, Any]) -> str:
    entries = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            entries.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            entries.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(entries) + "\n}\n"
