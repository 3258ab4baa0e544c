"""One adapter per library, which finds the parameters in the tensors that the library packs.

zerodrift's engine is observed by `observe`. torch's `fully_shard` groups parameters, and
`FullyShardedDataParallel` packs them. DeepSpeed's ZeRO has flat masters, and adds gradients outside of
`.grad`. The adapters use private names, tested with torch 2.13 and 2.15 and with deepspeed 0.19.6 and 0.19.8.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.inspect.trace.operations import line_of_script
from zerodrift.inspect.trace.parameter import LiveParameter
from zerodrift.inspect.trace.records import (
    COLUMNS,
    Column,
    EngineRecord,
    ModelRecord,
    ParameterRecord,
    dtype_name,
    merged,
)
from zerodrift.inspect.trace.state import Adapter, OptimizedPart, WatchState


class Own(Adapter):
    def __init__(self, state: WatchState) -> None:
        super().__init__(state)
        self._seen: dict[Any, list[EngineRecord]] = {}  # engine -> a record of each step
        self._steps: dict[Any, contextlib.ExitStack] = {}  # engine -> the observation of the step under way
        self._modules: set[int] = set()
        state.when_imported("zerodrift.engine.engine", self._imported)

    def _imported(self, module: Any) -> None:
        for name in ("__call__", "accumulate", "train_batch"):
            self._state.before(module.Engine, name, self._runs_forward)
        self._state.patches.replace(module.Engine, "step", self._takes_step)
        self._state.before(module.Engine, "destroy", self._step_ends)

    def _runs_forward(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if engine not in self._seen:
            self._seen[engine] = []
            self._modules |= {id(part) for root in (engine.module, engine.whole) for part in root.modules()}
        self._state.may_finish()
        if self._state.active and engine not in self._steps:
            from zerodrift.inspect.trace.engine import observe

            self._steps[engine] = contextlib.ExitStack()
            self._seen[engine].append(self._steps[engine].enter_context(observe(engine)))

    def _step_ends(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        if engine in self._steps:
            self._steps.pop(engine).close()

    def _takes_step(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        out = original(engine, *args, **kwargs)
        if engine.global_steps > before:
            self._state.safely(lambda: self._step_ends(engine), None)
            self._state.safely(lambda: self._state.has_stepped(engine, engine.accumulation), None)
        return out

    def claims(self, module: torch.nn.Module) -> bool:
        return id(module) in self._modules or type(module).__module__.startswith("zerodrift.")

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        return () if any(optimizer is engine.optimizer for engine in self._seen) else None

    def models(self) -> Iterator[ModelRecord]:
        for engine, records in self._seen.items():
            self._step_ends(engine)
            seen, parameters = merged(records), []
            for row in engine.plan.rows:
                parameter = ParameterRecord(row.name, tuple(row.whole_shape), row.klass, row.trained)
                parameter.layout = "sharded" if row.columns.storage.axis else ""
                parameter.also = tuple(row.names[1:])
                parameter.facts["optimized"] = row.trained
                for column in COLUMNS:
                    for dtype in sorted(seen.seen(row.name, column)):
                        parameter.add(column, dtype, "zerodrift's engine")
                parameters.append(parameter)
            yield ModelRecord(type(engine.whole).__name__, parameters, wrappers=("zerodrift.Engine",))


def _see_sum(total: torch.Tensor, name: str, parameters: Sequence[LiveParameter]) -> None:
    for parameter in parameters:
        parameter.record.add("accumulate", dtype_name(total.dtype), name, "", line_of_script)


class Fsdp2(Adapter):
    def __init__(self, state: WatchState) -> None:
        super().__init__(state)
        state.when_imported("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._imported)

    def _imported(self, module: Any) -> None:
        replace, group = self._state.patches.replace, module.FSDPParamGroup
        for name in ("unshard", "wait_for_unshard"):
            replace(group, name, self._gathers)
        replace(group, "post_backward", self._reduces)

    def _members(self, group: Any) -> list[tuple[Any, LiveParameter]]:
        pairs = ((member, self._state.resting(member.sharded_param)) for member in group.fsdp_params)
        return [(member, parameter) for member, parameter in pairs if parameter is not None]

    def _gathers(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        def gathered() -> list[LiveParameter]:
            members = self._members(group)
            for member, parameter in members:  # several dtypes travel as bytes
                parameter.gather_dtype = dtype_name(member.param_dtype or member.orig_dtype)
            return [parameter for _, parameter in members]

        with self._state.packing(gathered):
            return original(group, *args, **kwargs)

    def _reduces(self, original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        members: list[tuple[Any, LiveParameter]] = []

        def reduced() -> list[LiveParameter]:
            members.extend(member for member in self._members(group) if member[1].record.trained)
            return [parameter for _, parameter in members]

        def see_sums() -> None:
            for member, parameter in members:
                if member.unsharded_accumulated_grad is not None:
                    _see_sum(member.unsharded_accumulated_grad, "a sum before it is reduced", [parameter])

        with self._state.packing(reduced):
            out = original(group, *args, **kwargs)
        self._state.safely(see_sums, None)
        return out


class Fsdp1(Adapter):
    def __init__(self, state: WatchState) -> None:
        super().__init__(state)
        self._sums: dict[int, torch.Tensor] = {}
        """Id of a flat parameter -> its gradient summed over micro-batches since the last reduction."""

        def flat(module: Any) -> None:
            state.patches.replace(module.FlatParamHandle, "_all_gather_flat_param", self._gathers)

        def runtime(module: Any) -> None:
            state.before(module, "_post_backward_hook", self._gradient_arrives)
            for name in ("_reduce_grad", "_reduce_grad_no_shard"):
                state.patches.replace(module, name, self._reduces)

        state.when_imported("torch.distributed.fsdp._flat_param", flat)
        state.when_imported("torch.distributed.fsdp._runtime_utils", runtime)

    def _gathers(self, original: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        with self._state.packing(lambda: self._parameters(handle.flat_param)):
            return original(handle, *args, **kwargs)

    def _reduces(self, original: Callable[..., Any], runtime: Any, handle: Any) -> Any:
        try:
            with self._state.packing(lambda: self._parameters(handle.flat_param)):
                return original(runtime, handle)
        finally:
            kept = getattr(handle.flat_param, "_saved_grad_shard", None)
            if kept is not None:
                name, parameters = "FSDP's shard of the gradient", self._parameters
                self._state.safely(lambda: _see_sum(kept, name, parameters(handle.flat_param)), None)

    def _members(self, flat: Any) -> Iterator[tuple[LiveParameter, Any, int]]:
        """Yield a parameter, its place in this rank's shard, its begin in the whole flat parameter."""
        begins, at = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
            begins += [] if is_padding else [at]
            at += numel
        for info, place, begin in zip(flat._param_infos, flat._shard_param_infos, begins, strict=True):
            for model in self._state.models:
                parameter = model.leaf(info.module, info.param_name)
                if parameter is not None:
                    yield parameter, place, begin

    def _parameters(self, flat: Any) -> list[LiveParameter]:
        return [parameter for parameter, *_ in self._members(flat)]

    def _gradient_arrives(self, runtime: Any, handle: Any, *args: Any) -> None:
        """Record the whole gradient before it is reduced; under `no_sync` it sums all micro-batches."""
        flat, reduces = handle.flat_param, runtime._sync_gradients
        if flat.grad is None:
            return
        total = flat.grad.detach().reshape(-1)
        before = self._sums.pop(id(flat), None)
        if not reduces:
            self._sums[id(flat)] = total.clone()
        gradient = total if before is None else total - before
        for parameter, _, begin in self._members(flat):
            own = gradient[begin : begin + parameter.record.numel]
            self._state.arrives(parameter, own, sample=True)
        if before is not None or not reduces:
            _see_sum(total, "FSDP's whole gradient", self._parameters(flat))

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        if not hasattr(tensor, "_shard_param_infos"):
            return None
        return [
            OptimizedPart(p, place.intra_param_start_idx, place.offset_in_shard, place.numel_in_shard)
            if place.in_shard
            else OptimizedPart(p, length=0)
            for p, place, _ in self._members(tensor)
        ]


