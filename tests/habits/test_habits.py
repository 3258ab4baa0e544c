"""Every habit at stages 0 and 3 and in fp32 and bf16, on two ranks; `__init__.py` defines habits.

`make test` runs each at stage 3, which does everything that stage 0 does, and gathers and frees units
besides; those of `values`, which write parameters, at stage 0 too, unless they are refused at both.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.habits import values
from tests.habits.cells import HABITS, Cell, Setting, cells_of
from tests.habits.loop import Habit

SETTINGS = [Setting(stage, mode) for stage in (0, 3) for mode in ("fp32", "bf16")]
OF_PARAMETERS = {habit.name for habit in values.HABITS}


def at(setting: Setting, habit: Habit) -> Any:
    """Return a test of a habit in a setting."""
    if habit.name in OF_PARAMETERS and (not habit.refused or habit.at == (3,)):
        marks = [] if habit.split else [pytest.mark.cells(2)]
    else:
        marks = [pytest.mark.cells(1) if setting.stage else pytest.mark.slow]
    return pytest.param(setting, habit.name, id=f"{setting}-{habit.name}", marks=marks)


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> dict[Setting, Cell]:
    return cells_of(request)


@pytest.mark.parametrize(
    ("setting", "name"), [at(setting, habit) for setting in SETTINGS for habit in HABITS.values()]
)
def test_habit(cells: dict[Setting, Cell], setting: Setting, name: str) -> None:
    problem = cells[setting].problem(name)
    assert not problem, problem
