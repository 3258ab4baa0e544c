"""One forward of a module under way: what went in, and when a backward has come past it.

Invariant: the tensors that went in are only looked at. A hook on one of them goes with its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zerodrift.engine.nested import tensors_in

BEFORE_ALL = -1
"""Lower than the number of any node."""


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of a forward, before it runs."""

    inputs: tuple[tuple[torch.Tensor, int], ...]
    """With the version of each: what a module changes in place, it returns."""
    newest: int
    """The highest number of the nodes behind them; what the forward adds to the graph has higher ones."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardInputs:
        given = (*args, *kwargs.values())
        inputs = [tensor for tensor in tensors_in(given) if not tensor.is_inference()]
        numbers = [_number(tensor) for tensor in inputs]
        return cls(tuple((tensor, tensor._version) for tensor in inputs), max(numbers, default=BEFORE_ALL))

    def changed(self) -> Iterator[torch.Tensor]:
        """Inputs that were changed in place."""
        return (tensor for tensor, version in self.inputs if tensor._version != version)

    def made(self, tensor: torch.Tensor) -> bool:
        """Whether the node behind a tensor is one that the forward has added to the graph."""
        return _number(tensor) > self.newest

    def tell(self, over: Callable[[], None], inside: bool) -> None:
        """Call `over` when a gradient is about to go on from the newest input: autograd runs newer nodes
        first, so all that the forward added has run.

        `inside` is a forward in a backward, of reentrant checkpointing, whose inputs may be leaves. These are
        as new to autograd as the weights are, so there the end of that backward tells. Elsewhere a leaf
        tells nothing: it would keep the hook for ever.
        """
        for tensor, _ in self.inputs:
            if not tensor.requires_grad or _number(tensor) != self.newest:
                continue
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: over())
            elif inside:
                tensor.register_hook(lambda grad: at_the_end(over))
            return


def at_the_end(then: Callable[[], None]) -> None:
    """Call `then` when the backward that is running has run all its nodes: the one callback for this that
    autograd has; FSDP2 and DDP use it too."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def _number(tensor: torch.Tensor) -> int:
    """Of the node behind it. Private in torch (2.13 to 2.15)."""
    return BEFORE_ALL if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()
