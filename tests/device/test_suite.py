"""Tests of ranks, once more on the stand-in device: `--standin` gives ranks the device in the CPU's place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.device.build import needs_device
from tests.device.plugin import ROOT

FILES = (
    "tests/numerics/test_backends.py",
    "tests/numerics/test_masters.py",
    "tests/ranks/test_audit.py",
    "tests/ranks/test_collectives.py",
    "tests/ranks/test_dropin.py",
    "tests/ranks/test_dropin_files.py",
    "tests/ranks/test_fsdp2_files.py",
    "tests/ranks/test_mesh.py",
    "tests/ranks/test_observe.py",
)

CARRIERS = "about what carries messages between CPUs, in any order; NCCL is torch's"
SWAPPED = "a model without its weights is converted: as on no GPU, conversions swap parameters here"

LEFT_OUT = {
    "tests/ranks/test_collectives.py::test_sums_by_the_tree_are_its_bits_on_every_carrier": CARRIERS,
    "tests/ranks/test_collectives.py::test_halves_are_two_messages_where_slices_are_three": CARRIERS,
    "tests/ranks/test_collectives.py::test_operations_overlap_and_may_be_waited_for_in_any_order": CARRIERS,
    "tests/ranks/test_collectives.py::test_a_reduction_receives_a_window_however_large_it_is": CARRIERS,
    "tests/ranks/test_collectives.py::test_every_carrier_brings_every_bit": CARRIERS,
    "tests/ranks/test_collectives.py::test_a_rank_that_hangs_is_an_error_within_the_timeout": (
        "a wait is the stream's, so the host goes on; on a GPU it is NCCL's watchdog that notices"
    ),
    "tests/ranks/test_dropin.py::test_an_init_may_initialise_what_is_below_it": SWAPPED,
    "tests/ranks/test_dropin.py::test_parameters_without_an_engine": SWAPPED,
}
"""A test of these files -> why it is not run on the device."""


@pytest.mark.slow
@needs_device
@pytest.mark.parametrize("file", FILES)
def test_ranks_do_on_the_device_what_they_do_on_the_cpu(file: str) -> None:
    left_out = [f"--deselect={name}" for name in LEFT_OUT if name.startswith(file)]
    command = ["-m", "pytest", file, "-q", "-n", "0", "--standin", "side streams last"]
    done = subprocess.run(
        [sys.executable, *command, "-m", "not slow and not gpu", *left_out],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
