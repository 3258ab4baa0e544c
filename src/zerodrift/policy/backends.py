"""Who may execute a plan, as data: what a backend does otherwise than the defaults say, and what it refuses.

`native` executes every column as it is written. `fsdp2` is torch's `fully_shard`: it gathers in the compute
dtype, sums sharded gradients in the storage dtype, and hands its parameters to an optimizer of torch, which
updates storage and keeps its moments in the storage dtype. What it refuses for the names of modules is in
`plan/groups.py`.

Invariant: what is let through here is executed as the columns say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerodrift.config.schema import BackendName, Config
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import ELEMENTWISE, either, of_type
from zerodrift.policy.nouns import Columns, ComponentSpec, State

Place = Callable[[str], str]
"""Column -> the key that asked for it."""


def _all_settings(
    config: Config, mesh: MeshShape, optimizer: ComponentSpec | None, problems: Problems
) -> None:
    """No key is refused."""


def _all_columns(columns: Columns, place: Place, problems: Problems) -> None:
    """No column is refused."""


def _every_sum(accumulate: DType, pipeline: bool, stage: int) -> str:
    """Gradients may be summed in every dtype."""
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """What one backend does otherwise than others, and its refusals."""

    name: BackendName
    storage_sharded: bool = False
    """At every stage; otherwise at stage 3 alone."""
    storage_fp32: str = ""
    """Why parameters rest in fp32 in every mode; `""` where they rest as the mode says."""
    gather_compute: str = ""
    """Why parameters travel in the compute dtype; `""` where they do in the narrower one."""
    gathered_once: tuple[int, ...] = ()
    """Stages at which what is gathered stays until the step ends."""
    replicates: bool = False
    """Whether every rank is a replica at stage 0."""
    dtensors: bool = False
    """Whether it takes a model whose parameters are DTensors."""
    refuse_settings: Callable[[Config, MeshShape, ComponentSpec | None, Problems], None] = _all_settings
    """Keys that are no column."""
    refuse_columns: Callable[[Columns, Place, Problems], None] = _all_columns
    """Columns of one parameter."""
    refuse_sum: Callable[[DType, bool, int], str] = _every_sum
    """Why gradients cannot be summed in a dtype, with a pipeline or without, at a stage; `""` where they can.
    The reasons are in the support table, in the order in which a user can mend them."""
    refuse_state: Callable[[State], str] = lambda state: ""
    """Why moments cannot rest in a state; `""` where they can."""


# --- fsdp2 ----------------------------------------------------------------------------------------------

_NATIVE = "or use the native backend."


def _fsdp2_columns(columns: Columns, place: Place, problems: Problems) -> None:
    storage = columns.storage.dtype
    if columns.gather is not columns.compute:
        problems.add(
            place("gather"),
            f"`gather` must be the compute dtype, {columns.compute}, on backend fsdp2: fully_shard casts "
            f"before it gathers",
            got=str(columns.gather),
            do=f"Leave `gather` out, {_NATIVE}",
        )
    update = columns.update
    if update is None:
        return
    if update.placement != "sliced":
        problems.add(
            place("placement"),
            "`placement` must be `sliced` on backend fsdp2: fully_shard cuts every parameter on its first "
            "dimension",
            got=update.placement,
            do="Use the native backend, or an elementwise optimizer.",
        )
    if storage is not DType.FP32:
        problems.add(
            place("storage"),
            "`storage` of a trained parameter must be fp32 on backend fsdp2: fully_shard has no master "
            "beside it, and keeps gradients and moments in its dtype",
            got=str(storage),
            do=f"Leave `storage` out: fp32 is cast to `compute` before it is gathered; {_NATIVE}",
        )
    elif update.reduce.when == "every" and update.accumulate.dtype is not storage:
        problems.add(
            place("reduce.when" if update.accumulate.dtype is columns.compute else "accumulate"),
            f"`accumulate` must be {storage} where every micro-batch is reduced, on backend fsdp2: "
            f"fully_shard sums them in the storage dtype",
            got=str(update.accumulate.dtype),
            do=f"Use `accumulate: {storage}`, or `reduce: {{when: last}}` at stage 0 or 1, {_NATIVE}",
        )


def _fsdp2_settings(
    config: Config, mesh: MeshShape, optimizer: ComponentSpec | None, problems: Problems
) -> None:
    keep = config.sharding.keep_gathered
    if keep not in (None, "step") and config.zero_optimization.stage in FSDP2.gathered_once:
        problems.add(
            "sharding.keep_gathered",
            "must be `step` at stages 1-2 on backend fsdp2: that is what these stages mean there",
            got=keep,
            do="Leave it out, or use stage 3.",
        )
    if mesh.pipeline > 1:
        problems.add(
            "pipeline.stages",
            "must be 1 or left out on backend fsdp2",
            got=str(mesh.pipeline),
            do="Use the native backend for a pipeline.",
        )
    if mesh.expert > 1:
        problems.add(
            "experts.ranks",
            "must be 1 or left out on backend fsdp2",
            got=str(mesh.expert),
            do="Use the native backend for expert parallelism.",
        )
    takes = [known for known in ELEMENTWISE if known.torch]
    if optimizer is not None and of_type(optimizer.type) not in takes:
        problems.add(
            "optimizer.type",
            "must be an optimizer of torch that updates element by element, on backend fsdp2",
            got=repr(optimizer.type),
            do=f"Use {either(known.name for known in takes)}, pass an optimizer of your own to `initialize`, "
            f"{_NATIVE}",
        )
    if config.sharding.prefetch is not None:
        problems.add(
            "sharding.prefetch",
            "must be left out on backend fsdp2: fully_shard gathers one unit ahead",
            got=str(config.sharding.prefetch),
            do="Leave it out, or use the native backend.",
        )
    if config.sharding.accumulator == "keep":
        problems.add(
            "sharding.accumulator",
            "must be `free` or left out on backend fsdp2: fully_shard makes gradients anew in every step",
            got="keep",
            do=f"Leave it out, {_NATIVE}",
        )
    if config.precision.statistics:
        problems.add(
            "precision.statistics",
            "must be false or left out on backend fsdp2: torch's optimizers do not tell what becomes of an "
            "update",
            got="true",
            do=f"Leave it out, {_NATIVE}",
        )


def _fsdp2_sum(accumulate: DType, pipeline: bool, stage: int) -> str:
    if pipeline:
        return "backend fsdp2 runs without a pipeline: use the native backend"
    if accumulate is not DType.FP32 and stage >= 2:
        return (
            "fully_shard sums micro-batches in its sharded parameters' dtype, fp32 here: use "
            "`accumulate: fp32`, or the native backend"
        )
    return ""


def _fsdp2_state(state: State) -> str:
    if state is State.FP32:
        return ""
    return (
        "torch's own optimizer updates what fully_shard holds, and keeps moments in the parameters' "
        "dtype: use `state: fp32`, or the native backend"
    )


NATIVE = Backend("native")

FSDP2 = Backend(
    "fsdp2",
    storage_sharded=True,
    storage_fp32="backend fsdp2: fully_shard updates storage, so storage is the master",
    gather_compute="backend fsdp2: fully_shard casts to it before it gathers",
    gathered_once=(1, 2),
    replicates=True,
    dtensors=True,
    refuse_settings=_fsdp2_settings,
    refuse_columns=_fsdp2_columns,
    refuse_sum=_fsdp2_sum,
    refuse_state=_fsdp2_state,
)

BACKENDS: Mapping[BackendName, Backend] = {backend.name: backend for backend in (NATIVE, FSDP2)}
