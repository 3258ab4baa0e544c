"""The nouns of an observation: per parameter and column the dtypes that were seen, in torch's names.

Values only, so that ranks can send them to each other and a file can hold them. `observe` fills them from
an engine that takes a step, `compare` holds them against the plan.

Invariant: what was not seen is absent. Nothing here is taken from the plan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Column = Literal["storage", "gather", "compute", "grad", "accumulate", "reduce", "master", "state"]
"""Those of the plan that a step shows; `export` is seen in the exported file."""


@functools.cache
def name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass
class Observed:
    """What one rank, or all of them together, saw in a step."""

    cells: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """Parameter -> column -> what was seen. `reduce` is `wire>sum`, or one name where they agree."""
    logits: set[str] = field(default_factory=set)
    """Dtypes of the floating outputs of the model, the loss left out."""

    def see(self, name: str, column: Column, what: str) -> None:
        self.cells.setdefault(name, {}).setdefault(column, set()).add(what)

    def seen(self, name: str, column: Column) -> frozenset[str]:
        return frozenset(self.cells.get(name, {}).get(column, ()))

    def to_json(self) -> dict[str, Any]:
        """Parameters that were seen alike are listed together."""
        groups: dict[str, list[str]] = {}
        shown: dict[str, dict[str, list[str]]] = {}
        for name, columns in self.cells.items():
            plain = {column: sorted(dtypes) for column, dtypes in sorted(columns.items())}
            groups.setdefault(repr(plain), []).append(name)
            shown[repr(plain)] = plain
        return {
            "logits": sorted(self.logits),
            "parameters": [{"seen": shown[key], "names": names} for key, names in groups.items()],
        }


def merged(parts: Iterable[Observed]) -> Observed:
    """What all of them saw."""
    total = Observed()
    for part in parts:
        total.logits |= part.logits
        for name, columns in part.cells.items():
            for column, dtypes in columns.items():
                for what in dtypes:
                    total.see(name, column, what)  # type: ignore[arg-type]
    return total
