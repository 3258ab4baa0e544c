"""`engine.module.load_state_dict(state)`: weights that are loaded reach the masters, at every stage.

Each module that loads something has its parameters gathered meanwhile, on all ranks, and rank 0's become
everybody's. A master takes the loaded value as it is, where that is wider than what the model computes in.

Invariant: what a state dict does not name, or does not fit, stays as it was, every bit.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.plan.table import Row


def let_load(engine: Engine) -> None:
    """From now on the engine's module and its parts load as ordinary ones."""
    running = weakref.ref(engine)
    exact: dict[str, tuple[Row, torch.Tensor]] = {}

    @contextlib.contextmanager
    def loading(rows: Mapping[str, Row], state: Mapping[str, Any]) -> Iterator[None]:
        engine = running()
        if engine is None:
            raise AssertionError("hooks of an engine that is gone")
        engine.require_open()
        with engine.values.gathered(rows, write=True):
            yield
        exact.update(
            {n: (row, state[n]) for n, row in rows.items() if row.trained and _is_wider(state[n], row)}
        )
        if not native(engine.executor).guard.opened:  # a module's parameters are loaded before its parts'
            for row, value in exact.values():
                _set_master(engine, row, value)
            exact.clear()

    native(engine.executor).guard.loading = loading


def _set_master(engine: Engine, row: Row, value: torch.Tensor) -> None:
    exact = value.detach().to(engine.mesh.device, torch.float32, copy=True).contiguous()
    engine.comm.broadcast(exact.view(-1), 0, "data")
    engine.values.set_master(row, exact)


def _is_wider(value: Any, row: Row) -> bool:
    compute = row.columns.compute.torch
    return (
        isinstance(value, torch.Tensor)
        and tuple(value.shape) == row.whole_shape
        and value.is_floating_point()
        and torch.promote_types(value.dtype, compute) is not compute
        and value.dtype is not torch.float64
    )
