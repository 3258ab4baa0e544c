"""Habits on ranks: dozens one after the other on the same ranks, and each is a test.

After a habit that failed, or took its ranks with it, the others go on on new ones.
"""

from __future__ import annotations

import faulthandler
import json
import random
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

import zerodrift.deepspeed
from tests.habits import (
    graphs,
    hooks,
    loops,
    modules,
    objects,
    plain,
    script_configs,
    script_engines,
    script_gradients,
    script_parameters,
    script_whole,
    values,
)
from tests.habits.driven import Driven, OnDeepSpeed
from tests.habits.loop import Habit, Loop, differences
from tests.ranks.harness import RankFailure, run_ranks
from zerodrift.errors import ZerodriftError

HABITS = {
    habit.name: habit for room in (objects, graphs, hooks, modules, values, loops) for habit in room.HABITS
}
CLOSE = 1e-6
"""Tolerance of scripts, whose sums plain torch forms in another order."""
SCRIPTS = {
    habit.name: replace(habit, close=habit.close or CLOSE)
    for room in (script_parameters, script_gradients, script_configs, script_engines, script_whole)
    for habit in room.HABITS
}

TOGETHER = 40
"""Habits on the same ranks: many, as new ranks cost time, and few, so that workers can share a cell."""

PATIENCE = 15.0
"""Time limit of one habit, which takes a twentieth of this. Four times as much on the stand-in."""


class Setting(NamedTuple):
    """How and on how many ranks habits run."""

    stage: int
    mode: str
    ranks: int = 2
    scripts: bool = False
    """Whether they are scripts of DeepSpeed."""

    def __str__(self) -> str:
        ranks = "" if self.ranks == 2 else f"-on{self.ranks}"
        return f"stage{self.stage}-{self.mode}{ranks}"


# --- on a rank ------------------------------------------------------------------------------------------


def run_habits(names: Sequence[str], setting: Setting, folder: Path) -> None:
    """Run habits until one fails on any rank, and write the differences down."""
    patience = PATIENCE if torch.get_default_device().type == "cpu" else 4 * PATIENCE
    with (folder / str(dist.get_rank())).open("w") as notes:
        for name in names:
            faulthandler.dump_traceback_later(patience, exit=True)
            found = run_habit((SCRIPTS if setting.scripts else HABITS)[name], setting)
            # Written at once: another rank may never come to the meeting.
            print(json.dumps([name, found]), file=notes, flush=True)
            if any(_meet(found)):
                return


def run_habit(habit: Habit, setting: Setting) -> list[str]:
    """Return the differences of one habit on this rank."""
    refused = habit.refusal(setting.stage, setting.mode)
    packages = (plain.deepspeed, zerodrift.deepspeed) if setting.scripts else (None, None)
    make = OnDeepSpeed if setting.scripts else Driven
    if refused:
        _, error, trouble = run(habit, make, setting, packages[1])
        errors = _meet(f"{type(error).__name__}: {error}")
        if not isinstance(error, ZerodriftError) or refused not in str(error):
            return [f"must be refused with {refused!r}\n{trouble or 'nothing was raised'}"]
        return [] if len(set(errors)) == 1 else [f"ranks are told different things: {errors}"]
    if not habit.own:
        expected, _, trouble = run(habit, plain.Plain, setting, packages[0])
        # Nobody begins with an engine where somebody's script does not even run without.
        if any(_meet(trouble)):
            return [f"plain torch raised\n{trouble}"]
    driven, _, trouble = run(habit, make, setting, packages[1])
    if trouble:
        return [f"the engine raised\n{trouble}"]
    return [] if habit.own else differences(expected.seen, driven.seen, habit.close)


def run(habit: Habit, make: Any, setting: Setting, package: Any) -> tuple[Loop, BaseException | None, str]:
    """Run a habit in one kind of loop; return the loop, its error, and the error with its stack."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loop = Loop(setting.stage, setting.mode, dist.get_rank(), make is plain.Plain, make, package)
    if package is not None:
        folder = [tempfile.mkdtemp(prefix="script-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder, 0)
        loop.folder = Path(folder[0])
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


@dataclass
class Cell:
    """The selected habits of one setting."""

    setting: Setting
    names: list[str]
    wrong: dict[str, str] = field(default_factory=dict)

    def problem(self, name: str) -> str:
        """Return the failure of a habit, which runs together with the next ones."""
        if name not in self.wrong:
            first = self.names.index(name)
            self.wrong |= run_cell(self.setting, self.names[first : first + TOGETHER])
        return self.wrong[name]


def cells_of(request: pytest.FixtureRequest) -> dict[Setting, Cell]:
    """Return the cells of the tests in a file that were selected."""
    cells: dict[Setting, Cell] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and "setting" in item.fixturenames:
            setting, name = item.callspec.params["setting"], item.callspec.params["name"]
            cells.setdefault(setting, Cell(setting, [])).names.append(name)
    return cells


def run_cell(setting: Setting, names: Iterable[str]) -> dict[str, str]:
    """Return the failure of each habit; "" for a pass."""
    left, wrong = list(names), {}
    while left:
        with tempfile.TemporaryDirectory(prefix="habits-") as folder:
            failure, limit = "", PATIENCE * len(left)
            try:
                run_ranks(run_habits, setting.ranks, left, setting, Path(folder), timeout=limit)
            except RankFailure as error:
                failure = str(error)
            notes = [_notes(Path(folder) / str(rank)) for rank in range(setting.ranks)]
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
