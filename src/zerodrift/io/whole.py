"""Whole values of an engine's parameters in the dtypes of the `export` column, some at a time.

For what is handed to somebody in memory; files are written in slices, by `io/safetensors/export.py`.

Invariant: the bits are those of an export: storage's where that has the dtype, else the master rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerodrift.engine.engine import Engine
from zerodrift.plan.table import Row


def whole_values(engine: Engine, rows: Sequence[Row], keep: bool = True) -> list[torch.Tensor | None]:
    """Copies. Every rank calls it, and has them where it is to `keep` them."""
    values: dict[str, torch.Tensor] = {}
    rest: list[Row] = []
    with torch.no_grad():
        with engine.gathered([row.name for row in rows]) as shown:
            for row in rows:
                if shown[row.name].dtype is not row.columns.export.torch:
                    rest.append(row)
                elif keep:
                    values[row.name] = shown[row.name].clone()
        for row in rest:
            master = engine.parameter(row.name).master
            if keep:
                values[row.name] = master.to(row.columns.export.torch)
    return [values.get(row.name) for row in rows]
