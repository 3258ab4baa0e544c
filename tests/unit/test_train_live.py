"""The live line of a run fits the terminal, and leaves out the least important parts first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerodrift.train.report.display import DROPPED, LineState, line
from zerodrift.train.report.metrics import StepMetrics

STEP = StepMetrics(1200, 2.34567, 1.5, 1e-3, 65536.0, 9, 0.5, 60.0, 123456.0, 3 << 30)
FULL = LineState(24000, 1200, STEP, "2.4001", 3725.0, "", "3/8", 4.0)
PARTS = {
    "memory": "3.00 GiB",
    "norm": "norm 1.50",
    "micro-batch": "micro-batch 3/8",
    "scale": "scale 65536",
    "lr": "lr 1.00e-03",
    "speed": "123K tokens/s",
    "val": "val 2.4001",
}


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 200, 300])
def test_the_line_fits_and_keeps_what_matters(width: int) -> None:
    text = line(FULL, width).plain
    assert len(text) <= width
    if width >= 60:
        assert text.startswith("step 1200/24000  ") and "loss 2.3457" in text and text.endswith("eta 1:02:05")


def test_what_goes_goes_in_order() -> None:
    """The parts that are left out at any width are the first of the list."""
    for width in range(40, 200):
        text = line(FULL, width).plain
        there = [PARTS[name] in text for name in DROPPED if name in PARTS]
        assert there == sorted(there), (width, text)
    assert list(DROPPED[:2]) == ["memory", "norm"]
    assert all(part in text for part in PARTS.values()) and "━" in text and "5%" in text


def test_a_first_step_shows_its_micro_batches_and_its_time() -> None:
    text = line(LineState(steps=10, micro_batch="3/8", spent=25.0), 60).plain
    assert text.startswith("step 0/10  micro-batch 3/8  ") and text.endswith("0:25")
    assert line(LineState(doing="reading the data", spent=61.0), 60).plain == "reading the data  1:01"


def test_the_last_validation_loss_is_shown() -> None:
    assert "val 2.4001" in line(FULL, 120).plain
    assert "val 1.9" in line(replace(FULL, validation="1.9"), 120).plain