_STEPS = (
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"),
)
"""Module and class of the optimizers whose step is a step of training."""

TRIED = ("0.19.6", "0.19.8")


class DeepSpeed(Adapter):
    def __init__(self, state: WatchState) -> None:
        super().__init__(state)
        self._parts: dict[int, list[OptimizedPart]] = {}  # parts of a flat master, by its id

        def imported(module: Any) -> None:
            version = str(getattr(module, "__version__", "unknown"))
            if version.split("+")[0] not in TRIED:
                untried = f"deepspeed {version} is not one of the tested versions ({', '.join(TRIED)})"
                state.note(f"{untried}: dtypes may be attributed to the wrong parameters, or to none.")

        def watch(kind: str, module: Any) -> None:
            state.before(getattr(module, kind), "step", self._step)

        state.when_imported("deepspeed", imported)
        for home, kind in _STEPS:
            state.when_imported(home, functools.partial(watch, kind))

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Find the parameters in flat masters, and record sums of gradients before the step splits them."""
        self._parts = {}
        self._state.forget_parts()
        for flat, parameter, begin, at, length in _masters(optimizer):
            watched = self._state.resting(parameter)
            if watched is not None:
                part = OptimizedPart(watched, begin, at, max(length, 0), sums=False)
                self._parts.setdefault(id(flat), []).append(part)
        if getattr(optimizer, "torch_autocast_gradscaler", None) is not None and optimizer.clip_grad > 0:
            self._state.event("clipped_scaled", line_of_script())  # DeepSpeed clips before it unscales
        for parameter, total, name in _sums(optimizer):
            watched = self._state.resting(parameter)
            if watched is not None:
                watched.record.add("accumulate", dtype_name(total.dtype), name)

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        return self._parts.get(id(tensor))

    def carried(self, column: Column, tensor: torch.Tensor) -> Sequence[LiveParameter]:
        """Return everything that DeepSpeed sends in this dtype: it packs by dtype, and by nothing else."""
        engines = [model for model in self._state.models if "DeepSpeedEngine" in model.wrappers]
        trained = [p for model in engines for p in model.parameters if p.record.trained or column == "gather"]
        carried = []
        for parameter in trained:
            rests: Any = parameter.tensor()
            dtype = getattr(getattr(rests, "ds_tensor", rests), "dtype", None)
            if getattr(rests, "comm_dtype", dtype) is tensor.dtype:  # a config may set it for all
                carried.append(parameter)
        carried = carried or trained
        if not carried or tensor.numel() < min(p.record.numel for p in carried) // 2:
            return ()  # a norm, or a flag
        return carried


def _masters(optimizer: Any) -> Iterator[tuple[Any, Any, int, int, int]]:
    """Yield flat master, parameter, first element of the parameter, its place in the master, elements."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
        for flat, group in zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            at = 0
            for parameter in group:
                length = parameter.partition_numel()
                begin = rank * length
                yield flat, parameter, begin, at, min(length, parameter.ds_numel - begin)
                at += length
        return
    for flat, group in zip(*_groups(optimizer), strict=True):
        at = 0
        for number, parameter in enumerate(group):
            mapping = getattr(parameter, "_hp_mapping", None)
            if mapping is not None:
                low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                yield flat, parameter, low.start, high.start, high.numel
            elif isinstance(flat, list):
                yield flat[number], parameter, 0, 0, parameter.numel()
            elif hasattr(optimizer, "fp32_groups_flat"):
                yield flat, parameter, 0, at, parameter.numel()
                at += parameter.numel()
            else:
                yield flat, parameter, 0, 0, 0  # other ranks have it


