"""A pytest plugin that runs DeepSpeed's unit tests on CPU ranks, each test in forked processes of its own.

    cd DeepSpeed/tests && zerodrift run -- python -m pytest -p deepspeed_suite --outcomes FILE unit/...

Without `zerodrift run` the same tests run on DeepSpeed. What the tests ask is not changed. Ranks on CPUs
count as ranks, and an error on one rank ends the test. FILE gets one JSON line a test.
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
from pathlib import Path
from typing import Any

import pytest

LIMIT = float(os.environ.get("DOORS_LIMIT", "60"))
"""Seconds of one test."""
GRACE = 5.0
"""Seconds that other ranks have to fail too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


def pytest_sessionstart() -> None:
    """Let DeepSpeed compile its optimizers while no test waits for them."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    make = getattr(accelerator, "create_op_builder", None)
    for name in ("FusedAdamBuilder", "CPUAdamBuilder") if make is not None else ():
        make(name).load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace how DeepSpeed's harness starts ranks."""
    harness = sys.modules.get("unit.common")
    if harness is not None:
        harness.DistributedExec._launch_procs = _launch  # type: ignore[attr-defined]


class Outcomes:
    """Writes a line for each test, and for each file that cannot be collected."""

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
    self.reuse_dist_env = False
    port = sys.modules["unit.common"].get_master_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = {}
        for rank in range(count):
            pid = os.fork()
            if not pid:
                os.setsid()
                _be_rank(self, rank, count, port, init_method, Path(folder) / f"{rank}.json")
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
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                if pid in alive:
                    os.waitpid(pid, 0)
        told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    for one in sorted(told, key=lambda one: float(one["time"])):
        if one["kind"] == "skip":
            pytest.skip(one["said"])
        pytest.fail(f"{one['said']}\n{one['trace']}", pytrace=False)
    if alive or any(codes.values()):
        pytest.fail(f"ranks {sorted(alive.values())} did not end; exit codes {codes}", pytrace=False)


def _be_rank(self: Any, rank: int, count: int, port: str, init_method: str, file: Path) -> None:
    """Be one rank, until the process ends."""
    code = 1
    try:
        self.non_daemonic_procs = False
        skipped = self._dist_run(rank, count, port, init_method)
        if skipped:
            file.write_text(json.dumps({"time": time.time(), "kind": "skip", "said": skipped, "trace": ""}))
        code = 0
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        told = {"time": time.time(), "kind": "fail", "said": said, "trace": traceback.format_exc()[-3000:]}
        file.write_text(json.dumps(told))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
