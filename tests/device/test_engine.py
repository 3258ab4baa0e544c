"""Faults planted in the streams of an engine on the stand-in device are found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.device.build import needs_device
from tests.device.races import Race
from tests.device.ranks import on_devices
from tests.device.standin import install
from tests.device.strict import StrictError
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, train
from zerodrift.api import initialize
from zerodrift.comm.native import CommunicationStream
from zerodrift.engine import traversal
from zerodrift.errors import RankError
from zerodrift.optim.offload import GradientDownloads
from zerodrift.plan.schedule import prefetch_ends

pytestmark = needs_device


def _train(device: torch.device, layers: int, rest: dict[str, Any]) -> None:
    model, written = GPT(layers, moe=True).to(device), config(3, "fp32", **rest)
    engine = initialize(model, config=written, device=device.type, quiet=True)
    train(engine, 2, data=lambda *place: batch(*place).to(device))
    engine.destroy()


@contextlib.contextmanager
def _not_behind_the_computation(stream: CommunicationStream) -> Iterator[None]:
    with stream._streams.stream(stream._stream):
        yield


def _returns_pages_at_once(downloads: GradientDownloads, number: int) -> None:
    _begin_download(downloads, number)
    page = downloads._on_host[number]
    downloads._free[page.numel(), page.dtype].append(page)


def _one_unit_further(sizes: Sequence[int], budget: int) -> tuple[int, ...]:
    ends = prefetch_ends(sizes, budget)
    return tuple(min(end + dist.get_rank(), len(sizes)) for end in ends)


_begin_download, _next_gradient = GradientDownloads._begin, GradientDownloads.__getitem__
OFFLOAD: dict[str, Any] = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}

GATHER = ("all-gather of communicator", "start_all_gather")
FAULTS: dict[str, tuple[Any, str, Any, dict[str, Any], tuple[str, ...]]] = {
    "a missing wait_stream": (CommunicationStream, "current", _not_behind_the_computation, {}, GATHER),
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
            _train(device, 4 if rest == {} else 2, rest)
        except (Race, StrictError, RankError) as error:
            return _fault_behind(error)
    return ""


def _fault_behind(error: BaseException | None) -> str:
    """Return the text of a fault. A host that was still issuing the operation raises an error of its own
    because of it, and if another rank's error has come by then, that one because of its own."""
    while error is not None and not isinstance(error, (Race, StrictError)):
        error = error.__cause__
    return str(error or "")


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
