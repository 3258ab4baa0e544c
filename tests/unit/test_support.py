"""The support table: complete, and the same as what resolve and build do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import moe
from zerodrift import ConfigError, build, load, mesh_for, resolve
from zerodrift.policy.nouns import State
from zerodrift.policy.support import StateCell, SupportCell, states, table

TABLE = table()


def config(cell: SupportCell, allow: bool) -> dict[str, Any]:
    written: dict[str, Any] = {
        "precision": {"mode": cell.mode},
        "zero_optimization": {"stage": cell.stage},
        "backend": cell.backend,
    }
    if cell.accumulate != "default":
        written["gradient_accumulation_dtype"] = cell.accumulate
    if cell.pipeline:
        written["pipeline"] = {"stages": 2}
    if allow:
        written["precision"]["allow_narrow"] = True
    return written


def accepted(cell: SupportCell, allow: bool) -> bool:
    try:
        loaded = load(config(cell, allow))
        mesh = mesh_for(loaded, 4)
        build(resolve(loaded, mesh), moe(), mesh)
    except ConfigError:
        return False
    return True


def label(cell: SupportCell) -> str:
    pipeline = "pp" if cell.pipeline else "no-pp"
    return f"{cell.backend}-{cell.mode}-{cell.accumulate}-{pipeline}-{cell.stage}"


def test_the_table_has_every_cell_once() -> None:
    keys = {(c.mode, c.accumulate, c.pipeline, c.stage, c.backend) for c in TABLE}
    assert len(TABLE) == len(keys) == 5 * 4 * 2 * 4 * 2


@pytest.mark.parametrize("cell", TABLE, ids=label)
def test_a_cell_says_what_really_happens(cell: SupportCell) -> None:
    assert accepted(cell, allow=False) == (cell.status == "yes")
    assert accepted(cell, allow=True) == (cell.status in ("yes", "narrow"))
    assert bool(cell.reason) == (cell.status != "yes")


def test_sums_in_fp32_always_run_and_those_of_bf16_are_never_fp16() -> None:
    for mode in ("bf16", "fp16"):
        cells = [c for c in TABLE if (c.backend, c.mode, c.accumulate) == ("native", mode, "fp32")]
        assert len(cells) == 8 and {c.status for c in cells} == {"yes"}
    assert {c.status for c in TABLE if (c.mode, c.accumulate) == ("bf16", "fp16")} == {"no"}


# --- state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", states(), ids=lambda cell: f"{cell.backend}-{cell.state}-{cell.beta2}")
def test_a_state_cell_says_what_really_happens(cell: StateCell) -> None:
    written = {
        "precision": {"mode": "bf16", "state": cell.state},
        "zero_optimization": {"stage": 2},
        "backend": cell.backend,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, cell.beta2]}},
    }
    loaded = load(written)
    mesh = mesh_for(loaded, 4)
    policy = resolve(loaded, mesh)
    if cell.status == "yes":
        rows = build(policy, moe(), mesh).rows
        assert {row.columns.update.state for row in rows if row.columns.update} == {State(cell.state)}
    else:
        with pytest.raises(ConfigError, match="state"):
            build(policy, moe(), mesh)


def test_every_state_runs_somewhere_and_has_a_cell() -> None:
    assert {cell.state for cell in states() if cell.status == "yes"} == {str(state) for state in State}
