"""Random numbers of a micro-batch that depend on its number and on no rank.

Invariant: the seed of (seed, step, micro-batch) is the same on every machine and in every version: the known
answers in the tests never change, because a resumed run depends on them.
"""

from __future__ import annotations

import contextlib

import torch

from zerodrift.optim.rounding import parameter_key


def seed_of(seed: int, step: int, micro_batch: int) -> int:
    """64 bits."""
    return parameter_key(f"{step}:{micro_batch}", seed)


def generators(device: torch.device) -> list[torch.Generator]:
    """torch's, of the host and of one device."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def seed_generators(seed: int, device: torch.device) -> None:
    for generator in generators(device):
        generator.manual_seed(seed)


def generators_kept(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context that leaves torch's generators as they were."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
