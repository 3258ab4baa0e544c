"""Tests of ranks, once more on the stand-in device: `--standin` gives ranks the device in the CPU's place."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import pytest
import torch

from tests.device.build import needs_device
from tests.device.plugin import ROOT
from tests.device.ranks import instead_of_cpu
from tests.device.standin import NAME
from tests.ranks import harness

WITH_LONG = (
    "tests/numerics/test_order.py",
    "tests/numerics/test_order_families.py",
    "tests/numerics/test_order_pipelines.py",
    "tests/numerics/test_pipelines.py",
)
"""Files whose long tests run too."""

CARRIERS = "about what carries messages between CPUs, in any order; NCCL is torch's"
COMMANDS = "about commands; one trains on the device in test_features.py"
DIFFER = "ranks differ on purpose, and the strict carrier says so before the check of the engine"
DTENSORS = "DTensor's collectives ask a process group of C++ for a backend, and the strict one is in Python"
FAKE = "has a process group of its own, whose other ranks are not there"
FUSED = "torch asks a device for a fused cell of a recurrent layer, which no CPU has"
LOADED = "a load of the module swaps parameters here, as on no GPU, and theirs name no dtype of gradients"
PEERS = "needs DeepSpeed, and is about its files"
SPARSE = "torch has sparse tensors on a CPU and on CUDA alone"
SWAPPED = "a model without its weights is converted: as on no GPU, conversions swap parameters here"
THREAD = "a thread begins on the first device without a default one, as on CUDA, and this one names none"
WATCHDOG = "a wait is the stream's, so the host goes on; on a GPU it is NCCL's watchdog that notices"

HABITS = {
    "a_thread": THREAD,
    "recurrent_layers": FUSED,
    "sparse_gradients": SPARSE,
}

LEFT_OUT = {
    "tests/check/test_wires.py": "FullyShardedDataParallel computes on CUDA, or on a CPU",
    **{
        f"tests/habits/test_habits.py::test_habit[stage3-{mode}-{habit}]": why
        for mode in ("fp32", "bf16")
        for habit, why in HABITS.items()
    },
    "tests/habits/test_scripts.py": COMMANDS,
    "tests/ranks/test_collectives.py::test_operations_overlap_and_may_be_waited_for_in_any_order": CARRIERS,
    "tests/ranks/test_collectives.py::test_every_carrier_brings_every_bit": CARRIERS,
    "tests/ranks/test_collectives.py::test_a_killed_rank_is_an_error_on_the_others": WATCHDOG,
    "tests/ranks/test_collectives.py::test_a_rank_that_hangs_is_an_error_within_the_timeout": WATCHDOG,
    "tests/ranks/test_collectives.py::test_a_killed_rank_is_named_by_all_that_swap_nothing_with_it": WATCHDOG,
    "tests/ranks/test_collectives.py::test_ranks_of_one_host_share_and_talk_to_the_others": CARRIERS,
    "tests/ranks/test_collectives.py::test_a_host_without_memory_left_sends_by_gloo": CARRIERS,
    "tests/ranks/test_collectives.py::test_axes_share_memory_side_by_side": CARRIERS,
    "tests/ranks/test_deepspeed_checkpoints.py": PEERS,
    "tests/ranks/test_dropin.py::test_what_is_held_in_pieces_cannot_be_written_or_become_anothers": SWAPPED,
    "tests/ranks/test_dropin.py::test_masters_take_what_is_loaded": LOADED,
    "tests/ranks/test_dropin.py::test_parameters_without_an_engine": SWAPPED,
    "tests/ranks/test_failures.py::test_what_ends_one_rank_ends_the_others_within_the_timeout[0-": WATCHDOG,
    "tests/ranks/test_failures.py::test_every_rank_says_where_the_others_are": DIFFER,
    "tests/ranks/test_failures.py::test_ranks_that_go_through_units_in_different_orders_are_told[3-": DIFFER,
    "tests/ranks/test_fsdp2.py::test_parameters_are_dtensors_with_the_given_bits": DTENSORS,
    "tests/ranks/test_harness.py": "about the ranks themselves, which are processes of the CPU",
    "tests/ranks/test_host.py": FAKE,
    "tests/ranks/test_own_optimizers.py::test_dtensors_are_whole_to_whoever_looks_at_them": DTENSORS,
    "tests/ranks/test_tensor_parallel.py": DTENSORS,
    "tests/ranks/test_values.py::test_a_context_that_fails_leaves_what_was_there": SWAPPED,
    "tests/ranks/test_values.py::test_copies_are_plain_and_one_engine_follows_another": SWAPPED,
}
"""A file of ranks, or a test of one -> why it does not run on the device."""


def files_of_ranks() -> list[str]:
    """Return the files whose tests run on ranks, without units, commands and those of the device itself."""
    imports = re.compile(r"^from tests\.(ranks|ranks\.harness|habits\.cells) import", re.MULTILINE)
    left = ("device", "e2e", "unit")
    folders = [folder for folder in (ROOT / "tests").iterdir() if folder.name not in left]
    files = sorted(file for folder in folders for file in folder.glob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if imports.search(file.read_text("utf-8"))]


FOUND = files_of_ranks()
FILES = [file for file in FOUND if file not in LEFT_OUT]


def test_what_is_left_out_exists() -> None:
    for file, _, test in (name.partition("::") for name in (*LEFT_OUT, *WITH_LONG)):
        assert file in FOUND, file
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text("utf-8"), (file, test)


def place_of_a_tensor() -> str:
    return str(torch.ones(1).device)


@needs_device
@pytest.mark.long
def test_ranks_are_on_the_device_where_the_option_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    way = functools.partial(instead_of_cpu, order="side streams last")
    monkeypatch.setattr(harness, "instead", [way])
    assert harness.run_ranks(place_of_a_tensor, 2) == [f"{NAME}:0", f"{NAME}:1"]


@needs_device
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("file", FILES)
def test_ranks_do_on_the_device_what_they_do_on_the_cpu(file: str) -> None:
    left_out = [f"--deselect={name}" for name in LEFT_OUT if name.startswith(f"{file}::")]
    command = ["-m", "pytest", file, "-q", "-n", "0", "--timeout", "1200", "--standin", "side streams last"]
    chosen = "not slow and not gpu" if file in WITH_LONG else "not slow and not long and not gpu"
    done = subprocess.run(
        [sys.executable, *command, "-m", chosen, *left_out],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
