"""The backends as data: the differences from the defaults, and the refusals of each.

`native` executes every column as written. `fsdp2` is torch's `fully_shard`: it gathers in the compute dtype,
sums sharded gradients in the storage dtype, and gives its parameters to an optimizer of torch, which updates
storage and keeps its moments in the storage dtype. `plan/groups.py` refuses module trees that `fully_shard`
cannot run.

Invariant: a backend executes every accepted column as written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zerodrift.config import BackendName, Config
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import ELEMENTWISE, either, of_type
from zerodrift.policy.decisions import Columns, ComponentSpec, State
from zerodrift.policy.narrow import GATHER_BACKEND, WIRE_BACKEND

Place = Callable[[str], str]
"""Column -> the key that sets it."""


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """A backend's differences from the defaults, and its refusals. A reason of `""` keeps the default."""

    name: BackendName
    storage_sharded: bool = False
    """Whether storage is sharded at every stage; the default is stage 3 alone."""
    storage_fp32: str = ""
    """Reason for fp32 storage in every mode; the default is the mode's dtype."""
    gather_compute: str = ""
    """Reason for gathers in the compute dtype; the default is the narrower of storage and compute."""
    gathered_once: tuple[int, ...] = ()
    """Stages at which a gathered unit stays until the step ends."""
    replicates: bool = False
    """Whether every rank is a replica at stage 0."""
    refuse_narrow_storage: str = ""
    """Why a frozen parameter cannot rest in a narrow format; `""` if it can."""
    dtensors: bool = False
    """Whether the backend runs a model whose parameters are DTensors."""
    regathers: bool = False
    """Whether a backward can gather from a second copy of the blocks."""
    refuse_settings: Callable[[Config, MeshShape, ComponentSpec | None, Problems], None] = lambda *_: None
    """Adds a problem for each unsupported key that is not a column."""
    refuse_columns: Callable[[Columns, Place, Problems], None] = lambda *_: None
    """Adds a problem for each unsupported column of a parameter."""
    refuse_sum: Callable[[DType, bool, int], str] = lambda *_: ""
    """Returns why gradients cannot be summed in (dtype, with a pipeline, stage); `""` if they can."""
    refuse_state: Callable[[State], str] = lambda _: ""
    """Returns why moments cannot be kept in a state; `""` if they can."""


# --- fsdp2 ----------------------------------------------------------------------------------------------

_NATIVE = "or use the native backend."


def _fsdp2_columns(columns: Columns, place: Place, problems: Problems) -> None:
    storage = columns.storage.dtype
    wire = None if columns.update is None else columns.update.reduce.wire
    for refusal, dtype in ((GATHER_BACKEND, columns.gather), (WIRE_BACKEND, wire)):
        if dtype is not None and dtype.format is not None and storage.format is None:
            problems.add(place(refusal.column), refusal.must, got=dtype, do=refusal.do)
    if columns.gather is not columns.compute and columns.gather.format is None:
        why = "fully_shard casts before it gathers"
        must = f"`gather` must be the compute dtype, {columns.compute}, on backend fsdp2: {why}"
        problems.add(place("gather"), must, got=columns.gather, do=f"Leave `gather` out, {_NATIVE}")
    update = columns.update
    if update is None:
        return
    if update.placement != "sliced":
        why = "fully_shard cuts every parameter on its first dimension"
        do = "Use the native backend, or an elementwise optimizer."
        must = f"`placement` must be `sliced` on backend fsdp2: {why}"
        problems.add(place("placement"), must, got=update.placement, do=do)
    if storage is not DType.FP32:
        why = "fully_shard has no separate master, and keeps gradients and moments in the storage dtype"
        must = f"`storage` of a trained parameter must be fp32 on backend fsdp2: {why}"
        do = f"Leave `storage` out: fp32 is cast to `compute` before it is gathered; {_NATIVE}"
        problems.add(place("storage"), must, got=storage, do=do)
    elif update.reduce.when == "every" and update.accumulate.dtype is not storage:
        key = place("reduce.when" if update.accumulate.dtype is columns.compute else "accumulate")
        why = "on backend fsdp2: fully_shard sums them in the storage dtype"
        must = f"`accumulate` must be {storage} where every micro-batch is reduced, {why}"
        do = f"Use `accumulate: {storage}`, or `reduce: {{when: last}}` at stage 0 or 1, {_NATIVE}"
        problems.add(key, must, got=update.accumulate.dtype, do=do)


def _fsdp2_settings(
    config: Config, mesh: MeshShape, optimizer: ComponentSpec | None, problems: Problems
) -> None:
    keep = config.sharding.keep_gathered
    if keep not in (None, "step") and config.zero_optimization.stage in FSDP2.gathered_once:
        must = "must be `step` at stages 1-2 on backend fsdp2, which gathers once per step there"
        problems.add("sharding.keep_gathered", must, got=keep, do="Leave it out, or use stage 3.")
    if mesh.pipeline > 1:
        must = "must be 1 or left out on backend fsdp2"
        do = "Use the native backend for a pipeline."
        problems.add("pipeline.stages", must, got=mesh.pipeline, do=do)
    if mesh.expert > 1:
        do = "Use the native backend for expert parallelism."
        problems.add("experts.ranks", "must be 1 or left out on backend fsdp2", got=mesh.expert, do=do)
    takes = [known for known in ELEMENTWISE if known.torch]
    if optimizer is not None and of_type(optimizer.type) not in takes:
        must = "must be an optimizer of torch that updates element by element, on backend fsdp2"
        names = either(known.name for known in takes)
        do = f"Use {names}, pass an optimizer of your own to `initialize`, {_NATIVE}"
        problems.add("optimizer.type", must, got=repr(optimizer.type), do=do)
    if config.sharding.prefetch is not None:
        must = "must be left out on backend fsdp2: fully_shard gathers one unit ahead"
        do = "Leave it out, or use the native backend."
        problems.add("sharding.prefetch", must, got=config.sharding.prefetch, do=do)
    if config.sharding.accumulator == "keep":
        must = "must be `free` or left out on backend fsdp2: fully_shard allocates gradients in every step"
        problems.add("sharding.accumulator", must, got="keep", do=f"Leave it out, {_NATIVE}")
    if config.precision.statistics:
        must = (
            "must be false or left out on backend fsdp2: torch's optimizers report no statistics of updates"
        )
        problems.add("precision.statistics", must, got="true", do=f"Leave it out, {_NATIVE}")


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
        "torch's own optimizer updates the parameters of fully_shard, and keeps moments in their dtype: "
        "use `state: fp32`, or the native backend"
    )


NATIVE = Backend("native", regathers=True)

FSDP2 = Backend(
    "fsdp2",
    storage_sharded=True,
    storage_fp32="backend fsdp2: fully_shard updates storage, so storage is the master",
    gather_compute="backend fsdp2: fully_shard casts to it before it gathers",
    gathered_once=(1, 2),
    refuse_narrow_storage="fully_shard shards and gathers tensors of a plain dtype: use the native backend",
    replicates=True,
    dtensors=True,
    refuse_settings=_fsdp2_settings,
    refuse_columns=_fsdp2_columns,
    refuse_sum=_fsdp2_sum,
    refuse_state=_fsdp2_state,
)

BACKENDS: Mapping[BackendName, Backend] = {backend.name: backend for backend in (NATIVE, FSDP2)}
