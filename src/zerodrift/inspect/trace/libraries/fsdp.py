"""torch's FSDP: `fully_shard`, which groups parameters, and `FullyShardedDataParallel`, which packs them.

Both are known by private names, which were tried with torch 2.13 and 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.inspect.trace.parameter import LiveParameter
from zerodrift.inspect.trace.places import line_of_script
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.state import Adapter, OptimizedPart, WatchState


def _see_sum(total: torch.Tensor, name: str, parameters: Sequence[LiveParameter]) -> None:
    for parameter in parameters:
        parameter.record.add("accumulate", dtype_name(total.dtype), name, "", line_of_script)


class Fsdp2(Adapter):
    def begin(self, state: WatchState) -> None:
        self._state = state
        state.when_imported("torch.distributed.fsdp._fully_shard._fsdp_param_group", self._imported)

    def _imported(self, module: Any) -> None:
        group = module.FSDPParamGroup
        missing = [name for name in ("unshard", "post_backward") if not hasattr(group, name)]
        if missing:
            unseen = f"This torch's fully_shard has no {', '.join(missing)}: its collectives are not seen."
            self._state.note(f"{unseen} It was tried with torch 2.13 and 2.15.")
            return
        for name in ("unshard", "wait_for_unshard"):
            self._state.patches.replace(group, name, self._gathers)
        self._state.patches.replace(group, "post_backward", self._reduces)

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
    def begin(self, state: WatchState) -> None:
        self._state = state
        self._sums: dict[int, torch.Tensor] = {}
        """Id of a flat parameter -> its gradient of the micro-batches that were not reduced yet."""

        def flat(module: Any) -> None:
            state.patches.replace(module.FlatParamHandle, "_all_gather_flat_param", self._gathers)

        def runtime(module: Any) -> None:
            state.patches.replace(module, "_post_backward_hook", self._gradient_arrives)
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

    def _gradient_arrives(self, original: Callable[..., Any], runtime: Any, handle: Any, *args: Any) -> Any:
        self._state.safely(lambda: self._arrives(handle.flat_param, runtime._sync_gradients), None)
        return original(runtime, handle, *args)

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

    def _arrives(self, flat: Any, reduces: bool) -> None:
        """See the whole gradient before it is reduced; under `no_sync` it contains those before."""
        if flat.grad is None:
            return
        total = flat.grad.detach().reshape(-1)
        before = self._sums.pop(id(flat), None)
        if not reduces:
            self._sums[id(flat)] = total.clone()
        gradient = total if before is None else total - before
        for parameter, _, begin in self._members(flat):
            parameter.arrives(gradient[begin : begin + parameter.record.numel], sample=True)
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
