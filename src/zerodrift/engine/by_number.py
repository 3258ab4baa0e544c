"""What a forward takes from the one before it or leaves to the next, found where no bit may depend on ranks.

Under `reduce.order: tree` a gradient follows from the weights, a micro-batch and its number. Two things in a
model would silently add which micro-batches its rank has had before: random numbers from a generator that
goes on from one to the next, and buffers that a forward in training writes, as running statistics are.

[Note: fresh] Numbers count as those of a micro-batch if it was seeded by its number, or if a generator had
drawn nothing since somebody seeded it when the first forward of the micro-batch began.

Invariant: only reads; a model that does neither runs as if nothing were here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zerodrift.engine import steps
from zerodrift.engine.seeds import generators
from zerodrift.engine.segment import is_due


class ByNumber:
    """Looks at the forwards of one engine."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._generators = generators(device)
        self._seeded = False
        """Whether what is drawn belongs to the micro-batch that is under way."""
        self._holders = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        """What a checkpoint would keep: (full name, module, its name there)."""
        self._looks = 0

    def seeded(self) -> None:
        self._seeded = True

    def ended(self) -> None:
        """A backward has: what comes is another micro-batch."""
        self._seeded = False

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Around one; raises behind it."""
        if not self._model.training or not torch.is_grad_enabled():
            yield
            return
        states = [generator.get_state() for generator in self._generators]
        buffers = self.buffers()
        yield
        self.require_kept(buffers)
        if self._seeded:
            return
        for generator, state in zip(self._generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                if not torch.equal(_fresh(generator), state):
                    raise steps.drawn()
                self._seeded = True

    def buffers(self) -> dict[str, torch.Tensor] | None:
        """Their values before a forward, or all of a step; None where they are not looked at this time, which
        is the same on all ranks."""
        self._looks += 1
        if not is_due(self._looks - 1):
            return None
        return {name: buffer.clone() for name, buffer in self._now().items()}

    def require_kept(self, before: dict[str, torch.Tensor] | None) -> None:
        if before is None:
            return
        now = self._now()
        for name in before | now:
            if name not in before or name not in now or not _alike(before[name], now[name]):
                raise steps.written(name)

    def _now(self) -> dict[str, torch.Tensor]:
        found = ((name, module._buffers.get(key)) for name, module, key in self._holders)
        return {name: buffer for name, buffer in found if buffer is not None}


def _fresh(generator: torch.Generator) -> torch.Tensor:
    """Its state as it was seeded."""
    return torch.Generator(generator.device).manual_seed(generator.initial_seed()).get_state()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)
