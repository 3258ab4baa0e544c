"""DeepSpeed's ZeRO: flat masters, and sums of gradients that are no tensor's `.grad`.

Tried with deepspeed 0.19.6 and 0.19.8. Private names, by the class of `engine.optimizer`:

    DeepSpeedZeroOptimizer         bit16_groups, single_partition_of_fp32_groups, averaged_gradients,
                                   params_in_partition; of a parameter `_hp_mapping`, `grad_accum`
    DeepSpeedZeroOptimizer_Stage3  fp16_groups, fp32_partitioned_groups_flat, grad_partitions_flat_buffer
    BF16_Optimizer                 bf16_groups, fp32_groups_flat_partition, fp32_groups_gradients
    FP16_(Unf|F)usedOptimizer      fp16_groups, fp32_groups or fp32_groups_flat
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.observer.adapter import Adapter, OptimizedPart
from zerodrift.observer.lines import line_of_script
from zerodrift.observer.observed import name as word
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.seen import Column
from zerodrift.observer.watch import Watcher

_STEPS = (
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"),
)
"""Where the optimizers are whose step is a step of training."""

TRIED = ("0.19.6", "0.19.8")


class DeepSpeed(Adapter):
    def __init__(self) -> None:
        self._parts: dict[int, list[OptimizedPart]] = {}
        """By the id of a flat master."""

    def begin(self, watcher: Watcher) -> None:
        self._watcher = watcher

        def imported(module: Any) -> None:
            version = str(getattr(module, "__version__", "unknown"))
            if version.split("+")[0] not in TRIED:
                watcher.process.notes.append(
                    f"deepspeed {version} is not among those that were tried ({', '.join(TRIED)}): what it "
                    "packs may be told of the wrong parameters, or of none."
                )

        watcher.when_imported("deepspeed", imported)
        for home, kind in _STEPS:
            watcher.when_imported(home, self._watching(watcher, kind))

    def _watching(self, watcher: Watcher, kind: str) -> Callable[[Any], None]:
        def step(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            watcher.safely(lambda: self._step(optimizer), None)
            return original(optimizer, *args, **kwargs)

        return lambda module: watcher.patches.replace(getattr(module, kind), "step", step)

    def _step(self, optimizer: Any) -> None:
        self._map(optimizer)
        if getattr(optimizer, "torch_autocast_gradscaler", None) is not None and optimizer.clip_grad > 0:
            self._watcher.event("clipped_scaled", line_of_script())  # it unscales after it clips
        for parameter, tensor, what in _sums(self._watcher, optimizer):
            parameter.seen.see("accumulate", word(tensor.dtype), what)

    def _map(self, optimizer: Any) -> None:
        """Whose elements are where in the flat masters."""
        self._parts = {}
        self._watcher.forget()
        for flat, parameter, begin, at, length in _mapped(optimizer):
            watched = self._watcher.resting(parameter)
            if watched is not None:
                self._parts.setdefault(id(flat), []).append(
                    OptimizedPart(watched, begin, at, max(length, 0), sums=False)
                )

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        return self._parts.get(id(tensor))

    def carried(self, column: Column, tensor: torch.Tensor) -> Sequence[WatchedParameter]:
        """Everything that DeepSpeed sends in this dtype: it packs by dtype, and nothing else."""
        engines = [model for model in self._watcher.models if "DeepSpeedEngine" in model.wrappers]
        trained = [p for model in engines for p in model.parameters if p.seen.trained or column == "gather"]
        alike = [p for p in trained if _sent_in(p) is tensor.dtype]
        carried = alike or trained
        if not carried or tensor.numel() < min(p.seen.numel for p in carried) // 2:
            return ()  # a norm, or a flag
        return carried


def _sent_in(parameter: WatchedParameter) -> torch.dtype | None:
    """What DeepSpeed sends it in, unless the config says another for all."""
    tensor = parameter.tensor
    rests = getattr(tensor, "ds_tensor", tensor)
    dtype = rests.dtype if isinstance(rests, torch.Tensor) else None
    return getattr(tensor, "comm_dtype", dtype)


def _mapped(optimizer: Any) -> Iterator[tuple[Any, Any, int, int, int]]:
    """Flat master, parameter, first element of the parameter, its place in the master, elements."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        rank = torch.distributed.get_rank(group=optimizer.dp_process_group)
        for flat, parameters in zip(
            optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True
        ):
            at = 0
            for parameter in parameters:
                length = parameter.partition_numel()
                begin = rank * length
                yield flat, parameter, begin, at, min(length, parameter.ds_numel - begin)
                at += length
        return
    flats, groups = _groups(optimizer)
    for flat, parameters in zip(flats, groups, strict=True):
        at = 0
        for number, parameter in enumerate(parameters):
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


def _sums(watcher: Watcher, optimizer: Any) -> Iterator[tuple[WatchedParameter, torch.Tensor, str]]:
    """What micro-batches were added in, before the step takes it apart."""

    def watched(parameter: Any) -> Iterator[WatchedParameter]:
        found = watcher.resting(parameter)
        if found is not None:
            yield found

    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        for parameters in optimizer.fp16_groups:
            for parameter in parameters:
                for found in watched(parameter):
                    yield found, optimizer.grad_partitions_flat_buffer, "DeepSpeed's shards of gradients"
        return
    if hasattr(optimizer, "fp32_groups_gradients"):
        for parameters, sums in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
            for parameter, total in zip(parameters, sums, strict=True):
                for found in watched(parameter):
                    yield found, total, "DeepSpeed's fp32 gradients"
        return
    _, groups = _groups(optimizer)
    for number, parameters in enumerate(groups):
        for parameter in parameters:
            own = getattr(parameter, "grad_accum", None)
            total = own if own is not None else parameter.grad
            for found in watched(parameter):
                if total is not None:
                    yield found, total, ".grad" if own is None else "DeepSpeed's grad_accum"
        averaged = getattr(optimizer, "averaged_gradients", None)
        sums = averaged.get(number) if isinstance(averaged, dict) else None
        held = optimizer.params_in_partition[number] if sums else ()
        for parameter, total in zip(held, sums or (), strict=False):  # padding comes last
            for found in watched(parameter):
                yield found, total, "DeepSpeed's averaged gradients"
