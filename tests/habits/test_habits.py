"""Every habit at stages 0 and 3 and in fp32 and bf16, on two ranks; `__init__.py` defines habits.

`make test` runs each at stage 3, which does everything that stage 0 does, and gathers and frees units
besides; those of `values`, which write parameters, at stage 0 too.

Habits of a stage and a mode run on one pair of ranks, dozens one after the other, and each is a test. After a
habit that failed, or took its ranks with it, the others go on on a new pair.
"""

from __future__ import annotations

import faulthandler
import json
import random
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.habits import graphs, hooks, loops, modules, objects, values
from tests.habits.driven import Driven
from tests.habits.loop import Habit, Loop, MakeTrainer, differences
from tests.habits.plain import Plain
from tests.ranks.harness import RankFailure, run_ranks
from zerodrift.errors import ZerodriftError

HABITS = {
    habit.name: habit for room in (objects, graphs, hooks, modules, values, loops) for habit in room.HABITS
}
CELLS = [(stage, mode) for stage in (0, 3) for mode in ("fp32", "bf16")]
OF_PARAMETERS = {habit.name for habit in values.HABITS}

TOGETHER = 40
"""Habits on one pair of ranks: many, as a pair costs time, and few, so that workers can share a cell."""

PATIENCE = 15.0
"""Time limit of one habit, which takes a twentieth of this. Four times as much on the stand-in."""


# --- on a rank ------------------------------------------------------------------------------------------


def run_habits(names: Sequence[str], stage: int, mode: str, folder: Path) -> None:
    """Run habits until one fails on any rank, and write the differences down."""
    patience = PATIENCE if torch.get_default_device().type == "cpu" else 4 * PATIENCE
    with (folder / str(dist.get_rank())).open("w") as notes:
        for name in names:
            faulthandler.dump_traceback_later(patience, exit=True)
            found = run_habit(HABITS[name], stage, mode)
            # Written at once: another rank may never come to the meeting.
            print(json.dumps([name, found]), file=notes, flush=True)
            if any(_meet(found)):
                return


def run_habit(habit: Habit, stage: int, mode: str) -> list[str]:
    """Return the differences of one habit on this rank."""
    refused = habit.refusal(stage, mode)
    if refused:
        _, error, trouble = run(habit, Driven, stage, mode)
        errors = _meet(f"{type(error).__name__}: {error}")
        if not isinstance(error, ZerodriftError) or refused not in str(error):
            return [f"must be refused with {refused!r}\n{trouble or 'nothing was raised'}"]
        return [] if len(set(errors)) == 1 else [f"ranks are told different things: {errors}"]
    plain, _, trouble = run(habit, Plain, stage, mode)
    # Nobody begins with an engine where somebody's script does not even run without.
    if any(_meet(trouble)):
        return [f"plain torch raised\n{trouble}"]
    driven, _, trouble = run(habit, Driven, stage, mode)
    return [f"the engine raised\n{trouble}"] if trouble else differences(plain, driven, habit.close)


def run(habit: Habit, make: MakeTrainer, stage: int, mode: str) -> tuple[Loop, BaseException | None, str]:
    """Run a habit in one kind of loop; return the loop, its error, and the error with its stack."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loop = Loop(stage, mode, dist.get_rank(), make is Plain, make)
    try:
        habit.run(loop)
        loop.finish()
    except BaseException as error:
        return loop, error, traceback.format_exc(limit=-8)
    finally:
        loop.close()
    return loop, None, ""


def _meet(mine: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


# --- in the test ----------------------------------------------------------------------------------------


def run_cell(stage: int, mode: str, names: Iterable[str]) -> dict[str, str]:
    """Return the failure of each habit; "" for a pass."""
    left, wrong = list(names), {}
    while left:
        with tempfile.TemporaryDirectory(prefix="habits-") as folder:
            failure = ""
            try:
                run_ranks(run_habits, 2, left, stage, mode, Path(folder), timeout=PATIENCE * len(left))
            except RankFailure as error:
                failure = str(error)
            notes = [_notes(Path(folder) / str(rank)) for rank in range(2)]
        for name in list(left):
            told = [problem for rank in notes for problem in rank.get(name, [])]
            finished = all(name in rank for rank in notes)
            wrong[name] = "" if finished and not told else "\n".join([*told, failure])
            left.remove(name)
            if wrong[name]:
                break
    return wrong


def _notes(path: Path) -> dict[str, list[str]]:
    return dict(json.loads(line) for line in path.read_text().splitlines()) if path.exists() else {}


@dataclass
class Cell:
    """The selected habits at one stage and in one mode."""

    stage: int
    mode: str
    names: list[str]
    wrong: dict[str, str] = field(default_factory=dict)

    def problem(self, name: str) -> str:
        """Return the failure of a habit, which runs together with the next ones."""
        if name not in self.wrong:
            first = self.names.index(name)
            self.wrong |= run_cell(self.stage, self.mode, self.names[first : first + TOGETHER])
        return self.wrong[name]


@pytest.fixture(scope="module")
def cells(request: pytest.FixtureRequest) -> dict[tuple[int, str], Cell]:
    chosen: dict[tuple[int, str], list[str]] = {cell: [] for cell in CELLS}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            chosen[item.callspec.params["cell"]].append(item.callspec.params["name"])
    return {cell: Cell(*cell, names) for cell, names in chosen.items()}


def at(cell: tuple[int, str], habit: Habit) -> Any:
    """Return a test of a habit in its cell."""
    stage, mode = cell
    if habit.name in OF_PARAMETERS:
        marks = [] if habit.split else [pytest.mark.cells(2)]
    else:
        marks = [pytest.mark.cells(1) if stage else pytest.mark.slow]
    return pytest.param(cell, habit.name, id=f"stage{stage}-{mode}-{habit.name}", marks=marks)


@pytest.mark.parametrize(("cell", "name"), [at(cell, habit) for cell in CELLS for habit in HABITS.values()])
def test_habit(cells: dict[tuple[int, str], Cell], cell: tuple[int, str], name: str) -> None:
    problem = cells[cell].problem(name)
    assert not problem, problem
