"""The accelerator of these tests: a GPU, or the stand-in of `tests/device` where that is torch's."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.device import standin
from tests.device.programs import INTERPRETED
from tests.device.races import lines, stack
from zerodrift.comm import usable_accelerator
from zerodrift.kernels import device as programs

FOUND = usable_accelerator()
DEVICE = FOUND or torch.device("cpu")
COUNT = torch.accelerator.device_count() if FOUND is not None else 0
IS_STANDIN = DEVICE.type == "standin"
STEPS, FEW_STEPS = (2, 2) if IS_STANDIN else (10, 6)
if INTERPRETED:
    programs.TILE = programs.TILE_8BIT = 64  # a program takes a while, so there are fewer

needs_accelerator = [
    pytest.mark.gpu,
    pytest.mark.skipif(FOUND is None, reason="no accelerator on this machine"),
]


@contextmanager
def deterministic() -> Iterator[None]:
    """Allow only deterministic operations."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def waits_in(run: Callable[[], object]) -> list[str]:
    """Return the places where the host waits for the device, by the warnings of torch or the stand-in."""
    if IS_STANDIN:
        return _waits_for_the_standin(run)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in said if "synchroniz" in str(each.message)]


def _waits_for_the_standin(run: Callable[[], object]) -> list[str]:
    device, found = standin.device, list[str]()
    known = device.races.host_waits

    def record(what: str, which: object) -> None:
        found.append(f"{what} {' < '.join(lines(stack()[:3]))}")
        known(what, which)

    device.races.host_waits = record  # type: ignore[method-assign]
    try:
        run()
    finally:
        del device.races.host_waits
    return found
