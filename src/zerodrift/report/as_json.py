"""Nouns as JSON text: the same figures as the other renderers, for machines.

Keys keep their order, and the items of a top-level list stand on a line each, so two plans can be
compared with a line diff.

Invariant: the text of a plan is what `Plan.from_json` reads, and more keys that it ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerodrift.plan.cost import Cost
from zerodrift.plan.table import Plan
from zerodrift.plan.timeline import Timeline
from zerodrift.plan.trace import Hidden, Trace, TracedOperation
from zerodrift.policy.support import StateCell, SupportCell
from zerodrift.record import encode
from zerodrift.report.explain import Explanation
from zerodrift.report.traced import traced_modules


def plan_json(plan: Plan, cost: Cost, timeline: Timeline | None = None) -> str:
    """The plan, its digest, what it costs, and the timeline of its pipeline where it has one."""
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
    """One parameter."""
    return _text({"digest": plan.digest, "source": plan.source, "parameter": encode(explanation)})


def rows_json(explanations: Iterable[Explanation], plan: Plan) -> str:
    """Some parameters."""
    return _text({"digest": plan.digest, "source": plan.source, "parameters": encode(list(explanations))})


def trace_json(plan: Plan, trace: Trace, found: Sequence[Hidden]) -> str:
    """What a trace showed: findings, and operations by module."""
    lines = [
        {
            "module": line.pattern,
            "modules": list(line.paths),
            "class": line.klass,
            "calls": line.calls,
            "forward": [_operation(operation) for operation in line.forward],
            "backward": [_operation(operation) for operation in line.backward],
        }
        for line in traced_modules(trace)
    ]
    facts = {
        "device": trace.device,
        "inputs": trace.inputs,
        "loss": trace.loss,
        "refused": encode(trace.refused),
    }
    return _text(
        {
            "digest": plan.digest,
            "source": plan.source,
            **facts,
            "findings": encode(list(found)),
            "trace": lines,
        }
    )


def _operation(operation: TracedOperation) -> dict[str, Any]:
    written: dict[str, Any] = {
        "name": operation.name,
        "inputs": [tensor.dtype for tensor in operation.inputs],
        "outputs": [tensor.dtype for tensor in operation.outputs],
        "line": operation.line,
    }
    return {**written, "cast_by": operation.cast_by} if operation.cast_by else written


def support_json(cells: Sequence[SupportCell], states: Sequence[StateCell]) -> str:
    """The support tables, a cell a line."""
    return _text({"cells": encode(list(cells)), "states": encode(list(states))})


def _text(document: Mapping[str, Any]) -> str:
    entries = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            items = ",\n".join(f"  {json.dumps(item)}" for item in value)
            entries.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            entries.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(entries) + "\n}\n"
