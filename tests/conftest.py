"""Hooks and fixtures for every test: one thread, no leaked processes, quick or slow, skipped tests."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import chosen

# Little of what imports and collection make is garbage; the collector would look through it again and again.
gc.disable()

# Before torch is imported, here and in what tests start: threads of tests beside each other wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("COLUMNS", None)  # else the width of every report

# gloo's threads spin while the thread that holds their connection does not run. One that is woken pushes it
# aside, and then waits for it in vain: not among processes of this policy, which all that tests start have.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

SHARE_RANKS = ("device", "e2e", "habits", "numerics", "models", "ranks")
"""Folders whose tests share ranks."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: small tensors gain nothing from more, and torch's fused AdamW rounds the end of each
    thread's part in another way."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip folders without quick tests, because importing their files takes seconds in every process."""
    return True if config.option.markexpr == "quick" and not chosen.has_quick(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` is asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    chosen.mark(items)


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ["at once", "side streams first", "side streams last", "random"]
    text = "the order of streams in which ranks run on tests/device's stand-in for a GPU, instead of the CPU"
    parser.addoption("--standin", choices=choices, help=text)
    parser.addoption("--wheel", metavar="FILE", help="the wheel that tests/e2e/test_wheel.py tries")


PEERS = {"deepspeed": "DeepSpeed", "lightning": "Lightning", "trl": "TRL", "verl": "verl", "wandb": "wandb"}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped, and the command that runs it."""
    peers: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        names = [name for word, name in PEERS.items() if re.search(rf"\b{word}\b", reason, re.IGNORECASE)]
        if names:
            peers[names[0]] += 1
        else:
            others[f"{report.nodeid.partition('[')[0]}: {reason}"] += 1
    if peers or others:
        terminalreporter.section("skipped")
    if peers:
        counted = ", ".join(f"{count} {name}" for name, count in peers.most_common())
        terminalreporter.write_line(f"needs a package that is not in the lock ({counted}): make peers")
    for reason, count in others.most_common():
        terminalreporter.write_line(f"{count} {reason}")
    if "not gpu" in (terminalreporter.config.option.markexpr or ""):
        terminalreporter.write_line("tests/gpu, which needs an NVIDIA GPU, was left out: make gpu")


def pytest_collection_finish() -> None:
    """Freeze imports and tests for the garbage collector, which they outlive."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def leaves_nothing_running() -> Iterator[None]:
    """Fail a test that leaves processes or groups behind, which would break another one."""
    yield
    harness = sys.modules.get("tests.ranks.harness")
    kept = harness.kept_processes() if harness is not None else set()
    children = [child for child in multiprocessing.active_children() if child not in kept]
    for child in children:
        child.kill()
        child.join()
    assert not children, f"processes left running: {children}"
    # Tests of the pure rooms run without torch: ask only where somebody has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a default process group was left initialised")


@pytest.fixture(scope="session", autouse=True)
def ranks_on_the_standin(request: pytest.FixtureRequest) -> Iterator[None]:
    if (order := request.config.option.standin) is None:
        yield
        return
    from tests.device.ranks import instead_of_cpu
    from tests.ranks import harness

    harness.instead.append(functools.partial(instead_of_cpu, order=order))
    yield
    harness.instead.pop()


@pytest.fixture(scope="module", autouse=True)
def kept_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Share ranks between the tests of one file, except those that break processes on purpose."""
    if request.path.parent.name not in SHARE_RANKS or request.node.get_closest_marker("fresh_ranks"):
        yield
        return
    from tests.ranks import harness

    with harness.kept_ranks():
        yield
