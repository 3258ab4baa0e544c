"""The checker of races finds planted races and passes ordered accesses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.device.build import needs_device
from tests.device.races import Race
from tests.device.ranks import on_devices
from tests.device.standin import ordered

pytestmark = needs_device

Case = Callable[[torch.device, torch.Stream], object]


def _ones(device: torch.device) -> torch.Tensor:
    return torch.ones(1000, device=device)


def _beside(side: torch.Stream, call: Callable[[], object]) -> object:
    """Call on the side stream, behind what the main one has launched."""
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        return call()


def _wait_for(side: torch.Stream) -> None:
    torch.accelerator.current_stream().wait_event(side.record_event())


def reads_too_early(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    with side:
        return values * 2


def waits_first(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    return values, _beside(side, lambda: values * 2)


def overwrites_what_is_read(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    _beside(side, values.sum)
    return values.zero_()


def records_too_early(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    side.wait_stream(torch.accelerator.current_stream())
    done = side.record_event()
    with side:
        values.mul_(2)
    torch.accelerator.current_stream().wait_event(done)
    return values + 1


def frees_what_is_read(device: torch.device, side: torch.Stream) -> object:
    _beside(side, _ones(device).sum)
    return torch.empty(1000, device=device)


def frees_after_waiting(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    _beside(side, values.sum)
    _wait_for(side)
    del values
    return torch.empty(1000, device=device)


def uses_a_page_again(device: torch.device, side: torch.Stream) -> object:
    page, values = torch.empty(1000, pin_memory=True), _ones(device)
    _beside(side, lambda: page.copy_(values, non_blocking=True))
    return values.copy_(page, non_blocking=True)


def uses_a_page_after_the_host_waited(device: torch.device, side: torch.Stream) -> object:
    page, values = torch.empty(1000, pin_memory=True), _ones(device)
    _beside(side, lambda: page.copy_(values, non_blocking=True))
    side.synchronize()
    return values.copy_(page, non_blocking=True)


def two_halves(device: torch.device, side: torch.Stream) -> object:
    values = _ones(device)
    _beside(side, lambda: values[:500].mul_(2))
    return values, values[500:].mul_(3)


RACES = {
    reads_too_early: "`aten.mul.Tensor` on stream 1 reads 4000 bytes that `aten.fill_.Scalar` wrote",
    overwrites_what_is_read: "`aten.zero_.default` on stream 0 writes 4000 bytes that `aten.sum",
    records_too_early: "`aten.add.Tensor` on stream 0 reads 4000 bytes that `aten.mul_.Tensor` wrote",
    frees_what_is_read: "`allocation` on stream 0 writes 4096 bytes that `aten.sum",
    uses_a_page_again: "`copy_` on stream 0 reads 4000 bytes that `copy_` wrote on stream 1",
}
ORDERED = [waits_first, frees_after_waiting, uses_a_page_after_the_host_waited, two_halves]


def _run(device: torch.device, case: Case) -> str:
    with ordered("at once"):
        side = torch.Stream(device)
        number = side.stream_id
        try:
            held = case(device, side)
            torch.ones(1, device=device).item()
            assert held is not None
        except Race as race:
            return str(race).replace(f"stream {number}", "stream 1")
    return ""


@pytest.mark.parametrize("case", RACES, ids=lambda case: case.__name__)
def test_a_race_is_found_with_both_stacks(case: Case) -> None:
    (text,) = on_devices(_run, 1, case)
    assert text.startswith(RACES[case])
    later, earlier = text.split("\nEarlier:\n")
    assert case.__name__ in later and case.__name__ in earlier


@pytest.mark.parametrize("case", ORDERED, ids=lambda case: case.__name__)
def test_what_is_ordered_passes(case: Case) -> None:
    assert on_devices(_run, 1, case) == [""]


def _late(device: torch.device) -> list[float]:
    """Return values of a copy to page-locked memory, read before and after the host waits."""
    with ordered("side streams last"):
        page = torch.zeros(1, pin_memory=True)
        page.copy_(torch.ones(1, device=device), non_blocking=True)
        before = page.item()
        torch.accelerator.synchronize()
        return [before, page.item()]


def test_a_copy_that_nobody_waited_for_has_not_happened() -> None:
    assert on_devices(_late, 1) == [[0.0, 1.0]]
