"""Seed micro-batches, and refuse state that passes from one to the next, where no bit may depend on ranks.

Under `reduce.order: tree` a gradient follows from the weights, a micro-batch and its number. Random numbers
from a generator that goes on from one micro-batch to the next, and buffers that a forward in training writes,
would add which micro-batches its rank has had before. Both are refused. torch's switches are in
`determinism.py`.

Invariant: the seed of (seed, step, micro-batch) is the same on every machine and in every version, because a
resumed run depends on it.

[Note: fresh] Random numbers belong to a micro-batch if it was seeded by its number, or if a generator had
drawn nothing since it was last seeded when the first forward of the micro-batch began.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from zerodrift.engine.progress import refusal
from zerodrift.engine.step.segment import is_due
from zerodrift.kernels import parameter_key


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    """Return the 64-bit seed of a micro-batch."""
    return parameter_key(f"{step}:{micro_batch}", seed)


def generators(device: torch.device) -> list[torch.Generator]:
    if device.type == "cpu":
        return [torch.default_generator]
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return [torch.default_generator, torch.get_device_module(device).default_generators[index]]


def seed_generators(seed: int, device: torch.device) -> None:
    for generator in generators(device):
        generator.manual_seed(seed)


def generators_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


class MicrobatchState:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._generators = generators(device)
        self.is_seeded = False
        self._holders = [
            (f"{path}.{name}".lstrip("."), module, name)
            for path, module in model.named_modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        """(full name, module, its name there) of every buffer that a checkpoint keeps."""
        self._checks = 0

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Watch a forward; raises behind it."""
        if not self._model.training or not torch.is_grad_enabled():
            yield
            return
        states = [generator.get_state() for generator in self._generators]
        buffers = self.copy_buffers()
        yield
        self.require_unchanged(buffers)
        if self.is_seeded:
            return
        for generator, state in zip(self._generators, states, strict=True):
            if not torch.equal(generator.get_state(), state):
                seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
                if not torch.equal(seeded.get_state(), state):
                    raise refusal("not seeded")
                self.is_seeded = True

    def copy_buffers(self) -> dict[str, torch.Tensor] | None:
        """Copy the buffers before a forward, or a step; None where they are not compared this time, which is
        the same on all ranks."""
        self._checks += 1
        if not is_due(self._checks - 1):
            return None
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def require_unchanged(self, before: dict[str, torch.Tensor] | None) -> None:
        if before is None:
            return
        now = self._buffers()
        for name in before | now:
            if name not in before or name not in now or not _are_same_bits(before[name], now[name]):
                raise refusal("buffer written", name=name)

    def _buffers(self) -> dict[str, torch.Tensor]:
        found = ((name, module._buffers.get(key)) for name, module, key in self._holders)
        return {name: buffer for name, buffer in found if buffer is not None}


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    bits = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)
