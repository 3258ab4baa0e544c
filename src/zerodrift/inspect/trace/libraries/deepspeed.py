"""DeepSpeed's ZeRO: flat masters, and sums of gradients that are no tensor's `.grad`.

Its optimizers are known by private names, which were tried with deepspeed 0.19.6 and 0.19.8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.inspect.trace.parameter import LiveParameter
from zerodrift.inspect.trace.places import line_of_script
from zerodrift.inspect.trace.records import Column, dtype_name
from zerodrift.inspect.trace.state import Adapter, OptimizedPart, WatchState

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
    def __init__(self) -> None:
        self._parts: dict[int, list[OptimizedPart]] = {}  # parts of a flat master, by its id

    def begin(self, state: WatchState) -> None:
        self._state = state

        def imported(module: Any) -> None:
            version = str(getattr(module, "__version__", "unknown"))
            if version.split("+")[0] not in TRIED:
                untried = f"deepspeed {version} is not among those that were tried ({', '.join(TRIED)})"
                state.note(f"{untried}: what it packs may be told of the wrong parameters, or of none.")

        def step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            state.safely(lambda: self._step(optimizer), None)
            return original(optimizer, *args, **kwargs)

        def watch(kind: str, module: Any) -> None:
            state.patches.replace(getattr(module, kind), "step", step)

        state.when_imported("deepspeed", imported)
        for home, kind in _STEPS:
            state.when_imported(home, functools.partial(watch, kind))

    def _step(self, optimizer: Any) -> None:
        """Find the parameters in its masters, and the sums of gradients before the step takes them apart."""
        self._parts = {}
        self._state.optimized.clear()
        for flat, parameter, begin, at, length in _masters(optimizer):
            watched = self._state.resting(parameter)
            if watched is not None:
                part = OptimizedPart(watched, begin, at, max(length, 0), sums=False)
                self._parts.setdefault(id(flat), []).append(part)
        if getattr(optimizer, "torch_autocast_gradscaler", None) is not None and optimizer.clip_grad > 0:
            self._state.event("clipped_scaled", line_of_script())  # it unscales after it clips
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
            if getattr(rests, "comm_dtype", dtype) is tensor.dtype:  # unless its config says another for all
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
    """Yield parameter, the tensor that its micro-batches were added in, and that tensor's name."""
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
