"""What the watcher asks of whoever knows where a library keeps what it has packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.seen import Column, SeenModel


@dataclass(frozen=True, slots=True)
class OptimizedPart:
    """Some elements of a parameter, in a tensor that an optimizer updates."""

    parameter: WatchedParameter
    begin: int = 0
    """Of the parameter, flat."""
    at: int = 0
    """Of the tensor, flat."""
    length: int = -1
    """Elements; -1 for all of the tensor."""
    sums: bool = True
    """Whether the tensor's `.grad` is what micro-batches were added in, and no copy of it."""


class Adapter:
    """What is known of one library: where it keeps what it has packed. Most have only some of it to say."""

    def begin(self, watcher: Any) -> None:
        """Called by the `Watcher` before any model was seen; a library that is not imported yet may be asked
        for later."""
        raise NotImplementedError

    def parts(self, optimizer: Any, tensor: torch.Tensor) -> Sequence[OptimizedPart] | None:
        """The parameters in a tensor that an optimizer updates; None where it is not this library's."""
        return None

    def carried(self, column: Column, tensor: torch.Tensor) -> Sequence[WatchedParameter]:
        """Whose a collective is that no memory tells."""
        return ()

    def claims(self, module: torch.nn.Module) -> bool:
        """Whether the library sees this module in its own terms."""
        return False

    def models(self) -> Iterable[SeenModel]:
        """The models that it has seen so."""
        return ()
