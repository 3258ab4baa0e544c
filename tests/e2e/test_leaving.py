"""The interpreter exits cleanly with process groups open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.launching import torchrun

SCRIPT = Path(__file__).with_name("leaving.py")


@pytest.mark.slow
def test_a_script_that_stops_nothing_ends_well(tmp_path: Path) -> None:
    """Each start may fail by itself: one in five aborted. Slow because it starts twelve times."""
    for _ in range(12):
        torchrun(SCRIPT, [], tmp_path)
