"""Tables of runs as files: written by `check --save`, compared by `check --expect` and `diff`.

Invariant: a file that is not one is refused by name; every difference names its parameter and column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError
from zerodrift.observer.finding import RunFinding
from zerodrift.observer.grouping import cell, folded
from zerodrift.observer.seen import COLUMNS, VERSION, SeenModel, SeenParameter, SeenProcess

FORMAT = "zerodrift check"


def encoded(processes: Sequence[SeenProcess], findings: Sequence[RunFinding]) -> str:
    """The text of a file."""
    table = {
        "format": FORMAT,
        "version": VERSION,
        "findings": [finding.to_json() for finding in findings],
        "ranks": [process.to_json() for process in processes],
    }
    return json.dumps(table, indent=1) + "\n"


def is_table(data: Any) -> bool:
    return isinstance(data, dict) and data.get("format") == FORMAT


def read(path: Path) -> list[SeenProcess]:
    """The ranks of a saved table."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(path.name, "must be a table that `check --save` wrote", got=error) from None
    if not is_table(data):
        raise ConfigError(
            path.name, "must be a table that `check --save` wrote", got="JSON of something else"
        )
    if data.get("version") != VERSION:
        raise ConfigError(
            path.name, f"must be of version {VERSION}", got=repr(data.get("version")), do="Save it again."
        )
    try:
        processes = [SeenProcess.from_json(rank) for rank in data["ranks"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(path.name, "must be a table that `check --save` wrote", got=repr(error)) from None
    if not processes:
        raise ConfigError(path.name, "must have a rank", got="none")
    return processes


@dataclass(frozen=True, slots=True)
class CellDifference:
    """One column of some parameters that was seen otherwise."""

    column: str
    a: str
    b: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(folded(self.names))}: {self.column} was {self.a}, is {self.b}"


def differences(a: Sequence[SeenProcess], b: Sequence[SeenProcess]) -> list[CellDifference]:
    """Between the first ranks of two tables: `a` as it was, `b` as it is."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, column, was, now in _unlike(a[0], b[0]):
        alike.setdefault((column, was, now), []).append(name)
    return [CellDifference(*key, tuple(names)) for key, names in alike.items()]


def _unlike(a: SeenProcess, b: SeenProcess) -> Iterator[tuple[str, str, str, str]]:
    models = {model.name: model for model in b.models}
    names = [model.name for model in a.models]
    for model in a.models:
        other = models.get(model.name)
        if other is None:
            others = [one for one in b.models if one.name not in names]
            other = others[0] if len(a.models) == len(b.models) and len(others) == 1 else None
        if other is None:
            yield model.name, "model", "seen", "not seen"
            continue
        yield from _of_model(model, other)
    for model in b.models:
        if model.name not in names and len(a.models) != len(b.models):
            yield model.name, "model", "not seen", "seen"


def _of_model(a: SeenModel, b: SeenModel) -> Iterator[tuple[str, str, str, str]]:
    for parameter in a.parameters:
        other = b.parameter(parameter.name)
        if other is None:
            yield parameter.name, "parameter", "there", "missing"
            continue
        for column in COLUMNS:
            was, now = _words(parameter, column), _words(other, column)
            if was != now:
                yield parameter.name, column, was, now
        if parameter.trained != other.trained:
            yield parameter.name, "training", _trained(parameter), _trained(other)
    for parameter in b.parameters:
        if a.parameter(parameter.name) is None:
            yield parameter.name, "parameter", "missing", "there"


def _words(parameter: SeenParameter, column: str) -> str:
    return " ".join(sorted(cell(parameter, column).split(" ")))


def _trained(parameter: SeenParameter) -> str:
    return "trained" if parameter.trained else "frozen"
