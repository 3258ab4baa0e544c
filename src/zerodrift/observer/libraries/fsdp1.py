"""`FullyShardedDataParallel` of torch: parameters packed into flat ones, one to a wrapped module.

Tried with torch 2.13 and 2.15. Private names: `FlatParamHandle._all_gather_flat_param`;
`_post_backward_hook`, `_reduce_grad` and `_reduce_grad_no_shard` of its runtime; `_sync_gradients` of a
wrapper; of a flat parameter `_param_infos`, `_shapes`, `_shard_param_infos`, `_numels_with_padding`,
`_is_padding_mask`, `_params`, `_saved_grad_shard`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerodrift.observer.adapter import Adapter, OptimizedPart
from zerodrift.observer.lines import line_of_script
from zerodrift.observer.observed import name as word
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.watch import Watcher


class Fsdp1(Adapter):
    def begin(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._sums: dict[int, torch.Tensor] = {}
        """By the id of a flat parameter: its gradient of the micro-batches that were not reduced yet."""

        def named(handle: Any) -> list[WatchedParameter]:
            return watcher.safely(lambda: [member for member, *_ in self._members(handle.flat_param)], [])

        def gather(original: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
            watcher.packed.append(named(handle))
            try:
                return original(handle, *args, **kwargs)
            finally:
                watcher.packed.pop()

        def reduce(original: Callable[..., Any], state: Any, handle: Any) -> Any:
            members = named(handle)
            watcher.packed.append(members)
            try:
                return original(state, handle)
            finally:
                watcher.packed.pop()
                watcher.safely(lambda: _kept(handle.flat_param, members), None)

        def arrive(original: Callable[..., Any], state: Any, handle: Any, *args: Any) -> Any:
            watcher.safely(lambda: self._arrives(handle.flat_param, state._sync_gradients), None)
            return original(state, handle, *args)

        def flat(module: Any) -> None:
            watcher.patches.replace(module.FlatParamHandle, "_all_gather_flat_param", gather)

        def runtime(module: Any) -> None:
            watcher.patches.replace(module, "_post_backward_hook", arrive)
            for name in ("_reduce_grad", "_reduce_grad_no_shard"):
                watcher.patches.replace(module, name, reduce)

        watcher.when_imported("torch.distributed.fsdp._flat_param", flat)
        watcher.when_imported("torch.distributed.fsdp._runtime_utils", runtime)

    def _members(self, flat: Any) -> Iterator[tuple[WatchedParameter, Any, int]]:
        """Parameter, where it is in this rank's shard, where it is in the whole flat parameter."""
        begins = _begins(flat)
        for info, place, begin in zip(flat._param_infos, flat._shard_param_infos, begins, strict=True):
            for model in self._watcher.models:
                parameter = model.leaf(info.module, info.param_name)
                if parameter is not None:
                    yield parameter, place, begin

    def _arrives(self, flat: Any, reduces: bool) -> None:
        """The gradient of all of it, before it is reduced; under `no_sync`, with those before."""
        if flat.grad is None:
            return
        total = flat.grad.detach().reshape(-1)
        before = self._sums.pop(id(flat), None)
        if not reduces:
            self._sums[id(flat)] = total.clone()
        gradient = total if before is None else total - before
        line = line_of_script()
        for parameter, _, begin in self._members(flat):
            part = gradient[begin : begin + parameter.seen.numel]
            parameter.arrives(part, sample=True)
            if before is not None or not reduces:
                parameter.seen.see("accumulate", word(total.dtype), "FSDP's whole gradient", "", line)

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        if hasattr(tensor, "_shard_param_infos"):
            return [_part(parameter, place) for parameter, place, _ in self._members(tensor)]
        return None


def _kept(flat: Any, members: Sequence[WatchedParameter]) -> None:
    """What micro-batches that were reduced are added in."""
    kept = getattr(flat, "_saved_grad_shard", None)
    if kept is not None:
        line = line_of_script()
        for parameter in members:
            parameter.seen.see("accumulate", word(kept.dtype), "FSDP's shard of the gradient", "", line)


def _part(parameter: WatchedParameter, place: Any) -> OptimizedPart:
    """What this rank has of it, which may be nothing."""
    if not place.in_shard:
        return OptimizedPart(parameter, length=0)
    return OptimizedPart(parameter, place.intra_param_start_idx, place.offset_in_shard, place.numel_in_shard)


def _begins(flat: Any) -> list[int]:
    """Where each parameter begins, past what is there for alignment."""
    begins, at = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            begins.append(at)
        at += numel
    return begins
