"""The engine on the stand-in device: the bits of the CPU in every order of streams, and planted faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.device.build import needs_device
from tests.device.races import Race
from tests.device.ranks import on_devices
from tests.device.standin import ORDERS, Order, install, ordered
from tests.device.strict import StrictError
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, same, train
from tests.ranks.harness import run_ranks
from zerodrift.api import initialize
from zerodrift.comm.native import CommunicationStream
from zerodrift.engine.step import traversal
from zerodrift.errors import RankError
from zerodrift.optim.offload import GradientDownloads
from zerodrift.plan.schedule import prefetch_ends

pytestmark = needs_device
STEPS = 2


def _train(device: torch.device, stage: int, mode: str, order: Order, layers: int = 1, **rest: Any) -> Run:
    with ordered(order, seed=stage):
        engine = initialize(
            GPT(layers, moe=True).to(device),
            config=config(stage, mode, **rest),
            device=device.type,
            quiet=True,
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
    engine = initialize(GPT(1, moe=True), config=config(3, mode), device="cpu", quiet=True)
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


@contextlib.contextmanager
def _records_too_early(stream: CommunicationStream) -> Iterator[None]:
    stream._stream.wait_stream(stream._streams.current_stream(stream._device))
    early = stream._stream.record_event()
    with stream._streams.stream(stream._stream):
        yield
    stream.wait_for_work = lambda *buffers: (  # type: ignore[method-assign]
        lambda: stream._streams.current_stream(stream._device).wait_event(early)
    )


def _returns_pages_at_once(downloads: GradientDownloads, number: int) -> None:
    _begin_download(downloads, number)
    page = downloads._on_host[number]
    downloads._free[page.numel(), page.dtype].append(page)


def _one_unit_further(sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    ends = prefetch_ends(sizes, budget)
    return tuple(min(end + dist.get_rank(), len(sizes)) for end in ends)


_begin_download, _next_gradient = GradientDownloads._begin, GradientDownloads.__getitem__
OFFLOAD: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}

FAULTS: dict[str, tuple[Any, str, Any, dict[str, Any], tuple[str, ...]]] = {
    "a missing wait_stream": (
        *(CommunicationStream, "current", _not_behind_the_computation, {}),
        ("all-gather of communicator", "start_all_gather"),
    ),
    "a handle that never waits": (
        *(CommunicationStream, "wait_for_work", _never_waits, {}),
        ("all-gather of communicator", "start_all_gather"),
    ),
    "an event of the wrong stream": (
        *(CommunicationStream, "wait_for_work", _waits_for_what_came_before, {}),
        ("all-gather of communicator", "start_all_gather"),
    ),
    "an event recorded too early": (
        *(CommunicationStream, "current", _records_too_early, {}),
        ("all-gather of communicator", "start_all_gather"),
    ),
    "a page of an offload that is used again": (
        *(GradientDownloads, "_begin", _returns_pages_at_once, OFFLOAD),
        ("`the update` on the host reads", "offload.py", "`copy_` wrote"),
    ),
    "a prefetch one unit too far": (
        *(traversal, "prefetch_ends", _one_unit_further, {}),
        ("all ranks must issue the same operation", "start_all_gather", "start_reduce_scatter"),
    ),
}


def _with_fault(device: torch.device, name: str | None, rest: dict[str, Any]) -> str:
    def read(downloads: GradientDownloads, number: int) -> torch.Tensor:
        gradient = _next_gradient(downloads, number)
        install().on_host("the update", [gradient], [])
        return gradient

    with contextlib.ExitStack() as stack:
        if name is not None:
            stack.enter_context(mock.patch.object(*FAULTS[name][:3]))
        stack.enter_context(mock.patch.object(GradientDownloads, "__getitem__", read))
        try:
            _train(device, 3, "fp32", "at once", layers=4 if rest == {} else 2, **rest)
        except (Race, StrictError) as error:
            return str(error)
        except RankError as error:  # where the host was still issuing the operation
            return str(error.__cause__)
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_both_places(fault: str) -> None:
    *_, rest, words = FAULTS[fault]
    found = [text for text in on_devices(_with_fault, 2, fault, rest) if text]
    assert found and all(word in text for text in found for word in words), found
    places = ("rank 0", "rank 1") if "prefetch" in fault else ("Later:\n", "Earlier:\n")
    assert all(place in text for place in places for text in found), found


def test_offload_without_a_fault_passes() -> None:
    assert on_devices(_with_fault, 2, None, OFFLOAD) == ["", ""]


def _buffer_of_a_handle(device: torch.device, held: bool) -> str:
    """Gather into a buffer that only the handle holds, and compute meanwhile."""
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
