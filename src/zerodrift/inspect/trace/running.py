"""Find running values of 16 bits: averages and sums that a script computes anew from their last value.

`mean = 0.9 * mean + 0.1 * x` is another tensor in every step. What shows that it is a running value is the
way back: a result that was there when a step ended is read in the next one, and what is computed from it,
element by element, is written by the same line.

Invariant: only arithmetic of elements carries a value on. A product or an activation ends the way, and so
does a write that does not read what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerodrift.inspect.trace.losses import NARROW
from zerodrift.inspect.trace.operations import line_of_script
from zerodrift.inspect.trace.parameter import Owners, local

_REPLACES = frozenset(("copy", "fill", "zero"))
"""Operations that do not read what they write over."""

_CARRIES = frozenset((
    "_to_copy", "add", "addcdiv", "addcmul", "clone", "div", "lerp", "mul", "sub", "where", *_REPLACES,
))  # fmt: skip


class MadeTensor:
    """A result that may be kept by a tensor of another object, which `.data` was set of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = local(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._view = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor | None:
        """Return the tensor, if its memory was not freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, offset, shape, stride = self._view
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


@dataclass(frozen=True, slots=True)
class _Result:
    made: MadeTensor
    operation: str
    line: str
    source: Any
    is_running: bool  # whether it was computed from what the same line left a step before


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return local(tensor).untyped_storage()._cdata, int(local(tensor).storage_offset())


class RunningWatch:
    """Follows what the results of one step become in the next."""

    def __init__(self) -> None:
        self._lines: Owners[frozenset[str]] = Owners()
        """Memory -> lines that left, at the end of the last step, what it was computed from."""
        self._results: dict[tuple[int, int], _Result] = {}  # the last of each place
        self._steps = 0  # steps that there had been when results were last looked at

    def computed(
        self, name: str, reads: Sequence[torch.Tensor], result: torch.Tensor, source: Any, is_followed: bool
    ) -> None:
        """Follow an operation; `source` is handed back, and of what is followed elsewhere only the way is."""
        operation, lines = name.removesuffix("_"), frozenset[str]()
        if operation in _CARRIES:
            read = [*reads, result] if name.endswith("_") and operation not in _REPLACES else reads
            lines = lines.union(*(self._lines.of(tensor) or () for tensor in read))
        if lines or self._lines.of(result):
            self._lines.put(result, lines)
        if is_followed:
            self._results.pop(_place(result), None)
        elif result.dtype in NARROW and operation in _CARRIES:
            line = line_of_script()
            made = _Result(MadeTensor(result), operation, line, source, line in lines)
            self._results[_place(result)] = made

    def forget(self, tensors: Iterable[Any]) -> None:
        """Leave out the states of an optimizer, which are looked at as such."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._results.pop(_place(tensor), None)

    def rests(
        self, steps: int, may_run: Callable[[torch.Tensor], bool]
    ) -> Iterator[tuple[torch.Tensor, _Result]]:
        """Yield the running values that are there between two steps, of which there were so many.

        What is only kept from one micro-batch to the next is none: sums of gradients are looked at as such.
        """
        if steps == self._steps:
            return
        self._steps = steps
        for result in self._results.values():
            tensor = result.made.tensor()
            if tensor is not None and may_run(tensor):
                self._lines.put(tensor, frozenset((result.line,)))
                if result.is_running:
                    yield tensor, result
        self._results.clear()
        self._lines.forget_freed()
