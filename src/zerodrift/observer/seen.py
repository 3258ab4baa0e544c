"""The nouns of a run that was watched: what one process saw of every parameter, and in what it was seen.

A cell holds sightings: the dtype, and the first operation, collective or tensor that showed it. A cell that
could not be seen has a reason instead. Values only: every process of a command writes its own as JSON, and
the command line reads them.

Invariant: what was not seen has no sighting. Nothing here is taken from a config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

Column = Literal["storage", "gather", "compute", "grad", "accumulate", "reduce", "master", "state", "export"]

COLUMNS: tuple[Column, ...] = (
    *("storage", "gather", "compute", "grad", "accumulate", "reduce", "master", "state", "export"),
)
"""In the order of a plan."""

VERSION = 1
"""Of the JSON."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """One dtype in one cell, and what showed it first."""

    what: str
    """The dtype in torch's words; of a reduction `wire>sum` where the sum is known to be another, of a master
    `same` where the optimizer updates storage itself."""
    by: str
    """The operation, the collective, or the tensor."""
    module: str = ""
    """Path of the module whose forward ran; empty where none did."""
    line: str = ""
    """`file:line` of the script, or of the code that the script called."""


class Facts(TypedDict, total=False):
    """What is known of a parameter besides dtypes."""

    changed: bool
    """Whether its values changed over the observed steps."""
    optimized: bool
    """Whether an optimizer that stepped holds it."""
    gradients: int
    """That arrived at it."""
    reductions: int
    """That carried its gradient."""
    master_rounded: bool
    """Whether its master began as values that storage holds exactly."""
    began: int | None
    """Of its first values, where they are of this tensor alone."""
    digest: int | None
    """Of its values after the observed steps, where this rank holds all of it."""
    own: list[float]
    """Sampled elements of the gradients of this rank, added in fp64; none where some were not sampled."""
    used: list[float | None]
    """The same elements of what the optimizer was given."""


Line = str | Callable[[], str]
"""`file:line`, or what tells it where it is wanted."""


@dataclass
class SeenParameter:
    """One parameter of a model."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Dotted class of the module that holds it."""
    trained: bool
    """Whether it requires a gradient."""
    layout: str = ""
    """How it is spread over ranks; empty where each has all of it."""
    also: tuple[str, ...] = ()
    """Other names of the same tensor."""
    cells: dict[Column, list[Sighting]] = field(default_factory=dict)
    unseen: dict[Column, str] = field(default_factory=dict)
    """Why a cell is empty."""
    facts: Facts = field(default_factory=Facts)
    """What is known besides dtypes."""

    @property
    def numel(self) -> int:
        total = 1
        for length in self.shape:
            total *= length
        return total

    def whats(self, column: Column) -> tuple[str, ...]:
        """The dtypes that were seen, in order of sight."""
        return tuple(sighting.what for sighting in self.cells.get(column, ()))

    def has(self, column: Column, what: str) -> bool:
        """Whether this dtype was seen in this cell."""
        return any(sighting.what == what for sighting in self.cells.get(column, ()))

    def see(self, column: Column, what: str, by: str, module: str = "", line: Line = "") -> None:
        """Add a sighting, unless this dtype was seen in this cell."""
        if not self.has(column, what):
            line = line if isinstance(line, str) else line()
            self.cells.setdefault(column, []).append(Sighting(what, by, module, line))


@dataclass
class SeenModel:
    """One model: a module whose forward a script called, or that wraps one."""

    name: str
    parameters: list[SeenParameter]
    buffers: dict[str, str] = field(default_factory=dict)
    """Floating-point buffers and their dtypes."""
    trained: bool = True
    """Whether an optimizer updated any of it."""
    wrappers: tuple[str, ...] = ()
    """Classes around it, outermost first."""
    ties: bool | None = None
    """Whether its config says that input and output embeddings are one; None where none says."""

    def parameter(self, name: str) -> SeenParameter | None:
        for parameter in self.parameters:
            if parameter.name == name or name in parameter.also:
                return parameter
        return None


@dataclass
class SeenProcess:
    """What one process saw."""

    rank: int
    world: int
    steps: int
    """Optimizer steps that were watched."""
    models: list[SeenModel]
    micro_batches: int = 1
    """Backward passes of the last of these steps."""
    libraries: dict[str, str] = field(default_factory=dict)
    """What took part, and its version."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what could not be seen, or not surely."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened that a finding is made of: `{"kind": ..., "line": ...}`."""
    ended: str = "steps"
    """`steps` where all were seen, `exit` where the program ended before, `crash` where by an error, `broken`
    where the observer failed."""

    def to_json(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "rank": self.rank,
            "world": self.world,
            "steps": self.steps,
            "micro_batches": self.micro_batches,
            "ended": self.ended,
            "libraries": self.libraries,
            "notes": self.notes,
            "events": self.events,
            "models": [_model_json(model) for model in self.models],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SeenProcess:
        return cls(
            rank=data["rank"],
            world=data["world"],
            steps=data["steps"],
            models=[_model(model) for model in data["models"]],
            micro_batches=data["micro_batches"],
            libraries=data["libraries"],
            notes=data["notes"],
            events=data["events"],
            ended=data["ended"],
        )


def _model_json(model: SeenModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "trained": model.trained,
        "wrappers": list(model.wrappers),
        "ties": model.ties,
        "buffers": model.buffers,
        "parameters": [_parameter_json(parameter) for parameter in model.parameters],
    }


def _parameter_json(parameter: SeenParameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "shape": list(parameter.shape),
        "kind": parameter.kind,
        "trained": parameter.trained,
        "layout": parameter.layout,
        "also": list(parameter.also),
        "cells": {
            column: [[s.what, s.by, s.module, s.line] for s in sightings]
            for column, sightings in parameter.cells.items()
        },
        "unseen": parameter.unseen,
        "facts": parameter.facts,
    }


def _model(data: dict[str, Any]) -> SeenModel:
    return SeenModel(
        name=data["name"],
        parameters=[_parameter(item) for item in data["parameters"]],
        buffers=data["buffers"],
        trained=data["trained"],
        wrappers=tuple(data["wrappers"]),
        ties=data["ties"],
    )


def _parameter(data: dict[str, Any]) -> SeenParameter:
    return SeenParameter(
        name=data["name"],
        shape=tuple(data["shape"]),
        kind=data["kind"],
        trained=data["trained"],
        layout=data["layout"],
        also=tuple(data["also"]),
        cells={column: [Sighting(*item) for item in items] for column, items in data["cells"].items()},
        unseen=data["unseen"],
        facts=data["facts"],
    )


def joined(words: Iterable[str]) -> str:
    """A cell in words: `bfloat16, float32`."""
    return ", ".join(words)
