"""Find averages and running values that a script keeps in 16 bits, and sample how they move.

An average in place, such as `average.lerp_(weight, 0.1)`, is known by its operation. A running value, such
as `mean = 0.9 * mean + 0.1 * x`, is another tensor in every step: the next step computes it, element by
element, from the result that the same line left at the end of this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerodrift.inspect.trace.operations import line_of_script
from zerodrift.inspect.trace.parameter import LiveParameter, Owners, local, sample
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.inspect.trace.state import WatchState
from zerodrift.inspect.trace.values import NARROW

_MOVES = frozenset(("add", "add_", "addcdiv_", "addcmul_", "lerp", "lerp_", "sub_"))
"""Operations whose result is an average, if they read a weight and another tensor of its shape."""

_REPLACES = frozenset(("copy_", "fill_", "zero_"))
"""Operations that do not read the tensor that they overwrite."""

_CARRIES = frozenset((
    "_to_copy", "add", "addcdiv", "addcmul", "clone", "copy", "div", "fill", "lerp", "mul", "sub", "where",
    "zero",
))  # fmt: skip
"""Arithmetic of elements, which carries a value on. A product or an activation does not."""

_ELEMENTS = 64  # elements of an average that are compared between steps
_MOST = 256  # averages that are sampled


@dataclass(frozen=True, slots=True)
class Source:
    """The tensors that a tensor was computed from."""

    parameters: frozenset[LiveParameter] = frozenset()
    masters: frozenset[Any] = frozenset()
    is_mixed: bool = False  # whether the weights were combined with another tensor of their shape
    is_drawn: bool = False  # whether whole numbers were drawn at random for its elements
    weight: LiveParameter | None = None  # the last weight, of as many elements
    lines: frozenset[str] = frozenset()  # lines whose results were there at the end of the last step


def keeps_value(name: str) -> bool:
    """Return True for an operation that changes a tensor in place and reads it."""
    return name.endswith("_") and name not in _REPLACES


def carries(name: str) -> bool:
    return name.removesuffix("_") in _CARRIES


def is_average(name: str, tensors: Sequence[torch.Tensor], result: torch.Tensor, source: Source) -> bool:
    """Return True if a result is of a weight and of another tensor of its shape."""
    is_moved = name in _MOVES and (name.endswith("_") or source.is_mixed)
    is_copied = name == "copy_" and source.is_mixed
    is_whole = any(tensor.numel() >= result.numel() for tensor in tensors[1:])
    return bool(source.parameters) and (is_moved or is_copied) and is_whole


class _Result:
    """A result in 16 bits. Another tensor may take over its memory, as `.data` does."""

    def __init__(self, tensor: torch.Tensor, name: str, source: Source, is_average: bool) -> None:
        tensor = local(tensor)
        self.dtype, self._storage = tensor.dtype, StorageWeakRef(tensor.untyped_storage())
        self._view = tensor.storage_offset(), tensor.shape, tensor.stride()
        self.operation, self.line, self.source = name.removesuffix("_"), line_of_script(), source
        self.is_average = is_average or self.line in source.lines
        self.names: tuple[str, ...] = ()  # weights that it is an average of, or buffers
        self.samples: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        """Elements after an update, and those of the weight that it follows."""

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, if its memory was not freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self._view)


class AverageWatch:
    """Follows results in 16 bits from one step to the next."""

    def __init__(self, state: WatchState, sources: Owners[Source]) -> None:
        self._state, self._sources = state, sources
        self._results: dict[tuple[int, int], _Result] = {}  # the last of each place in memory
        self._averages: dict[Any, _Result] = {}  # the first result of each average
        self._steps = 0  # steps that there had been when results were last looked at

    def computed(self, name: str, result: torch.Tensor, source: Source, is_average: bool) -> None:
        if result.dtype not in NARROW or not carries(name):
            return
        before = self._results.get(_place(result))
        if is_average or not (keeps_value(name) and before is not None and before.is_average):
            self._results[_place(result)] = _Result(result, name, source, is_average)

    def forget(self, tensors: Iterable[Any]) -> None:
        """Leave out the states of an optimizer, and copies of them, which have findings of their own."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._results.pop(_place(tensor), None)
                if held := self._sources.of(tensor):
                    self._sources.put(tensor, replace(held, lines=frozenset()))

    def end_step(self) -> None:
        """Sample the averages that are there between two steps.

        Sums over the micro-batches of one step are no averages: the column `accumulate` has them.
        """
        if self._state.process.steps == self._steps:
            return
        self._steps = self._state.process.steps
        parameters = self._state.parameters()
        trained = [parameter.gradient for parameter in parameters]
        trained += [parameter.tensor() for parameter in parameters if parameter.arrived]
        storages = {_place(tensor)[0] for tensor in trained if tensor is not None}
        number = 0
        for result in self._results.values():
            tensor = result.tensor()
            if tensor is None or _place(tensor)[0] in storages:
                continue
            if any(owner.arrived for owner in self._state.memory.all_of(tensor)):
                continue
            held = self._sources.of(tensor) or Source()
            self._sources.put(tensor, replace(held, lines=frozenset((result.line,))))
            if result.is_average:
                self._sample(tensor, result, number)
                number += 1
        self._results.clear()

    def _sample(self, tensor: torch.Tensor, result: _Result, number: int) -> None:
        """Sample an average. One of no weights is known from step to step by its line and its number."""
        weights = result.source.parameters
        names = tuple(sorted(parameter.record.name for parameter in weights))
        known = self._averages.setdefault(names or (result.line, number), result)
        if known is result:
            buffers = (name for model in self._state.models for name in model.buffers_in(tensor))
            known.names = names or tuple(buffers)
        if len(self._averages) <= _MOST and len(known.samples) < 8:
            weight = next(iter(weights)).tensor() if len(weights) == 1 else None
            if weight is not None and local(weight).numel() != local(tensor).numel():
                weight = None
            known.samples.append((_elements(tensor), None if weight is None else _elements(weight)))

    def events(self) -> Iterable[dict[str, Any]]:
        """Yield averages of 16 bits: the sampled elements that had to move, and those that did not."""
        for average in self._averages.values():
            moves = still = 0
            for (before, _), (after, followed) in zip(average.samples, average.samples[1:], strict=False):
                due = torch.ones_like(after, dtype=torch.bool) if followed is None else followed != before
                moves += int(due.sum())
                still += int((due & (before == after)).sum())
            yield {"kind": "average", "line": average.line, "operation": average.operation, "moves": moves,
                   "dtype": dtype_name(average.dtype), "names": average.names, "still": still}  # fmt: skip


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the storage of a tensor and its offset there."""
    return local(tensor).untyped_storage()._cdata, int(local(tensor).storage_offset())


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    return sample(tensor, _ELEMENTS).to(torch.float32, copy=True)