def _groups(optimizer: Any) -> tuple[Any, Any]:
    for flats, groups in (
        ("single_partition_of_fp32_groups", "bit16_groups"),
        ("fp32_groups_flat_partition", "bf16_groups"),
        ("fp32_groups_flat", "fp16_groups"),
        ("fp32_groups", "fp16_groups"),
    ):
        if hasattr(optimizer, flats) and hasattr(optimizer, groups):
            return getattr(optimizer, flats), getattr(optimizer, groups)
    return (), ()


def _sums(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor, str]]:
    """Yield parameter, the tensor that sums its micro-batches, and that tensor's name."""
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        for group in optimizer.fp16_groups:
            for parameter in group:
                yield parameter, optimizer.grad_partitions_flat_buffer, "DeepSpeed's shards of gradients"
        return
    if hasattr(optimizer, "fp32_groups_gradients"):
        for group, sums in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            for parameter, total in zip(group, sums, strict=True):
                yield parameter, total, "DeepSpeed's fp32 gradients"
        return
    for number, group in enumerate(_groups(optimizer)[1]):
        for parameter in group:
            own = getattr(parameter, "grad_accum", None)
            total = own if own is not None else parameter.grad
            if total is not None:
                yield parameter, total, ".grad" if own is None else "DeepSpeed's grad_accum"
        averaged = getattr(optimizer, "averaged_gradients", None)
        sums = averaged.get(number) if isinstance(averaged, dict) else None
        held = optimizer.params_in_partition[number] if sums else ()
        for parameter, total in zip(held, sums or (), strict=False):  # padding comes last
            yield parameter, total, "DeepSpeed's averaged gradients"
