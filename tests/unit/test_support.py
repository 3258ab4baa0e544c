"""The support table: complete, and the same as what resolve and build do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import at, plan
from zerodrift import ConfigError
from zerodrift.policy.decisions import State
from zerodrift.policy.support import StateCell, SupportCell, states, table

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


@pytest.mark.parametrize("cell", TABLE, ids=label)
def test_a_cell_says_what_really_happens(cell: SupportCell) -> None:
    assert accepted(cell) == (cell.status == "yes")
    assert accepted(cell, allow_narrow=True) == (cell.status in ("yes", "narrow"))
    assert bool(cell.reason) == (cell.status != "yes")


def test_sums_in_fp32_always_run_and_those_of_bf16_are_never_fp16() -> None:
    for mode in ("bf16", "fp16"):
        cells = [c for c in TABLE if (c.backend, c.mode, c.accumulate) == ("native", mode, "fp32")]
        assert len(cells) == 8 and {c.status for c in cells} == {"yes"}
    assert {c.status for c in TABLE if (c.mode, c.accumulate) == ("bf16", "fp16")} == {"no"}


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
