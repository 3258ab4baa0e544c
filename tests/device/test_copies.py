"""The host waits for a device in copies, and in operations that on CUDA copy or read values first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tests.device import standin
from tests.device.build import needs_device
from tests.device.ranks import on_devices

pytestmark = needs_device


def _host(pinned: bool = False, *shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape or (4, 4), device="cpu", pin_memory=pinned, **options)


def _index(of: torch.Tensor) -> torch.Tensor:
    return torch.arange(2, device=of.device)


WAITS: dict[str, tuple[int, Callable[[torch.Tensor], object]]] = {
    "an item, a number": (1, lambda x: x[0].__setitem__(1, 0.5)),
    "a row, a number": (0, lambda x: x.__setitem__(1, 0.5)),
    "indices, a number": (1, lambda x: x.__setitem__(_index(x), 0.5)),
    "indices, a tensor": (0, lambda x: x.__setitem__(_index(x), x[0])),
    "a mask, a number": (0, lambda x: x.__setitem__(x > 0, 0.5)),
    "a mask, a tensor": (1, lambda x: x.__setitem__(x > 0, x[0, 0])),
    "indices of the host": (1, lambda x: x[torch.tensor([0, 1], device="cpu")]),
    "index_put_, a number of the host": (1, lambda x: x.index_put_((_index(x),), _host()[0, 0])),
    "index_put_, a mask": (0, lambda x: x.index_put_((x > 0,), _host()[0, 0])),
    "masked_fill, a number": (0, lambda x: x.masked_fill(x > 0, 0.5)),
    "masked_fill, a number of the host": (0, lambda x: x.masked_fill(x > 0, _host()[0, 0])),
    "masked_fill, a number of the device": (1, lambda x: x.masked_fill(x > 0, x[0, 0])),
    "where, a number": (0, lambda x: torch.where(x > 0, x, 0.5)),
    "where, a number of the host": (1, lambda x: torch.where(x > 0, x, _host()[0, 0])),
    "fill_": (0, lambda x: x.fill_(0.5)),
    "fill_, a number of the host": (0, lambda x: x.fill_(_host()[0, 0])),
    "a sum with a number of the host": (0, lambda x: x + _host()[0, 0]),
    "a tensor of a list": (1, lambda x: torch.tensor([0.5, 1], device=x.device)),
    "from pageable memory": (1, lambda x: _host().to(x.device)),
    "from page-locked memory": (1, lambda x: _host(True).to(x.device)),
    "from page-locked memory, non_blocking": (0, lambda x: _host(True).to(x.device, non_blocking=True)),
    "to another dtype": (0, lambda x: x.double().copy_(_host(True), non_blocking=True)),
    "from other strides": (1, lambda x: x.copy_(_host(True).T, non_blocking=True)),
    "to other strides": (0, lambda x: x.T.copy_(_host(True), non_blocking=True)),
    "of nothing": (0, lambda x: x[:0].copy_(_host()[:0])),
    "to the host": (1, lambda x: x.cpu()),
    "to page-locked memory": (1, lambda x: _host(True).copy_(x)),
    "to page-locked memory, non_blocking": (0, lambda x: _host(True).copy_(x, non_blocking=True)),
    "to page-locked memory of another dtype": (
        0,
        lambda x: _host(True, dtype=torch.double).copy_(x, non_blocking=True),
    ),
}
"""Copy -> how often the host waits, and a function of a tensor of the device. Shape [4, 4]."""


def _waits(device: torch.device, copies: list[str]) -> list[int]:
    found = []
    for name in copies:
        x = torch.ones(4, 4, device=device)
        before = standin.device.counts["host waits"]
        WAITS[name][1](x)
        found.append(standin.device.counts["host waits"] - before)
    return found


def test_the_host_waits_where_it_does_on_cuda() -> None:
    (found,) = on_devices(_waits, 1, list(WAITS))
    assert dict(zip(WAITS, found, strict=True)) == {name: count for name, (count, _) in WAITS.items()}


def _values(device: torch.device) -> list[bool]:
    """Copy to the device and back, to and from memory of several layouts; return whether each is right."""
    values = torch.arange(12.0, device="cpu").view(3, 4)
    layouts = (values, values.T, values[:, 1:3], values.pin_memory(), values[0].expand(3, 4), values[0, 1])
    found = []
    for source, dtype, late in itertools.product(layouts, (torch.float32, torch.bfloat16), (True, False)):
        there = torch.zeros(source.shape, dtype=dtype, device=device)
        there.copy_(source, non_blocking=late)
        back = torch.zeros(2, *source.shape, device="cpu").movedim(0, -1)
        back.copy_(there.unsqueeze(-1), non_blocking=late)
        found.append(bool((back == source.unsqueeze(-1)).all()))
    return found


def test_copies_bring_their_values() -> None:
    (found,) = on_devices(_values, 1)
    assert len(found) == 24 and all(found)
