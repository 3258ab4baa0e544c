"""The report of a replay names the differences from the recorded step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import moe
from zerodrift.api import make_plan
from zerodrift.errors import ConfigError
from zerodrift.train.tools.replay import changed_circumstances, compare_step, difference_lines

UNITS = {"": "0a", "layers.0": "1a", "layers.1": "2a"}


def line(**changed: Any) -> dict[str, Any]:
    return {"step": 7, "losses": ["0x1.0p+1"] * 4, "gradients": UNITS, "state": UNITS, **changed}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param(
            {"losses": ["0x1.0p+1", "0x1.0p+1", "0x1.8p+1", "0x1.0p+1"], "gradients": {}},
            ["losses     other in micro-batch 2 (rank 0)", "Look at the data of these micro-batches"],
            id="a loss, with the rank that has it in turn",
        ),
        pytest.param(
            {"gradients": {"": "0b", "layers.0": "1b", "layers.1": "2a"}},
            [
                "gradients  other in 2 of 3 units: what is in no block, layers.0",
                "The backward comes to layers.0 first",
            ],
            id="gradients, the last of the model first",
        ),
        pytest.param(
            {"state": {**UNITS, "layers.1": "2b"}},
            ["gradients  the same", "state      other in 1 of 3 units: layers.1", "it is in the update"],
            id="the update where gradients are the same",
        ),
    ],
)
def test_what_differs_is_named_with_where_to_look(changed: dict[str, Any], words: list[str]) -> None:
    written = {"gradient_accumulation_steps": 2, "precision": {"reduce": {"order": "rank"}}}
    plan = make_plan(written, moe(), world_size=2)
    said = "\n".join(difference_lines(compare_step(line(), line(**changed)), 3, plan, ["by a, here b"]))
    for word in [*words, "  computed   by a, here b"]:
        assert word in said
    assert compare_step(line(), line()) == {}


def test_what_bits_depend_on_is_said_where_it_is_other() -> None:
    lines = [
        {"kind": "start", "step": 0, "torch": "2.12.0", "threads": 2, "processor": "one"},
        {"kind": "step", "step": 1},
        {"kind": "start", "step": 4, "torch": "2.13.0", "threads": 2, "processor": "one"},
    ]
    now = {"torch": "2.13.0", "threads": 1, "processor": "one", "kernels": "plain"}
    assert changed_circumstances(lines, 3, now) == ["by torch 2.12.0, here 2.13.0", "by threads 2, here 1"]
    assert changed_circumstances(lines, 4, now) == ["by threads 2, here 1"]


def test_another_number_of_micro_batches_is_an_error() -> None:
    with pytest.raises(ConfigError, match="4 micro-batches, where there are 2"):
        compare_step(line(), line(losses=["0x1.0p+1"] * 2))
