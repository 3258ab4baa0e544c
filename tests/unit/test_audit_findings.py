"""Findings of an audit, each beside a healthy twin; variants of a policy, candidates, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

from tests.audit.networks import Decoder
from zerodrift.api import make_plan
from zerodrift.cli import app
from zerodrift.inspect.audit import entry, variants
from zerodrift.inspect.audit.advice import candidates
from zerodrift.inspect.audit.estimates import PassResults, narrower_dtype_of
from zerodrift.inspect.audit.findings import find_defects
from zerodrift.inspect.audit.report import Audit
from zerodrift.inspect.audit.results import (
    AuditFinding,
    CellReplay,
    Estimate,
    GradientLine,
    UpdateCost,
)
from zerodrift.inspect.audit.rounding import Rounding
from zerodrift.inspect.audit.runs import Drift, Signals, Subject, plan_for
from zerodrift.inspect.audit.variants import Choice, narrow_cells
from zerodrift.plan.table import Plan
from zerodrift.policy.decisions import Columns, Policy

NONE = Drift(0.0, 0.0, 0.0, 0.0, 100, 0.0, 0, 0)
SOME = replace(NONE, rms=1e-3)
MODEL = Decoder()


def plan(mode: str = "bf16", model: nn.Module = MODEL, **more: Any) -> Plan:
    config = {"precision": {"mode": mode, **more}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    return make_plan(config, model)


def told(
    of: Plan,
    *,
    model: nn.Module = MODEL,
    gradients: Sequence[GradientLine] = (),
    updates: Sequence[UpdateCost] = (),
    replayed: Sequence[CellReplay] = (),
    total: Drift = SOME,
    routes: Sequence[dict[str, torch.Tensor]] = (),
    **more: Any,
) -> list[AuditFinding]:
    seen = PassResults(Signals(routes=list(routes)), NONE, Signals(), total, frozenset(), **more)
    return find_defects(of, Subject.of(model, None), seen, gradients, updates, replayed)


def kinds(found: Sequence[AuditFinding]) -> list[tuple[str, str]]:
    return [(each.kind, each.where) for each in found]


def place(**more: Any) -> Rounding:
    return replace(Rounding("blocks.0", "add", "a.py:7", numel=100, dtype="float16"), **more)


def line(**more: Any) -> GradientLine:
    return replace(GradientLine("head.weight", 0.9999, 0.01, 1.0, 1.0), **more)


def replay(name: str, cell: Any, alone: float, left: float, flips: int = 0) -> CellReplay:
    one = replace(NONE, rms=alone, flips=flips, choices=1000)
    return CellReplay(Choice(name, cell, (name,)), one, replace(NONE, rms=left))


AT = "blocks.0 at a.py:7"
COARSE = {"norm.weight": "bf16", "head.weight": "", "words.weight": ""}
RULED = plan("fp32", rules=[{"match": "head.weight", "storage": "bf16", "compute": "fp32"}])
HALF = plan("autocast-bf16", rules=[{"match": "head.weight", "storage": "bf16"}])
MASTERLESS = plan(rules=[{"match": "head.weight", "master": "same"}])
CODED = plan(rules=[{"match": "blocks.*.up.weight", "gather": "int8"}])
WORTH = [Estimate(Choice("head.weight", "storage", ("head.weight",)), 1e-8)]
FLIPPED = {"total": replace(SOME, flips=20, choices=1000)}
ROUTED = {**FLIPPED, "routes": [{"blocks.0.up#0": torch.zeros(1000, 2)}]}
ROUTER = "blocks.0.up.weight"
RAN = frozenset(["blocks.1.up"])
"""Modules that ran in the measured passes."""
ZERO = line(norm=0.0, size=0.0, cosine=1.0)
USED, UNUSED = line(name="blocks.0.up.weight"), line(name="blocks.1.up.weight", norm=0.0, size=0.0)
TINY = line(name="blocks.0.up.bias", norm=1e-9, size=1e-6, cosine=0.0)
SHORT = [line(name="words.weight", size=3e-5), line(name=ROUTER, size=3e-5), line(name="norm.weight")]


def cost(**more: float) -> list[UpdateCost]:
    return [replace(UpdateCost("head.weight", 0.0, 0.0, 0.0, "fp32"), **more)]


HELD = Decoder()


HELD.register_buffer("table", HELD.table.bfloat16())


@pytest.mark.parametrize(
    ("of", "seen", "found"),
    [
        (plan(), {"planned_places": [place(saturated=3)]}, ("overflow", AT)),
        (plan(), {"planned_places": [place()]}, None),
        (plan(), {"planned_places": [place(vanished=60, error=0.3, size=1.0)]}, ("underflow", AT)),
        (plan(), {"planned_places": [place(vanished=60, error=1e-6, size=1.0)]}, None),
        (plan(), {"coarse": COARSE}, ("rounded", "norm.weight")),
        (plan(), {"coarse": dict.fromkeys(COARSE, "bf16")}, None),  # all of a checkpoint in bf16
        (plan(), {"own_places": [(place(error=1e-4, size=1.0), 1e-4)]}, ("narrow code", AT)),
        (plan(), {"own_places": [(place(size=1.0), 0.0)]}, None),
        (RULED, {"estimates": WORTH}, ("rounded", "head.weight")),
        (RULED, {}, ("rounded", "head.weight")),  # a rule is listed, however little its cell is worth
        (HALF, {}, ("rounded", "head.weight")),  # under autocast, parameters rest in fp32
        (MASTERLESS, {"updates": cost(lost=0.01)}, ("lost updates", "head.weight")),
        (plan("bf16"), {"estimates": WORTH}, None),  # a cell that the mode has so
        (plan(), {"replayed": [replay("norm.weight", "storage", 8e-4, 4e-4)]}, ("rounded", "norm.weight")),
        (plan(), {"replayed": [replay("norm.weight", "storage", 8e-4, 9.9e-4)]}, None),
        (plan(), {"replayed": [replay(ROUTER, "compute", 1e-3, 9.9e-4, 12)], **ROUTED}, ("routing", ROUTER)),
        (plan(), {"replayed": [replay(ROUTER, "compute", 1e-3, 9.9e-4, 12)], **FLIPPED}, None),
        (plan(), {"gradients": [line(accumulate=5e-4)]}, None),
        # Half an ulp of bf16 is 2^-8 = 0.0039 of a number: a wire takes more only where gradients cancel.
        (plan(reduce="bf16"), {"gradients": [line(reduce=0.005)]}, ("reduce", "head.weight")),
        (plan(reduce="bf16"), {"gradients": [line(reduce=0.003)]}, None),
        (plan(), {"gradients": SHORT}, ("gradient", ROUTER)),  # a backward comes there first
        (plan(), {"gradients": [line(), TINY]}, None),
        (plan(), {"updates": cost(lost=0.5)}, ("lost updates", "head.weight")),
        (plan(), {"updates": cost(stuck=0.9)}, ("stuck state", "head.weight")),
        (plan(), {"updates": cost(lost=0.01, stuck=0.1)}, None),
        (plan(), {"gradients": [ZERO]}, ("no gradient", "head.weight")),
        (plan(), {"gradients": [ZERO], "used": frozenset(["head.weight"])}, None),
        (plan(), {"gradients": [USED, UNUSED]}, None),  # an expert without tokens
        (plan(), {"gradients": [USED, UNUSED], "ran": RAN}, ("no gradient", "blocks.1.up.weight")),
        (plan(model=HELD), {"model": HELD}, ("narrow buffer", "table")),
    ],
)
def test_a_defect_is_found_and_its_healthy_twin_is_not(
    of: Plan, seen: dict[str, Any], found: tuple[str, str] | None
) -> None:
    assert kinds(told(of, **seen)) == ([] if found is None else [found])


def test_the_cost_of_a_rule_is_that_of_its_column() -> None:
    names = tuple(f"blocks.{number}.up.weight" for number in range(2))
    other, mine = (Choice("blocks.*.up.weight", cell, names) for cell in ("compute", "storage"))
    (found,) = told(CODED, replayed=[CellReplay(other, SOME, None), CellReplay(mine, NONE, None)])
    assert found.what.endswith("`, in 2 parameters: 0 of a log-probability") and found.parameters == names


def test_what_values_tell_of_their_dtype() -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    narrowed = {"": values, "bf16": values.bfloat16(), "fp16": values.half().float()}
    assert all(narrower_dtype_of(each) == dtype for dtype, each in narrowed.items())
    for plain in (torch.ones(9), torch.zeros(9), 2.0 ** -torch.arange(1, 30), torch.arange(100.0)):
        assert narrower_dtype_of(plain) is None


# --- variants and rules -----------------------------------------------------------------------------


NAME = "blocks.0.up.weight"


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


def test_candidates_are_unpinned_modules_in_the_order_of_what_an_element_is_worth() -> None:
    worth = {"norm.weight": 1.0, "head.weight": 2.0, "blocks.0.up.weight": 0.5, "blocks.1.up.weight": 0.5}
    found = candidates(plan(), worth)
    assert [each.pattern for each in found] == ["norm.*", "head.weight", "blocks.*.up.*"]
    assert found[2].names == tuple(f"blocks.{n}.up.{kind}" for n in range(2) for kind in ("weight", "bias"))
    pinned = plan(rules=[{"match": "norm.*", "pin": "fp32"}])
    assert candidates(pinned, {"norm.weight": 1.0}) == []


HERE = "tests.unit.test_audit_findings"
CONFIG = "{precision: {mode: bf16}, optimizer: {type: AdamW, params: {lr: 0.001}}}"


def small() -> nn.Module:
    model = Decoder(1)
    model.main_input_name = "input_ids"  # type: ignore[assignment]
    return model


def with_a_row() -> nn.Module:
    """Return a model without a loss."""
    model: Any = small()
    model.forward = lambda input_ids, labels: model.head(model.words(input_ids))
    return model


def audited(folder: Path, *more: str, model: str = "small") -> Result:
    (folder / "config.yaml").write_text(CONFIG)
    ids = torch.randint(0, 31, (8, 12), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "ids.json").write_text(json.dumps(ids))
    words = ["audit", str(folder / "config.yaml"), "--model", f"{HERE}:{model}", "--batches", "2"]
    words += ["--confirm", "2", "--data", str(folder / "ids.json"), *more]
    return CliRunner().invoke(app, words, env={"COLUMNS": "80"})


@pytest.mark.second
def test_what_is_printed_is_what_the_json_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, run = tmp_path / "audit.html", entry.audit_subject
    found: list[Audit] = []

    def run_once(*given: Any) -> Audit:
        if not found:
            found.append(run(*given))
        return found[0]

    monkeypatch.setattr("zerodrift.inspect.audit.audit_subject", run_once)
    done = audited(tmp_path, "--html", str(page))
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert max(map(len, found[0].text(width=50).splitlines())) <= 50
    assert "mode bf16, 1 rank, 2 micro-batches" in done.stdout and "pins   each line was run" in done.stdout
    assert 'class="heat"' in page.read_text() and "head.weight" in page.read_text()
    told = json.loads(audited(tmp_path, "--json").stdout)
    assert told["drift"]["count"] == 8 * 11 and told["drift"]["rms"] > 0
    assert f"rms {told['drift']['rms']:.2g} of a log-probability" in done.stdout
    advice = told["recommendation"]
    assert advice["config"] in done.stdout
    assert advice["points"][0]["drift"]["rms"] == told["drift"]["rms"]
    assert advice["removed"] >= 0.9
    assert len(told["replayed"]) == 2


@pytest.mark.parametrize(
    ("more", "model", "told"),
    [
        (["--budget", "much"], "small", "--budget.*must be a share such as 1% or 0.01; got 'much'"),
        (["--narrow", "size"], "small", "--narrow.*must be bytes or speed.*bytes:0.01; got 'size'"),
        (["--batches", "9"], "small", "must have a sequence for each of 9 micro-batches; got 8"),
        ([], "with_a_row", "must return a loss"),
    ],
)
def test_what_cannot_be_audited_is_one_error(
    tmp_path: Path, more: list[str], model: str, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = audited(tmp_path, *more, model=model)
    assert done.exit_code == 2
    said = done.output + capfd.readouterr().err
    assert re.search(told, said, re.DOTALL), said
    assert "Traceback" not in said
