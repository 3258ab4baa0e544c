"""Variants of a policy differ in one wide or one narrow cell, and in nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.audit.networks import Decoder
from zerodrift.api import make_plan
from zerodrift.inspect.audit import variants
from zerodrift.inspect.audit.advice import candidates, rules_for
from zerodrift.inspect.audit.report import Audit
from zerodrift.inspect.audit.results import (
    AuditFinding,
    Bytes,
    CellReplay,
    Estimate,
    FormatAdvice,
    FormatGoal,
    FormatPoint,
    FormatTrial,
    GradientLine,
    NarrowerColumn,
    Place,
    Point,
    Recommendation,
    UpdateCost,
)
from zerodrift.inspect.audit.runs import Drift, Subject, plan_for
from zerodrift.inspect.audit.variants import Choice, narrow_cells
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import Columns, Policy

MODEL = Decoder()
NAME = "blocks.0.up.weight"
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


def plan(mode: str = "bf16", **more: object) -> Plan:
    return make_plan({"precision": {"mode": mode, **more}, "optimizer": ADAMW}, MODEL)


def built(base: Plan, policy: Policy) -> Plan:
    return plan_for(Subject.of(MODEL, None), policy, base.mesh)


def dtypes(columns: Columns) -> tuple[str, str, str]:
    return str(columns.storage.dtype), str(columns.gather), str(columns.compute)


def test_the_reference_has_nothing_narrow() -> None:
    narrow = plan(rules=[{"match": "norm.*", "pin": "fp32"}], buffers="bf16", reduce="bf16", state="8bit")
    wide = built(narrow, variants.reference_policy(narrow.policy))
    cells = {cell.rstrip("/") for row in wide.rows for cell in row.columns.cells().values()}
    assert cells <= {"fp32", "same"}
    assert all(row.storage == row.source for row in wide.buffers)
    assert any(narrow_cells(row.columns) for row in narrow.rows)


WIDE, NARROW, ROUNDED = ("fp32",) * 3, ("bf16",) * 3, ("bf16", "bf16", "fp32")
STORED, BOTH = Choice(NAME, "storage", (NAME,)), (NAME, "blocks.0.up.bias")


@pytest.mark.parametrize(
    ("change", "choice", "changed", "others"),
    [
        # A module computes in one dtype.
        (variants.widened_policy, STORED, dict(zip(BOTH, (WIDE, ROUNDED), strict=True)), NARROW),
        (variants.isolated_policy, STORED, {NAME: ROUNDED}, WIDE),
        (
            *(variants.isolated_policy, Choice(NAME, "compute", BOTH)),
            *(dict.fromkeys(BOTH, ("fp32", "fp32", "bf16")), WIDE),
        ),
    ],
    ids=["a widened cell", "a narrow cell", "computing alone, with all of its module"],
)
def test_only_what_is_chosen_differs(
    change: Any, choice: Choice, changed: dict[str, Any], others: Any
) -> None:
    base = plan()
    found = {row.name: dtypes(row.columns) for row in built(base, change(base, choice)).rows}
    assert found == {name: changed.get(name, others) for name in found}
    assert found.keys() == {row.name for row in base.rows}


@pytest.mark.parametrize(
    ("more", "cells"),
    [
        ({"mode": "fp32"}, ()),
        ({"mode": "bf16"}, ("storage", "compute")),
        ({"mode": "fp32", "reduce": "bf16"}, ("reduce",)),
        ({"mode": "fp32", "accumulate": "bf16", "allow_narrow": True}, ("accumulate", "reduce")),
        ({"mode": "fp32", "state": "8bit"}, ()),
    ],
)
def test_what_is_narrow_is_told_by_column(more: dict[str, str], cells: tuple[str, ...]) -> None:
    row = plan(**more).row(NAME)  # type: ignore[arg-type]
    assert row is not None
    assert narrow_cells(row.columns) == cells


# --- candidates ------------------------------------------------------------------------------------------


def test_candidates_are_unpinned_modules_in_the_order_of_what_an_element_is_worth() -> None:
    worth = {"norm.weight": 1.0, "head.weight": 2.0, "blocks.0.up.weight": 0.5, "blocks.1.up.weight": 0.5}
    found = candidates(plan(), worth)
    assert [each.pattern for each in found] == ["norm.*", "head.weight", "blocks.*.up.*"]
    assert found[2].names == tuple(f"blocks.{n}.up.{kind}" for n in range(2) for kind in ("weight", "bias"))
    pinned = plan(rules=[{"match": "norm.*", "pin": "fp32"}])
    assert candidates(pinned, {"norm.weight": 1.0}) == []


def test_rules_match_what_was_pinned() -> None:
    pins = (("norm.*", ("norm.weight",), None), ("a", ("x[0]",), "input"))
    assert rules_for(Point("bf16", pins, Drift(0.0, 0.0, 0.0, 0.0, 1, 0.0, 0, 0), Bytes(1, 1, 1, 1))) == (
        {"match": "norm.*", "pin": "fp32"},
        {"match": "x[[]0]", "pin": "fp32", "output": "input"},
    )


def test_rules_are_printed_as_they_load_however_long_a_name_is() -> None:
    names = ["a.weight", "model." + "layers." * 6 + "x.weight", "model." + "layers." * 12 + "x.weight"]
    rules = tuple({"match": name, "storage": "int8"} for name in names)
    drift = Drift(0.0, 0.0, 0.0, 0.0, 1, 0.0, 0, 0)
    start = FormatPoint(drift, Bytes(1, 1, 1, 1))
    advice = FormatAdvice(FormatGoal("bytes", 1.0, False), 1.0, start, (), (), start, None, rules)
    shown = Audit(*("",) * 3, *(1, 1), drift, drift, 1.0, *((),) * 5, formats=advice).text()
    assert yaml.safe_load(shown[shown.index("precision:") : shown.index("gradients   norm")]) == {
        "precision": {"rules": [dict(rule) for rule in rules]}
    }
    assert [line for line in shown.splitlines() if len(line) > 80] == [f'    - match: "{names[2]}"']


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120])
def test_an_audit_fits_the_terminal_and_says_what_it_leaves_out(width: int) -> None:
    name = "model.layers.*.block_sparse_moe.experts.*.down_projection.weight"
    drift, none = Drift(0.5, -0.1, 2.0, 0.1, 4096, 0.25, 1234567, 9999999), Drift(*(0.0,) * 4, 1, 0.0, 0, 0)
    choice, bytes_ = Choice(name, "compute", (name,)), Bytes(10**9, 2 * 10**9, 10**8, 10**9)
    more = Bytes(2 * 10**9, 3 * 10**9, 10**9, 10**10)
    points = (
        Point("bf16", (), drift, bytes_),
        Point("bf16_autocast", ((name, (name,), None), ("lm_head.*", ("lm_head",), None)), none, more),
    )
    at = FormatPoint(drift, bytes_)
    trial = FormatTrial(name, (name,), "storage", "mxfp8_e4m3", 10**9, (), at, FormatPoint(none, more))
    audit = Audit(
        "a model " * 20, "d" * 64, "bf16", 8, 4, drift, none, 0.999,
        (Estimate(choice, 0.1, 0.01), Estimate(replace(choice, pattern=f"other.{name}"), 0.1, 0.01)),
        (CellReplay(choice, drift, none),),
        (Place(f"model.{name}", "scaled_dot_product_attention", "modeling.py:123", "bf16", 0.2, 0.1, 1.0),),
        (GradientLine(name, 0.9, 0.123, 1.0, 1.0, 0.01, 0.02),),
        (UpdateCost(name, 0.123, 0.1, 0.1, "bf16"),),
        findings=(AuditFinding("lost updates", name * 3, "many words " * 20, "Do " * 40, 1.0),),
        recommendation=Recommendation(0.01, "rest", points, points[1], 1, ({"match": "a", "pin": "fp32"},)),
        narrower=(NarrowerColumn("accumulate", "bf16", 0.1, name, 0.9, 123, bytes_, more),),
        formats=FormatAdvice(FormatGoal("bytes", 2.0, True), 1.0, at, (trial,), (0,), at, at, ()),
    )  # fmt: skip
    lines = audit.text(width=width).splitlines()
    assert max(map(len, lines)) <= width
    figures = ["rest", "wire"] if width < 80 else ["flips", "rest", "peak", "wire", "compute"]
    assert ["mode", "left", *figures, "pins"] in [line.split() for line in lines]
    left_out = [line for line in lines if line.startswith("80 columns also show: ")]
    assert len(left_out) == (3 if width < 80 else 0)
    is_whole = name.removesuffix(".weight") in audit.text(width=width)
    assert is_whole == (width >= 100), "names have what a wider terminal has more"
