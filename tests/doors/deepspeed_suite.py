"""A pytest plugin that runs DeepSpeed's unit tests on CPU ranks, each test in forked processes of its own.

    cd DeepSpeed/tests && zerodrift run -- python -m pytest -p deepspeed_suite --outcomes FILE unit/...

Without `zerodrift run` the same tests run on DeepSpeed. The tests' assertions are not changed. Ranks on
CPUs count as ranks, the CPU counts as a device that has bf16 and fp16, which torch has there, and an error
on one rank ends the test. FILE gets one JSON line a test.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

LIMIT = float(os.environ.get("DOORS_LIMIT", "60"))
"""Time limit of one test."""
GRACE = 5.0
"""Seconds in which the other ranks may fail too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


def pytest_sessionstart() -> None:
    """Tell the harness what a CPU can do, and let DeepSpeed compile its optimizers before the tests."""
    importlib.import_module("unit.util").bf16_required_version_check = lambda *_, **__: True
    importlib.import_module("unit.common").reduce_boolean_flags = _on_all_ranks
    _without_devices(importlib.import_module("torch.nn.parallel").DistributedDataParallel)
    accelerator = count_cpu_as_device()
    make = getattr(accelerator, "create_op_builder", None)
    for name in ("FusedAdamBuilder", "CPUAdamBuilder") if make is not None else ():
        make(name).load()


def _on_all_ranks(flag: bool, op: Callable[[list[bool]], bool] = all) -> bool:
    """Gather a flag of all ranks, in place of the harness's scalar tensor, which gloo refuses."""
    flags: list[Any] = [flag] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(flags, flag)
    return op(flags)


def count_cpu_as_device() -> Any:
    """Let DeepSpeed take fp16 on a CPU, and return its accelerator."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    type(accelerator).is_fp16_supported = lambda self: True
    return accelerator


def _without_devices(ddp: Any) -> None:
    """Let a comparison with torch's DDP name the devices of GPU ranks."""
    make = ddp.__init__

    def init(self: Any, module: Any, *args: Any, **options: Any) -> None:
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        make(self, module, *args, **options)

    ddp.__init__ = init


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace the harness's start of ranks."""
    harness = sys.modules.get("unit.common")
    if harness is not None:
        harness.DistributedExec._launch_procs = _launch  # type: ignore[attr-defined]


class Outcomes:
    """A file with a line for each test, and for each file that cannot be collected."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report, report.when)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._write(report, "collect")

    def _write(self, report: Any, when: str) -> None:
        crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        lines = [line for line in text.splitlines() if line.startswith("E ") and "Error" in line]
        why = " ".join((crash or (lines[-1][1:] if lines else text[-300:])).split())[:400]
        told = {"test": report.nodeid, "when": when, "outcome": report.outcome, "why": why}
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")


def _launch(self: Any, count: int, init_method: str) -> None:
    """Run a test on forked ranks, as `DistributedExec._launch_procs`."""
    self.reuse_dist_env = self.non_daemonic_procs = False
    port = sys.modules["unit.common"].get_master_port()
    in_processes(count, lambda rank: self._dist_run(rank, count, port, init_method))


def in_processes(count: int, run: Callable[[int], Any]) -> None:
    """Call `run` with the rank in each of `count` forked processes, and fail or skip as the first that does.

    What `run` returns is the reason of a skip. Processes that these start end with them.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(count):
            pid = os.fork()
            if not pid:
                os.setsid()
                _be_rank(run, rank, Path(folder) / f"{rank}.json")
            ranks[pid] = rank
        until = time.monotonic() + LIMIT
        alive, codes, failing = dict(ranks), {}, False
        try:
            while alive and time.monotonic() < until:
                for pid in list(alive):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
                if any(codes.values()) and not failing:
                    failing, until = True, min(until, time.monotonic() + GRACE)
                time.sleep(0.01)
        finally:
            for kind in (signal.SIGTERM, signal.SIGKILL):  # a launcher ends its workers at the first
                for pid in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, kind)
                time.sleep(GRACE if alive and kind is signal.SIGTERM else 0)
            for pid in alive:
                os.waitpid(pid, 0)
        told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    for one in sorted(told, key=lambda one: float(one["time"])):
        if one["kind"] == "skip":
            pytest.skip(one["said"])
        pytest.fail(f"{one['said']}\n{one['trace']}", pytrace=False)
    if alive or any(codes.values()):
        pytest.fail(f"ranks {sorted(alive.values())} did not end; exit codes {codes}", pytrace=False)


def _be_rank(run: Callable[[int], Any], rank: int, file: Path) -> None:
    """Be one rank, until the process ends."""
    code = 1
    try:
        skipped = run(rank)
        if skipped:
            file.write_text(json.dumps({"time": time.time(), "kind": "skip", "said": skipped, "trace": ""}))
        code = 0
    except BaseException as error:
        kind = "skip" if isinstance(error, pytest.skip.Exception) else "fail"
        said = f"{type(error).__name__}: {error}"
        told = {"time": time.time(), "kind": kind, "said": said, "trace": traceback.format_exc()[-3000:]}
        file.write_text(json.dumps(told))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
