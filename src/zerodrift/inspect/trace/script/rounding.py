"""Compare what an optimizer leaves at the end of a step with what it finds at the beginning of the next.

A few elements of each weight and of each state are copied at both times, and compared once all steps are
over: no device waits before. Elements that are all of 16 bits, or of 8, and were not, have been rounded in
between. Weights of 16 bits are compared within a step: elements that did not change lost their update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zerodrift.inspect.trace.parameter import local, sample
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.script.losses import NARROW

_WIDE = frozenset((torch.float32, torch.float64))
_NARROW = tuple(
    dtype
    for name in ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
    if (dtype := getattr(torch, name, None)) is not None
)
_NAMES = [dtype_name(dtype) for dtype in _NARROW]
_SAMPLED = 64  # elements of a tensor
_LEAST = 4  # elements other than zero that it takes to tell
_STEPS = 2  # pairs of steps that are compared

Key = tuple[int, str]  # id of what an optimizer updates, and the name of a state; empty for the tensor itself


class RoundingWatch:
    """Samples of weights and states around the pauses between steps."""

    def __init__(self) -> None:
        self._ended: dict[Key, tuple[Any, torch.Tensor]] = {}
        self._narrow: dict[int, torch.Tensor] = {}
        self._updates: dict[int, list[tuple[Any, torch.Tensor, torch.Tensor]]] = {}
        """Id of a tensor of 16 bits -> its owner, and its elements before and after each update."""
        self._pairs: dict[Key, tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]] = {}

    def ends(self, owner: Any, tensor: torch.Tensor, states: dict[Any, Any]) -> None:
        """Sample at the end of a step; `owner` is returned by `rounded` and `lost`."""
        before = self._narrow.pop(id(tensor), None)
        if before is not None:
            pair = owner, before, sample(tensor, _SAMPLED).clone()
            self._updates.setdefault(id(tensor), []).append(pair)
        for key, value in _wide(tensor, states):
            pairs = self._pairs.get((id(tensor), key))
            if pairs is None or len(pairs[1]) < _STEPS:
                self._ended[id(tensor), key] = owner, sample(value, _SAMPLED).clone()

    def begins(self, owner: Any, tensor: torch.Tensor, states: dict[Any, Any]) -> None:
        """Sample at the beginning of a step what was sampled at the end of the one before."""
        is_updated = tensor.dtype in NARROW and tensor.grad is not None
        if is_updated and len(self._updates.get(id(tensor), ())) < _STEPS:
            self._narrow[id(tensor)] = sample(tensor, _SAMPLED).clone()
        for key, value in _wide(tensor, states):
            _, ended = self._ended.pop((id(tensor), key), (None, None))
            if ended is not None:
                begun = sample(value, _SAMPLED).clone()
                if begun.shape == ended.shape:
                    self._pairs.setdefault((id(tensor), key), (owner, []))[1].append((ended, begun))

    def lost(self) -> Iterator[tuple[Any, float]]:
        """Yield owner and the share of sampled elements that updates did not change."""
        for updates in self._updates.values():
            shares = [float((before == after).float().mean()) for _, before, after in updates if len(after)]
            if shares:
                yield updates[0][0], sum(shares) / len(shares)

    def rounded(self) -> Iterator[tuple[str, str, list[Any]]]:
        """Yield the name of a state, the dtype that it was rounded to between steps, and its owners.

        Values that a narrower dtype happens to hold, such as gains of norms, count with the rest.
        """
        found: dict[str, dict[str, list[Any]]] = {}
        for (_, key), (owner, pairs) in self._pairs.items():
            dtypes = {_rounded_to(*pair) for pair in pairs}
            if dtypes and "" not in dtypes:
                found.setdefault(key, {}).setdefault(max(dtypes, key=_NAMES.index), []).append(owner)
        for key, by_dtype in found.items():
            owners = [owner for alike in by_dtype.values() for owner in alike]
            yield key, max(by_dtype, key=lambda dtype: len(by_dtype[dtype])), owners


def _wide(tensor: torch.Tensor, states: dict[Any, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    least = min(_LEAST, local(tensor).numel())
    for key, value in (("", tensor), *states.items()):
        value = local(value) if isinstance(value, torch.Tensor) else None
        if value is not None and value.dtype in _WIDE and value.numel() >= max(least, 2):
            yield str(key), value


def _rounded_to(ended: torch.Tensor, begun: torch.Tensor) -> str:
    """Return the narrowest dtype that holds all of `begun`, if `ended` was not of it; empty for none."""
    ended, begun = ended.cpu(), begun.cpu()
    if int((begun != 0).sum()) < _LEAST:
        return ""
    for dtype in _NARROW:
        if torch.equal(begun.to(dtype).to(begun.dtype), begun):
            wider = ended.to(dtype).to(ended.dtype) != ended
            return dtype_name(dtype) if 4 * int(wider.sum()) >= ended.numel() else ""
    return ""
