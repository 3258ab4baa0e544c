"""A pytest plugin that runs tests of accelerate and TRL on CPU ranks, without the hub.

    cd CHECKOUT && zerodrift run -- python -m pytest -p hub_suite --outcomes FILE tests/deepspeed

Without `zerodrift run` the same tests run on DeepSpeed. The tests' assertions are not changed. Tests that
need GPUs get CPUs, which count as devices that have bf16 and fp16; models and data are the folders of
`hub_folders.py`. A test runs in a forked process. TRL's scripts are those of the package that is
installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed_suite
import pytest
from deepspeed_suite import pytest_addoption, pytest_configure  # noqa: F401 (hooks)

ANYWHERE = ("require_non_cpu", "require_multi_device")
"""Decorators of accelerate's tests that ask for GPUs."""
SEVERAL = "test requires multiple accelerators"
"""The reason of TRL's mark for several GPUs."""
TRAINER_ON_CPU = ["--use_cpu", "--report_to", "none"]
deepspeed_suite.LIMIT = 300.0  # a command imports for a minute


def free_port() -> str:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return str(asked.getsockname()[1])


def pytest_sessionstart() -> None:
    deepspeed_suite.count_cpu_as_device()
    for name in ANYWHERE:
        setattr(importlib.import_module("accelerate.test_utils.testing"), name, lambda test: test)
    if importlib.util.find_spec("trl") is not None:  # of which the tests may be of another version
        importlib.import_module("trl.import_utils").__getattr__ = _package_is_missing


def _package_is_missing(name: str) -> Any:
    if not name.endswith("_available"):
        raise AttributeError(name)
    return lambda: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove TRL's mark for several GPUs, and let its commands train on CPUs."""
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if mark.kwargs.get("reason") != SEVERAL]
        module = getattr(item, "module", None)
        if hasattr(module, "run_command"):
            module.run_command = _run_on_cpu  # type: ignore[union-attr]


def _of_package(word: str) -> str:
    """Return the path of TRL's script, and any other word as it is."""
    if not word.startswith("trl/scripts/"):
        return word
    return str(Path(importlib.import_module("trl").__file__ or "").parents[1] / word)


def _run_on_cpu(command: list[str], env: dict[str, str]) -> None:
    """Stand in for TRL's `run_command`, and raise the last error that the command printed."""
    launch, rest = command[:2], [_of_package(str(word)) for word in command[2:]]
    asked = [*launch, "--main_process_port", free_port(), *rest, *TRAINER_ON_CPU]
    done = subprocess.run([str(word) for word in asked], env=env, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("[rank0]") and "Error: " in line]
    assert done.returncode == 0, errors[-1] if errors else done.returncode


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    """Run the test in a forked process, whose group is ended with it."""
    call = item.runtest

    def run(rank: int) -> None:
        call()
        for error in getattr(item, "_excinfo", None) or ():  # of a unittest
            raise error.value

    item.runtest = lambda: deepspeed_suite.in_processes(1, run)
