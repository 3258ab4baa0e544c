"""The engine on the stand-in device: the bits of the CPU in every order of streams, and planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.build import needs_device
from tests.device.races import Race
from tests.device.ranks import on_devices
from tests.device.standin import ORDERS, Order, ordered
from tests.device.strict import StrictError
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, same, train
from tests.ranks.harness import run_ranks
from zerodrift.api import initialize
from zerodrift.comm.native import CommunicationStream

pytestmark = needs_device
STEPS = 2


def _train(device: torch.device, stage: int, mode: str, order: Order) -> Run:
    with ordered(order, seed=stage):
        engine = initialize(
            GPT(moe=True).to(device), config=config(stage, mode), device=device.type, quiet=True
        )
        run = train(engine, STEPS, data=lambda *place: batch(*place).to(device))
        engine.destroy()
        run.weights = {name: weight.cpu() for name, weight in run.weights.items()}
        run.states = {
            name: {key: of.cpu() for key, of in state.items()} for name, state in run.states.items()
        }
        run.masters = {name: master.cpu() for name, master in run.masters.items()}
    return run


def _on_cpu(mode: str) -> Run:
    engine = initialize(GPT(moe=True), config=config(3, mode), device="cpu", quiet=True)
    run = train(engine, STEPS)
    engine.destroy()
    return run


def _runs(device: torch.device, mode: str, cells: list[tuple[int, Order]]) -> list[Run]:
    return [_train(device, stage, mode, order) for stage, order in cells]


FEW: list[tuple[int, Order]] = [
    (0, "side streams last"),
    (1, "at once"),
    (2, "side streams first"),
    (3, "random"),
]
ALL: list[tuple[int, Order]] = [(stage, order) for stage in range(4) for order in ORDERS]


@pytest.mark.parametrize(
    ("mode", "cells"),
    [
        ("bf16", FEW),
        *(pytest.param(mode, ALL, marks=pytest.mark.slow) for mode in ("fp32", "bf16", "autocast-bf16")),
    ],
    ids=["bf16 few", "fp32", "bf16", "autocast"],
)
def test_stages_and_orders_have_the_bits_of_the_cpu(mode: str, cells: list[tuple[int, Order]]) -> None:
    expected = run_ranks(_on_cpu, 2, mode)
    for mine, runs in zip(expected, on_devices(_runs, 2, mode, cells, timeout=280), strict=True):
        assert same([mine, *runs]) == []


# --- planted faults ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _not_behind_the_computation(stream: CommunicationStream) -> Iterator[None]:
    with stream._streams.stream(stream._stream):
        yield


def _never_waits(stream: CommunicationStream, *buffers: torch.Tensor) -> Callable[[], None]:
    return lambda: None


def _waits_for_what_came_before(stream: CommunicationStream, *buffers: torch.Tensor) -> Callable[[], None]:
    done = stream._streams.current_stream(stream._device).record_event()
    return lambda: stream._streams.current_stream(stream._device).wait_event(done)


FAULTS: dict[str, tuple[str, Any]] = {
    "a missing wait_stream": ("current", _not_behind_the_computation),
    "a handle that never waits": ("wait_for_work", _never_waits),
    "an event of the wrong stream": ("wait_for_work", _waits_for_what_came_before),
}


def _with_fault(device: torch.device, name: str) -> str:
    method, fault = FAULTS[name]
    setattr(CommunicationStream, method, fault)
    try:
        _train(device, 3, "fp32", "at once")
    except Race as race:
        return str(race)
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_the_streams_is_found(fault: str) -> None:
    for text in on_devices(_with_fault, 2, fault):
        assert "all-gather of communicator" in text and "no event orders the two" in text
        assert "start_all_gather" in text


def _buffer_of_a_handle(device: torch.device, held: bool) -> str:
    """Gather into a buffer that nobody but the handle holds, and compute meanwhile."""
    stream = CommunicationStream(device)
    buffer = torch.ones(1000, device=device)
    with stream.current():
        buffer.mul_(2)
    wait = stream.wait_for_work(*([buffer] if held else []))
    del buffer
    try:
        values = torch.ones(1000, device=device)
        wait()
        values.sum().item()
    except Race as race:
        return str(race)
    return ""


def test_a_handle_holds_its_buffers() -> None:
    assert on_devices(_buffer_of_a_handle, 1, True) == [""]
    (text,) = on_devices(_buffer_of_a_handle, 1, False)
    assert text.startswith("`allocation` on stream 0 writes 4096 bytes that `aten.mul_.Tensor` wrote")


# --- the process group ---------------------------------------------------------------------------------


def _differ(device: torch.device, what: str) -> str:
    rank = dist.get_rank()
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
        torch.accelerator.synchronize()
    except StrictError as error:
        return str(error)
    return ""


STRICT = {
    "sizes": "got rank 0 all-reduce of 4 float32, rank 1 all-reduce of 5 float32",
    "operations": "got rank 0 broadcast of 4 float32, rank 1 all-reduce of 4 float32",
    "dtypes": "got rank 0 all-reduce of 4 float64, rank 1 all-reduce of 4 float32",
    "host": "NCCL does not carry a tensor on cpu",
    "strides": "NCCL does not carry a tensor that is not contiguous",
    "fp8": "NCCL does not carry torch.float8_e4m3fn",
    "two communicators": "ranks wait for each other: rank 0 in all-reduce of communicator",
}


@pytest.mark.parametrize("what", STRICT)
def test_what_nccl_would_not_carry_is_an_error(what: str) -> None:
    assert any(STRICT[what] in text for text in on_devices(_differ, 2, what))
