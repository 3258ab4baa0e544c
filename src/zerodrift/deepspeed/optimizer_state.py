"""`optimizer.state_dict()` and `load_state_dict`: what this rank holds of the optimizer's state.

As in DeepSpeed it is of one rank: for a run that goes on with the same plan, on as many ranks.
`engine.save_checkpoint` is for any number of them, and is what saves a run. Where the weights are their own
masters on every rank they are the model's, and in no state of the optimizer.

Invariant: what was loaded is what was there, to the bit; a state of another rank or plan is refused before
anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerodrift.checkpoint.state import groups, put_groups, put_scale
from zerodrift.dtypes import DType
from zerodrift.engine.engine import Engine
from zerodrift.engine.shards import Shards
from zerodrift.errors import CheckpointError
from zerodrift.plan.table import Plan
from zerodrift.versions import DEEPSPEED


def is_plain(plan: Plan) -> bool:
    """Whether DeepSpeed has the caller's own optimizer there, over the model's own parameters."""
    mode = plan.policy.mode
    return plan.policy.sharding.stage == 0 and (mode.autocast or mode.dtype is DType.FP32)


def state_dict(engine: Engine) -> dict[str, Any]:
    """Masters and moments of this rank's pieces in fp32, with groups, counters and loss scale."""
    return {
        "of": _of(engine),
        "zero_stage": engine.plan.policy.sharding.stage,
        "ds_version": DEEPSPEED,
        "param_groups": groups(engine),
        "loss_scaler": engine.scaler.state_dict() if engine.scaler.active else None,
        "counters": {} if engine.updater is None else engine.updater.counters(),
        "pieces": [
            {"master": None if is_plain(engine.plan) else piece.weights(), "moments": piece.moments()}
            for piece in Shards(engine).pieces()
            if piece.updated
        ],
    }


def load_state_dict(engine: Engine, state: Mapping[str, Any]) -> None:
    """Take it back; every rank its own. The weights follow from the masters."""
    found = state.get("of")
    if found != _of(engine) or engine.updater is None:
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


def _of(engine: Engine) -> dict[str, Any]:
    """Whose state it is."""
    return {"plan": engine.plan.digest, "rank": engine.mesh.rank(), "ranks": engine.mesh.size("world")}
