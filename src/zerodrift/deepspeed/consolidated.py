"""The whole model as a state dict: in the `export` dtypes, a unit at a time, and into one file.

For a sharded model that should not pass through one rank there is `zerodrift`'s own export; this is what
DeepSpeed's `module_state_dict` and `save_16bit_model` mean.

Invariant: keys and their order are those of the model's own `state_dict`, and all ranks take the same
collectives, whoever keeps what they bring.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from zerodrift.checkpoint.atomic import new_file
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.weights.export import whole_values


def state_dict(engine: Engine, prefix: str, without_frozen: bool, everywhere: bool) -> dict[str, Any]:
    """On every rank, or on rank 0's CPU and empty elsewhere."""
    keep = everywhere or engine.mesh.rank() == 0
    values: dict[str, torch.Tensor] = {}
    for unit in engine.plan.units:
        rows = [engine.plan.rows[index] for index in unit.rows]
        rows = [row for row in rows if not (without_frozen and not row.trained)]
        for row, value in zip(rows, whole_values(engine, rows, keep), strict=True):
            if value is None:
                continue
            value = value if everywhere else value.cpu()
            values |= dict.fromkeys(row.names, value)
    if not keep:
        return {}
    values_of: dict[str, Any] = {}
    with native(engine.executor).attached.names_only():
        state = engine.module.state_dict()
    for name, value in state.items():
        if name in values:
            values_of[prefix + name] = values[name]
        elif engine.plan.row(name) is None:
            values_of[prefix + name] = _copy(value, everywhere) if isinstance(value, torch.Tensor) else value
    return values_of


def _copy(buffer: torch.Tensor, everywhere: bool) -> torch.Tensor:
    copy = buffer.detach().clone()
    return copy if everywhere else copy.cpu()


def save(engine: Engine, folder: str | os.PathLike[str], filename: str, without_frozen: bool) -> bool:
    """One file, written by rank 0; an error there is an error on every rank."""
    state = state_dict(engine, "", without_frozen, everywhere=False)
    path = Path(folder) / filename
    with raise_on_all_ranks(engine.comm):
        if engine.mesh.rank() == 0:
            with new_file(path) as partial:
                path.parent.mkdir(parents=True, exist_ok=True)
                write(state, partial, path.suffix == ".safetensors")
    return True


def write(state: dict[str, Any], path: Path, safe: bool) -> None:
    """A state dict as safetensors or as torch saves it; raises what the system refuses."""
    if not safe:
        # A stream of Python's: torch's own says of a full disk only that a write failed.
        with path.open("wb") as stream:
            torch.save(state, stream)
        return
    from safetensors.torch import save_file

    seen: set[int] = set()
    unique = {}
    for name, value in state.items():
        if id(value) not in seen:  # tied names are one tensor, which the format holds once
            unique[name] = value.contiguous()
        seen.add(id(value))
    save_file(unique, path, metadata={"format": "pt"})
