"""The strict process group refuses whatever NCCL would refuse, mix up or wait for without end."""

from __future__ import annotations

import re
import threading
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


def _message(rank: int, tensor: torch.Tensor) -> None:
    dist.recv(tensor, 0) if rank else dist.send(tensor, 1)


def _differ(device: torch.device, what: str) -> str:
    rank, standin.STALL = dist.get_rank(), 0.1  # nothing goes on in these
    try:
        if what == "sizes":
            dist.all_reduce(torch.zeros(4 + rank, device=device))
        elif what == "operations":
            dist.all_reduce(torch.zeros(4, device=device)) if rank else dist.broadcast(
                torch.zeros(4, device=device), 0
            )
        elif what == "dtypes":
            dist.all_reduce(torch.zeros(4, device=device, dtype=torch.float32 if rank else torch.float64))
        elif what == "host":
            dist.all_reduce(torch.zeros(4))
        elif what == "strides":
            dist.all_reduce(torch.zeros(4, 4, device=device).t())
        elif what == "fp8":
            dist.all_reduce(torch.zeros(4, device=device).to(torch.float8_e4m3fn))
        elif what == "two communicators":
            groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
            for group in groups if rank else groups[::-1]:
                dist.all_reduce(torch.zeros(4, device=device), group=group)
        elif what == "a message and a collective":
            group = dist.new_group([0, 1])
            if rank:
                dist.all_reduce(torch.zeros(4, device=device), group=group)
                torch.accelerator.synchronize()
                dist.recv(torch.zeros(4, device=device), 0)
            else:
                dist.send(torch.zeros(4, device=device), 1)
                torch.accelerator.synchronize()
                dist.all_reduce(torch.zeros(4, device=device), group=group)
        elif what == "two sends":
            other = 1 - rank
            dist.isend(torch.zeros(4, device=device), other)
            dist.irecv(torch.zeros(4, device=device), other)
        elif what == "messages":
            _message(rank, torch.zeros(4 + rank, device=device))
        elif what == "splits":
            rows = torch.zeros(4, device=device)
            dist.all_to_all_single(rows.clone(), rows, [1, 2], [1, 3])
        elif what == "unequal splits":
            rows = torch.zeros(4, device=device)
            dist.all_to_all_single(torch.zeros(4, device=device), rows, [2, 2], [1 + rank, 3 - rank])
        torch.accelerator.synchronize()
    except StrictError as error:
        return str(error)
    return ""


STRICT = {
    "sizes": r"got rank 0 all-reduce of 4 float32\n.*_differ.*, rank 1 all-reduce of 5 float32\n.*_differ",
    "operations": r"got rank 0 broadcast of 4 float32\n.*, rank 1 all-reduce of 4 float32\n",
    "dtypes": r"got rank 0 all-reduce of 4 float64\n.*, rank 1 all-reduce of 4 float32\n",
    "host": "NCCL does not carry a tensor on cpu",
    "strides": "NCCL does not carry a tensor that is not contiguous",
    "fp8": "NCCL does not carry torch.float8_e4m3fn",
    "two communicators": "ranks wait for each other: rank 0 in all-reduce of communicator",
    "a message and a collective": r"ranks wait for each other: rank 0 in message to 1 .*rank 1 in all-reduce",
    "two sends": r"ranks wait for each other: rank 0 in message to 1 .*, rank 1 in message to 0",
    "messages": r"both ends of message 0 must be alike; got rank 0 message of 4 .*, rank 1 message of 5",
    "splits": "sizes and dtypes must fit 2 ranks",
    "unequal splits": "rank 0 sends 1 rows to rank 0, which receives 2",
}


@pytest.mark.parametrize("what", STRICT)
def test_what_nccl_would_not_carry_is_an_error(what: str) -> None:
    found = on_devices(_differ, 2, what)
    assert any(re.search(STRICT[what], text, re.DOTALL) for text in found), found


CARRIED: dict[str, Any] = {
    "unequal splits": [[0.0, 10.0, 11.0], [1.0, 2.0, 3.0, 12.0, 13.0]],
    "nothing": [[], []],
    "integers": [[3] * 4, [3] * 4],
    "a communicator is made meanwhile": [[1.0], [1.0]],
    "a pair at once": [[1.0] * 4, [0.0] * 4],
    "messages in the order of the calls": [[0.0, 0.0], [1.0, 2.0]],
}


def _carried(device: torch.device, what: str) -> list[float]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    if what == "unequal splits":
        send, receive = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
        out = torch.empty(sum(receive), device=device)
        dist.all_to_all_single(out, torch.arange(4.0, device=device) + 10 * rank, receive, send)
    elif what == "nothing":
        out = torch.empty(0, device=device)
        dist.all_to_all_single(out, torch.empty(0, device=device), [0, 0], [0, 0])
        dist.all_reduce(out)
    elif what == "integers":
        out = torch.full((4,), 1 + rank, device=device)
        dist.all_reduce(out)
    elif what == "a communicator is made meanwhile":
        out = torch.full((1,), 1.0 - rank, device=device)
        dist.broadcast(out, 0)
        if rank:
            torch.accelerator.synchronize()  # rank 0 makes the communicator and does not wait here
        dist.new_group([0, 1])
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
