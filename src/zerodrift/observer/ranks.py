"""One table of what several ranks saw: where the first has a slice of some parameters, others have the rest.

Invariant: a cell that the first rank saw is not touched; what comes from another says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerodrift.observer.seen import COLUMNS, SeenModel, SeenParameter, SeenProcess


def completed(processes: Sequence[SeenProcess]) -> list[SeenProcess]:
    """The same processes, cells of the first filled in from those of the others."""
    first, *others = processes
    for model in first.models:
        for other in others:
            same = same_model(other, model, first)
            if same is not None:
                _complete(model, same, other.rank)
    return [first, *others]


def same_model(process: SeenProcess, model: SeenModel, among: SeenProcess) -> SeenModel | None:
    """A model of one process, in another: of those with its name, as many came before."""
    place = [id(one) for one in among.models if one.name == model.name].index(id(model))
    named = [one for one in process.models if one.name == model.name]
    return named[place] if place < len(named) else None


def _complete(model: SeenModel, other: SeenModel, rank: int) -> None:
    for parameter in model.parameters:
        theirs = other.parameter(parameter.name)
        if theirs is not None:
            _fill(parameter, theirs, rank)


def _fill(parameter: SeenParameter, theirs: SeenParameter, rank: int) -> None:
    if theirs.facts.get("optimized"):
        parameter.facts["optimized"] = True
    for column in COLUMNS:
        if not parameter.cells.get(column) and theirs.cells.get(column):
            parameter.cells[column] = [
                replace(sighting, by=f"{sighting.by}, on rank {rank}") for sighting in theirs.cells[column]
            ]
            parameter.unseen.pop(column, None)
