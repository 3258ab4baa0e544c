"""The strict process group refuses whatever NCCL would refuse, mix up or wait for without end."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device import standin
from tests.device.build import needs_device
from tests.device.ranks import on_devices
from tests.device.strict import StrictError
from zerodrift.comm.native import exchange

pytestmark = needs_device

Zeros = Callable[..., torch.Tensor]
"""Makes zeros on the device."""


def other_sizes(rank: int, zeros: Zeros) -> None:
    dist.all_reduce(zeros(4 + rank))


def other_operations(rank: int, zeros: Zeros) -> None:
    dist.all_reduce(zeros(4)) if rank else dist.broadcast(zeros(4), 0)


def two_communicators(rank: int, zeros: Zeros) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank else groups[::-1]:
        dist.all_reduce(zeros(4), group=group)


def a_message_and_a_collective(rank: int, zeros: Zeros) -> None:
    group = dist.new_group([0, 1])
    calls = [lambda: dist.send(zeros(4), 1), lambda: dist.all_reduce(zeros(4), group=group)]
    if rank:
        calls = [calls[1], lambda: dist.recv(zeros(4), 0)]
    for call in calls:
        call()
        torch.accelerator.synchronize()


def two_sends(rank: int, zeros: Zeros) -> None:
    dist.isend(zeros(4), 1 - rank)
    dist.irecv(zeros(4), 1 - rank)


def messages(rank: int, zeros: Zeros) -> None:
    dist.recv(zeros(5), 0) if rank else dist.send(zeros(4), 1)


def unequal_splits(rank: int, zeros: Zeros) -> None:
    dist.all_to_all_single(zeros(4), zeros(4), [2, 2], [1 + rank, 3 - rank])


STRICT: dict[Callable[[int, Zeros], object], str] = {
    other_sizes: r"got rank 0 all-reduce of 4 float32\n.*, rank 1 all-reduce of 5 float32\n",
    other_operations: r"got rank 0 broadcast of 4 float32\n.*, rank 1 all-reduce of 4 float32\n",
    lambda rank, zeros: dist.all_reduce(zeros(4, device="cpu")): "NCCL does not carry a tensor on cpu",
    lambda rank, zeros: dist.all_reduce(zeros(4, 4).t()): "does not carry a tensor that is not contiguous",
    lambda rank, zeros: dist.all_reduce(zeros(4).to(torch.float8_e4m3fn)): "not carry torch.float8_e4m3fn",
    two_communicators: "ranks wait for each other: rank 0 in all-reduce of communicator",
    a_message_and_a_collective: r"ranks wait for each other: rank 0 in message to 1 .*rank 1 in all-reduce",
    two_sends: r"ranks wait for each other: rank 0 in message to 1 .*, rank 1 in message to 0",
    messages: r"both ends of message 0 must be alike; got rank 0 message of 4 .*, rank 1 message of 5",
    unequal_splits: "rank 0 sends 1 rows to rank 0, which receives 2",
}


def _differ(device: torch.device, number: int) -> str:
    standin.STALL = 0.1  # nothing goes on in these
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


CARRIED: dict[str, Any] = {
    "unequal splits": [[0.0, 10.0, 11.0], [1.0, 2.0, 3.0, 12.0, 13.0]],
    "a pair at once": [[1.0] * 4, [0.0] * 4],
    "messages in the order of the calls": [[0.0, 0.0], [1.0, 2.0]],
}


def _carried(device: torch.device, what: str) -> list[float]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    if what == "unequal splits":
        send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        out = torch.empty(sum(receive), device=device)
        dist.all_to_all_single(out, torch.arange(4.0, device=device) + 10 * rank, receive, send)
    elif what == "a pair at once":
        out, mine = torch.empty(4, device=device), torch.full((4,), float(rank), device=device)
        exchange(dist.group.WORLD, other, mine, out)
    else:  # tags mean nothing to NCCL
        out = torch.zeros(2, device=device)
        for number, tag in enumerate((7, 3) if rank else (3, 7)):
            if rank:
                dist.recv(out[number : number + 1], 0, tag=tag)
            else:
                dist.send(torch.full((1,), 1.0 + number, device=device), 1, tag=tag)
    return out.tolist()


@pytest.mark.parametrize("what", CARRIED)
def test_what_nccl_carries_arrives(what: str) -> None:
    assert on_devices(_carried, 2, what) == CARRIED[what]


def _aborted(device: torch.device) -> str:
    """Wait for a message that is never sent, until another thread aborts the communicator."""
    group = dist.new_group([0, 1])
    if dist.get_rank():
        return ""
    received = torch.zeros(1, device=device)
    dist.irecv(received, 1, group=group)
    threading.Timer(0.2, group.abort).start()
    torch.accelerator.synchronize()
    try:
        dist.all_reduce(received, group=group)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_an_aborted_communicator_ends_waits_and_takes_nothing_more() -> None:
    said, _ = on_devices(_aborted, 2)
    assert said == "communicator 1 was aborted, and `all-reduce` is issued on it"
