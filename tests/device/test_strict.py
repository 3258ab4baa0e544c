"""The strict process group refuses what NCCL would refuse or mix up."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.device.build import needs_device
from tests.device.ranks import on_devices
from tests.device.strict import StrictError

pytestmark = needs_device

Zeros = Callable[..., torch.Tensor]
"""Makes zeros on the device."""


def other_operations(rank: int, zeros: Zeros) -> None:
    dist.all_reduce(zeros(4)) if rank else dist.broadcast(zeros(4), 0)


def messages(rank: int, zeros: Zeros) -> None:
    dist.recv(zeros(5), 0) if rank else dist.send(zeros(4), 1)


def unequal_splits(rank: int, zeros: Zeros) -> None:
    dist.all_to_all_single(zeros(4), zeros(4), [2, 2], [1 + rank, 3 - rank])


STRICT: dict[Callable[[int, Zeros], object], str] = {
    other_operations: r"got rank 0 broadcast of 4 float32\n.*, rank 1 all-reduce of 4 float32\n",
    lambda rank, zeros: dist.all_reduce(zeros(4, device="cpu")): "NCCL does not carry a tensor on cpu",
    lambda rank, zeros: dist.all_reduce(zeros(4, 4).t()): "does not carry a tensor that is not contiguous",
    lambda rank, zeros: dist.all_reduce(zeros(4).to(torch.float8_e4m3fn)): "not carry torch.float8_e4m3fn",
    messages: r"both ends of message 0 must be alike; got rank 0 message of 4 .*, rank 1 message of 5",
    unequal_splits: "rank 0 sends 1 rows to rank 0, which receives 2",
}


def _differ(device: torch.device, number: int) -> str:
    try:
        list(STRICT)[number](dist.get_rank(), partial(torch.zeros, device=device))
        torch.accelerator.synchronize()
    except StrictError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", range(len(STRICT)))
def test_what_nccl_would_not_carry_is_an_error(number: int) -> None:
    found = on_devices(_differ, 2, number)
    assert any(re.search(list(STRICT.values())[number], text, re.DOTALL) for text in found), found
