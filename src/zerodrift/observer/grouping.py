"""Parameters of a watched model that were seen alike, under names that stand for many.

Invariant: pure; every parameter is in one group, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zerodrift.observer.seen import COLUMNS, SeenModel, SeenParameter
from zerodrift.report import rows

SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """Parameters with the same cells."""

    cells: tuple[str, ...]
    """In the order of `COLUMNS`, in words; `-` where nothing was seen."""
    parameters: tuple[SeenParameter, ...]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def names(self) -> tuple[str, ...]:
        return folded(parameter.name for parameter in self.parameters)


def cell(parameter: SeenParameter, column: str) -> str:
    """What was seen, in a plan's words: `bf16`, `bf16 fp32`; `-` for nothing."""
    whats = parameter.whats(column)  # type: ignore[arg-type]
    return " ".join(">".join(SHORT.get(part, part) for part in what.split(">")) for what in whats) or "-"


def groups(model: SeenModel) -> list[SeenGroup]:
    """The group with the most elements first."""
    alike: dict[tuple[str, ...], list[SeenParameter]] = {}
    for parameter in model.parameters:
        cells = tuple(cell(parameter, column) for column in COLUMNS)
        alike.setdefault((*cells, str(parameter.trained)), []).append(parameter)
    made = [SeenGroup(cells[:-1], tuple(parameters)) for cells, parameters in alike.items()]
    return sorted(made, key=lambda group: -group.numel)


def folded(names: Iterable[str]) -> tuple[str, ...]:
    """Names that differ in numbers alone as one pattern, with how many they are."""
    lines = rows.folded([(name, None) for name in names])
    return tuple(pattern if len(held) == 1 else f"{pattern} ({len(held)})" for pattern, held in lines)
