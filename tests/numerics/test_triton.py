"""The Triton programs without a GPU: run in Triton's interpreter, and compiled for absent GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.numerics.test_fused import NUMEL, assert_equal, gradient_of, make, step_of
from zerodrift import optimizers
from zerodrift.dtypes import DType
from zerodrift.kernels import device, native
from zerodrift.optim import fused
from zerodrift.optim.schemes import Scheme
from zerodrift.policy.decisions import Master, State

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed on this machine"
)


def python(*arguments: str, **variables: str) -> str:
    """Return the output of a new Python, because Triton decides on its import whether it interprets."""
    known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**known, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_triton
@pytest.mark.long
def test_programs_equal_the_cpu_kernels_in_the_interpreter() -> None:
    said = python(
        *("-m", "pytest", "-q", "-m", "not slow", "tests/gpu/test_programs.py", "-p", "no:cacheprovider"),
        TRITON_INTERPRET="1",
    )
    counts = re.search(r"(\d+) passed", said)
    assert counts is not None and int(counts[1]) > 25 and "skipped" not in said, said


@needs_triton
@pytest.mark.parametrize(
    ("capability", "every"), [(80, 9), (90, 3), (100, 9), pytest.param(90, 1, marks=pytest.mark.slow)]
)
def test_nothing_is_contracted_or_flushed_in_what_is_compiled(capability: int, every: int) -> None:
    """Instructions per thread of eight elements: as many fused products as the source has, and whole
    roots. A third of the programs is compiled for one kind of GPU, some of every kind for the others, and
    all of them in a slow cell."""
    told = json.loads(python("-m", "tests.numerics.compile_programs", str(capability), str(every)))
    assert told["options"]["enable_fp_fusion"] is False
    for case, words in told["passes"].items():
        algorithm, _, state = (int(number) for number in case.split())
        floats = {word: count for word, count in words.items() if word.endswith((".f32", ".f32x2"))}
        assert not any(".ftz" in word or "approx" in word for word in floats), (case, floats)
        fused_products = 3 if algorithm == 0 else 4
        written = words.get("fma.rn.f32", 0) + 2 * words.get("fma.rn.f32x2", 0)  # sm_100 has pairs
        assert written == 8 * fused_products, (case, floats)
        if algorithm == 0:
            assert words["sqrt.rn.f32"] == 8 and words["div.rn.f32"] >= 16, (case, floats)
        if state == 0:
            assert any(word.startswith("ld.global.v4") for word in words), (case, words)
    for case, words in told["runs"].items():
        assert not any(".ftz" in word or "approx" in word or "fma" in word for word in words), (case, words)
        assert ("div.rn.f32" in words) == case.endswith((" 0", " drawn")), (case, words)
    for case, words in told["trees"].items():
        count, each = int(case.split()[2]), 2  # elements a thread
        kept = ("ld.global", "ld.shared", "bar.sync", "fma")
        found = {word: words[word] for word in words if word.startswith(kept)}
        assert [*found.values()] == [each * count], f"{case}: parts are read once, and nothing else; {found}"


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Clear the cache of devices before a test and after it."""

    def forget() -> None:
        device.obstacle.cache_clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


def test_without_triton_the_reference_runs(forgetful: pytest.MonkeyPatch) -> None:
    """A CPU plays a device without compiled kernels, whose first program cannot run."""
    forgetful.setattr(native, "library", lambda: None)
    forgetful.setattr(device, "works", lambda where: device.obstacle(where) is None)
    forgetful.setattr(importlib.util, "find_spec", lambda name: None)
    scheme = Scheme(DType.BF16, Master.SPLIT, State.FP32)
    one, other = make(scheme), make(scheme)
    gradient, step = gradient_of(NUMEL, 1), step_of(optimizers.ADAMW, 1)
    for _ in range(2):
        fused.update(scheme, one, gradient, step)
    assert device.obstacle(torch.device("cpu")) == "Triton is not installed"
    forgetful.undo()
    for _ in range(2):
        fused.update(scheme, other, gradient, step)
    assert_equal(one, other)


def test_a_first_program_that_fails_is_tried_once(forgetful: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no compiler\nand more"))
    forgetful.setattr(importlib.util, "find_spec", lambda name: object())
    forgetful.setattr(device, "squares", broken)
    for _ in range(2):
        why = device.obstacle(torch.device("cpu"))
        assert why == "a first Triton program failed (RuntimeError: no compiler)"
    broken.assert_called_once()


def test_a_cpu_is_never_asked() -> None:
    assert not device.works(torch.device("cpu"))
