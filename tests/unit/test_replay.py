"""What a replay says of a recorded step that came out otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import moe
from zerodrift.api import make_plan
from zerodrift.errors import ConfigError
from zerodrift.plan.table import Plan
from zerodrift.train.tools.replay import ReplayResult, StepDifference, _circumstances, _compared, result_lines


def line(**changed: Any) -> dict[str, Any]:
    units = {"": "0a", "layers.0": "1a", "layers.1": "2a"}
    return {"step": 7, "losses": ["0x1.0p+1"] * 4, "gradients": units, "state": units, **changed}


def plan() -> Plan:
    return make_plan({"gradient_accumulation_steps": 2}, moe(), world_size=2)


def text(found: StepDifference | None, ranks: int = 2) -> str:
    return "\n".join(result_lines(ReplayResult(5, 3, found), plan(), ranks))


def test_equal_lines_are_the_same() -> None:
    assert _compared(line(), line(), 6) is None
    assert text(None) == "the same bits in 3 recorded steps, on 2 ranks, as they were recorded"
    assert text(None, 1) == "the same bits in 3 recorded steps, on 1 rank, where 2 recorded them"


def test_losses_come_first_and_name_the_rank() -> None:
    other = line(losses=["0x1.0p+1", "0x1.0p+1", "0x1.8p+1", "0x1.0p+1"], gradients={})
    said = text(_compared(line(), other, 6))
    assert "losses     other in micro-batch 2 (rank 0)" in said  # in turns
    assert "Look at the data of these micro-batches" in said and "no digest" not in said


def test_the_last_unit_of_the_model_is_the_first_of_the_backward() -> None:
    gradients = {"": "0b", "layers.0": "1b", "layers.1": "2a"}
    said = text(_compared(line(), line(gradients=gradients), 4))
    assert "gradients  other in 2 of 3 units: what is in no block, layers.0" in said
    assert "The backward comes to layers.0 first" in said
    assert "It may have begun after step 4" in said


def test_the_update_is_left_where_gradients_are_the_same() -> None:
    said = text(_compared(line(), line(state={"": "0a", "layers.0": "1a", "layers.1": "2b"}), 6))
    assert "gradients  the same" in said and "state      other in 1 of 3 units: layers.1" in said
    assert "it is in the update" in said


def test_what_bits_depend_on_is_said_where_it_is_other() -> None:
    lines = [
        {"kind": "start", "step": 0, "torch": "2.12.0", "threads": 2, "processor": "one"},
        {"kind": "step", "step": 1},
        {"kind": "start", "step": 4, "torch": "2.13.0", "threads": 2, "processor": "one"},
    ]
    now = {"torch": "2.13.0", "threads": 1, "processor": "one", "kernels": "plain"}
    apart = _circumstances(lines, 3, now)
    assert apart == ("by torch 2.12.0, here 2.13.0", "by threads 2, here 1")
    assert _circumstances(lines, 4, now) == ("by threads 2, here 1",)
    difference = _compared(line(), line(losses=["0x1.8p+1"] * 4), 6)
    said = result_lines(ReplayResult(4, 1, difference, apart), plan(), 2)
    assert "  computed   by torch 2.12.0, here 2.13.0; by threads 2, here 1" in said
    assert "  computed" not in text(difference)


def test_another_number_of_micro_batches_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 micro-batches, where there are 2"):
        _compared(line(), line(losses=["0x1.0p+1"] * 2), 6)
