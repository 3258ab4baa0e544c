"""The support table is complete, agrees with `resolve` and `build`, and is printed with every reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models import at, moe, plan
from zerodrift import ConfigError
from zerodrift.policy.decisions import State
from zerodrift.policy.support import StateCell, StorageCell, SupportCell, narrow_storages, states, table
from zerodrift.record import encode
from zerodrift.report.as_json import support_json
from zerodrift.report.frame import markdown_text
from zerodrift.report.support import support_markdown

TABLE = table()


def accepted(cell: SupportCell, **precision: Any) -> bool:
    written = {**at(cell.stage, cell.mode, **precision), "backend": cell.backend}
    if cell.accumulate != "default":
        written["gradient_accumulation_dtype"] = cell.accumulate
    if cell.pipeline:
        written["pipeline"] = {"stages": 2}
    try:
        plan(written, world=4)
    except ConfigError:
        return False
    return True


def label(cell: SupportCell) -> str:
    pipeline = "pp" if cell.pipeline else "no-pp"
    return f"{cell.backend}-{cell.mode}-{cell.accumulate}-{pipeline}-{cell.stage}"


def test_the_table_has_every_cell_once() -> None:
    keys = {(c.mode, c.accumulate, c.pipeline, c.stage, c.backend) for c in TABLE}
    assert len(TABLE) == len(keys) == 5 * 4 * 2 * 4 * 2


@pytest.mark.parametrize("mode", sorted({cell.mode for cell in TABLE}))
def test_a_cell_says_what_really_happens(mode: str) -> None:
    for cell in TABLE:
        if cell.mode == mode:
            assert accepted(cell) == (cell.status == "yes"), label(cell)
            assert accepted(cell, allow_narrow=True) == (cell.status in ("yes", "narrow")), label(cell)
            assert bool(cell.reason) == (cell.status != "yes"), label(cell)


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", states(), ids=lambda cell: f"{cell.backend}-{cell.state}-{cell.beta2}")
def test_a_state_cell_says_what_really_happens(cell: StateCell) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, cell.beta2]}}
    written = {**at(2, state=cell.state), "backend": cell.backend, "optimizer": optimizer}
    if cell.status == "yes":
        rows = plan(written, world=4).rows
        assert {row.columns.update.state for row in rows if row.columns.update} == {State(cell.state)}
    else:
        with pytest.raises(ConfigError, match="state"):
            plan(written, world=4)


def test_every_state_runs_somewhere_and_has_a_cell() -> None:
    assert {cell.state for cell in states() if cell.status == "yes"} == {str(state) for state in State}


# --- storage ------------------------------------------------------------------------------------------


NORMS = replace(moe(), parameters=tuple(replace(p, trained=len(p.shape) == 1) for p in moe().parameters))
"""The mixture of experts with its norms trained and its matrices frozen."""


def storages(stage: int = 3, backend: str = "native", **precision: Any) -> dict[str, str]:
    written = {**at(stage, **precision), "backend": backend}
    return {row.name: str(row.columns.storage.dtype) for row in plan(written, NORMS, world=4).rows}


@pytest.mark.parametrize("cell", narrow_storages(), ids=lambda c: f"{c.backend}-{c.storage}-{c.trained}")
def test_a_storage_cell_says_what_really_happens(cell: StorageCell) -> None:
    rule = {"match": "model.norm.weight" if cell.trained else "*.up_proj.weight", "storage": cell.storage}
    if cell.status == "yes":
        assert storages(backend=cell.backend, rules=[rule])["model.layers.0.mlp.experts.0.up_proj.weight"]
        return
    with pytest.raises(ConfigError, match=f"`storage` must not be {cell.storage} here: {cell.reason}"):
        storages(backend=cell.backend, rules=[rule])


@pytest.mark.parametrize("stage", range(4))
def test_frozen_is_for_linear_layers_and_a_rule_comes_before_it(stage: int) -> None:
    rules = [
        {"match": "lm_head.weight", "storage": "int8"},
        {"match": "*.down_proj.weight", "storage": "bf16"},
        {"match": "*.0.*.o_proj.weight", "pin": "fp32"},
    ]
    gather = "bf16" if stage == 3 else None
    found = storages(stage, frozen="nf4", storage="fp32", gather=gather, rules=rules)
    layer = "model.layers.0."
    assert found["lm_head.weight"] == "int8-256"
    assert found[f"{layer}mlp.experts.0.down_proj.weight"] == "bf16"
    assert (
        found[f"{layer}mlp.experts.0.up_proj.weight"] == found[f"{layer}self_attn.q_proj.weight"] == "nf4-64"
    )
    kept = ("model.embed_tokens.weight", f"{layer}mlp.gate.weight", f"{layer}self_attn.o_proj.weight")
    assert {found[name] for name in (*kept, "model.norm.weight")} == {"fp32"}


# --- printed: the table is on docs/support.md, where `test_docs.py` compares it -----------------------------


def test_the_page_has_every_reason_lettered_and_fits_any_width() -> None:
    page, reasons = support_markdown(TABLE, states()), {cell.reason for cell in TABLE if cell.reason}
    assert all(reason in page for reason in reasons | {cell.reason for cell in states()})
    assert len(set(re.findall(r"\b(?:no|narrow) ([a-z]{1,2}) \|", page))) == len(reasons)
    for width in (70, 120):
        text = markdown_text(page, color=False, width=width)
        assert max(map(len, text.splitlines())) <= width and "\x1b" not in text
    found = json.loads(support_json(TABLE, states()))
    cells = {"cells": TABLE, "states": states(), "storages": narrow_storages()}
    assert cells.keys() < found.keys() and all(found[name] == encode(list(cells[name])) for name in cells)
