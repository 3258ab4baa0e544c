"""What `backend: fsdp2` cannot do: columns and settings that are refused, with the nearest that can be had.

`fully_shard` gathers in the compute dtype, sums sharded gradients in the storage dtype, and hands its
parameters to an optimizer of torch, which updates storage and keeps its moments in the storage dtype. What
follows from names of modules is in `plan/groups.py`; which dtypes gradients may be summed in at which
stage is in `support.py`.

Invariant: what is let through here is executed as the columns say.
"""

from __future__ import annotations

from collections.abc import Callable

from zerodrift.config.schema import Config
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.mesh import MeshShape
from zerodrift.policy.nouns import Columns, Recipe

NATIVE = "or use the native backend."


def check_columns(columns: Columns, place: Callable[[str], str], problems: Problems) -> None:
    """`place` gives the key that asked for a column."""
    storage = columns.storage.dtype
    if columns.gather is not columns.compute:
        problems.add(
            place("gather"),
            f"`gather` must be the compute dtype, {columns.compute}, on backend fsdp2: fully_shard casts "
            f"before it gathers",
            str(columns.gather),
            f"Leave `gather` out, {NATIVE}",
        )
    update = columns.update
    if update is None:
        return
    if storage is not DType.FP32:
        problems.add(
            place("storage"),
            "`storage` of a trained parameter must be fp32 on backend fsdp2: fully_shard has no master "
            "beside it, and keeps gradients and moments in its dtype",
            str(storage),
            f"Leave `storage` out: fp32 is cast to `compute` before it is gathered; {NATIVE}",
        )
    elif update.reduce.when == "every" and update.accumulate.dtype is not storage:
        problems.add(
            place("reduce.when" if update.accumulate.dtype is columns.compute else "accumulate"),
            f"`accumulate` must be {storage} where every micro-batch is reduced, on backend fsdp2: "
            f"fully_shard sums them in the storage dtype",
            str(update.accumulate.dtype),
            f"Use `accumulate: {storage}`, or `reduce: {{when: last}}` at stage 0 or 1, {NATIVE}",
        )


def check_settings(config: Config, mesh: MeshShape, optimizer: Recipe | None, problems: Problems) -> None:
    """Keys that are no column."""
    if mesh.pipeline > 1:
        problems.add(
            "pipeline.stages",
            "must be 1 or left out on backend fsdp2",
            str(mesh.pipeline),
            "Use the native backend for a pipeline.",
        )
    if mesh.expert > 1:
        problems.add(
            "experts.ranks",
            "must be 1 or left out on backend fsdp2",
            str(mesh.expert),
            "Use the native backend for expert parallelism.",
        )
    if optimizer is not None and optimizer.type in ("Lion", "Muon"):
        problems.add(
            "optimizer.type",
            "must be an optimizer of torch that updates element by element, on backend fsdp2",
            repr(optimizer.type),
            f"Use AdamW, Adam or SGD, pass an optimizer of your own to `initialize`, {NATIVE}",
        )
    if config.sharding.accumulator == "keep":
        problems.add(
            "sharding.accumulator",
            "must be `free` or left out on backend fsdp2: fully_shard makes gradients anew in every step",
            "keep",
            f"Leave it out, {NATIVE}",
        )
    if config.precision.statistics:
        problems.add(
            "precision.statistics",
            "must be false or left out on backend fsdp2: torch's optimizers do not tell what becomes of an "
            "update",
            "true",
            f"Leave it out, {NATIVE}",
        )
