"""The Triton programs without a GPU: run in Triton's interpreter, and compiled for absent GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from zerodrift.kernels import device

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


ALIKE = ("[mxfp4]", "[int4-128]", "[e5m2-128]", "[nf4-64-bf16]", "nothing[adam]", "nothing[sgd]")
"""Cells that the interpreter leaves to a GPU: their element, scale and rule are in others."""


@needs_triton
@pytest.mark.long
def test_programs_equal_the_cpu_kernels_in_the_interpreter() -> None:
    said = python(
        *("-m", "pytest", "-q", "-m", "not slow", "tests/gpu/test_programs.py", "-p", "no:cacheprovider"),
        *("-k", f"not ({' or '.join(ALIKE)})"),
        TRITON_INTERPRET="1",
    )
    counts = re.search(r"(\d+) passed", said)
    assert counts is not None and int(counts[1]) > 25 and "skipped" not in said, said


@needs_triton
@pytest.mark.parametrize(
    ("capability", "every"),
    [(90, 9), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((80, 3), (90, 1), (100, 3)))],
)
def test_nothing_is_contracted_or_flushed_in_what_is_compiled(capability: int, every: int) -> None:
    """Instructions per thread of eight elements: as many fused products as the source has, and whole
    roots."""
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
        assert ("div.rn.f32" in words) == case.endswith(" 0"), (case, words)


def test_a_first_program_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Mock(side_effect=RuntimeError("no compiler\nand more"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(device, "squares", broken)
    device.obstacle.cache_clear()
    for _ in range(2):
        why = device.obstacle(torch.device("cpu"))
        assert why == "a first Triton program failed (RuntimeError: no compiler)"
    device.obstacle.cache_clear()
    broken.assert_called_once()
