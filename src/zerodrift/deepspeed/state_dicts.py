"""State dicts of the model and of the optimizer, and loading into `engine.module`.

`module_state_dict` and `save_16bit_model` gather a whole model, one unit at a time, in the `export` dtypes;
`zerodrift.export` writes a sharded one. As in DeepSpeed, an optimizer's state dict has this rank's shard, for
a run with the same plan and ranks; `engine.save_checkpoint` saves a run.

Invariants: names and their order are those of the model's own `state_dict`, and all ranks take part in the
same collectives. A loaded value reaches the master weights at every stage; a value that was not loaded keeps
every bit.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from zerodrift.checkpoint.atomic import new_file
from zerodrift.checkpoint.state import groups, put_groups, put_scale
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.engine.shards import Shards
from zerodrift.errors import CheckpointError
from zerodrift.plan.table import Plan, Row
from zerodrift.versions import DEEPSPEED
from zerodrift.weights.export import whole_values

# --- the whole model --------------------------------------------------------------------------------------


def model_state(engine: Engine, prefix: str, without_frozen: bool, everywhere: bool) -> dict[str, Any]:
    """Return the model's state dict on every rank, or on rank 0's CPU and an empty one elsewhere."""
    keep = everywhere or engine.mesh.rank() == 0
    values: dict[str, torch.Tensor] = {}
    for unit in engine.plan.units:
        rows = [engine.plan.rows[index] for index in unit.rows]
        rows = [row for row in rows if not (without_frozen and not row.trained)]
        for row, value in zip(rows, whole_values(engine, rows, keep), strict=True):
            if value is not None:
                values |= dict.fromkeys(row.names, value if everywhere else value.cpu())
    if not keep:
        return {}
    whole: dict[str, Any] = {}
    with native(engine.executor).guard.names_only():
        state = engine.module.state_dict()
    for name, value in state.items():
        if name in values:
            whole[prefix + name] = values[name]
        elif engine.plan.row(name) is None:  # a buffer
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
                value = value if everywhere else value.cpu()
            whole[prefix + name] = value
    return whole


def save_model(engine: Engine, folder: str | os.PathLike[str], filename: str, without_frozen: bool) -> bool:
    """Write the model to one file on rank 0. An error there is an error on every rank."""
    state = model_state(engine, "", without_frozen, everywhere=False)
    path = Path(folder) / filename
    with raise_on_all_ranks(engine.comm):
        if engine.mesh.rank() == 0:
            with new_file(path) as partial:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_state(state, partial, path.suffix == ".safetensors")
    return True


def write_state(state: dict[str, Any], path: Path, safe: bool) -> None:
    """Write a state dict as safetensors, or as torch saves it."""
    if not safe:
        # torch's own writer reports a full disk as a failed write only.
        with path.open("wb") as stream:
            torch.save(state, stream)
        return
    from safetensors.torch import save_file

    save_file(without_ties(state), path, metadata={"format": "pt"})


def without_ties(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keep the first name of each tensor, because safetensors holds no tensor twice."""
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value.contiguous() for name, value in state.items() if first[id(value)] == name}


# --- `engine.module.load_state_dict` ----------------------------------------------------------------------


def attach_loading(engine: Engine) -> None:
    """Make `load_state_dict` of the engine's module and its parts work at every stage.

    The parameters of a module are gathered while it loads, and rank 0's values become those of all ranks. A
    master takes the loaded value itself if that is wider than the compute dtype.
    """
    reference = weakref.ref(engine)
    exact: dict[str, tuple[Row, torch.Tensor]] = {}

    @contextlib.contextmanager
    def loading(rows: Mapping[str, Row], state: Mapping[str, Any]) -> Iterator[None]:
        engine = reference()
        if engine is None:
            raise AssertionError("hooks of an engine that is gone")
        engine.require_open()
        with engine.values.gathered(rows, write=True):
            yield
        exact.update(
            {n: (row, state[n]) for n, row in rows.items() if row.trained and _is_wider(state[n], row)}
        )
        if not native(engine.executor).guard.opened:  # a module loads before its children
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


# --- this rank's optimizer state --------------------------------------------------------------------------


def is_plain(plan: Plan) -> bool:
    """Return True if DeepSpeed would return the caller's own optimizer. The weights are their own masters
    then, and belong to the model's state."""
    mode = plan.policy.mode
    return plan.policy.sharding.stage == 0 and (mode.autocast or mode.dtype is DType.FP32)


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """Return this rank's master weights and moments in fp32, with groups, counters and loss scale."""
    plain = is_plain(engine.plan)
    return {
        "of": _identity(engine),
        "zero_stage": engine.plan.policy.sharding.stage,
        "ds_version": DEEPSPEED,
        "param_groups": groups(engine),
        "loss_scaler": engine.scaler.state_dict() if engine.scaler.active else None,
        "counters": {} if engine.updater is None else engine.updater.counters(),
        "pieces": [
            {"master": None if plain else piece.weights(), "moments": piece.moments()}
            for piece in Shards(engine).pieces()
            if piece.updated
        ],
    }


def load_optimizer_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Load what `optimizer_state` returned on this rank. The weights follow the master weights."""
    found = state.get("of")
    if found != _identity(engine) or engine.updater is None:
        raise CheckpointError(
            "optimizer.load_state_dict",
            "must get what `optimizer.state_dict` returned on this rank, under this plan",
            got="another state" if found is None else f"that of rank {found['rank']} of {found['ranks']}",
            do="`engine.load_checkpoint` loads a checkpoint on any number of ranks.",
        )
    engine.updater.set_counters(state["counters"])
    pieces = [piece for piece in Shards(engine).pieces() if piece.updated]
    for piece, held in zip(pieces, state["pieces"], strict=True):
        if held["master"] is not None:
            piece.set_weights(held["master"])
        for key, values in held["moments"].items():
            piece.set_moment(key, values)
    put_groups(engine, state["param_groups"])
    put_scale(engine, state["loss_scaler"])
    Shards(engine).sync_storage()


def _identity(engine: Engine) -> dict[str, Any]:
    return {"plan": engine.plan.digest, "rank": engine.mesh.rank(), "ranks": engine.mesh.size("world")}
