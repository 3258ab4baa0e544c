"""`bench/gpu.py` without a GPU: its parts, its report of failed ones, and those that it leaves out."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("gpu")


def python(kit: Any, name: str, code: str, seconds: float = 30, **rest: Any) -> Any:
    return kit.Part(name, [sys.executable, "-c", code], seconds, **rest)


def test_each_way_to_end_is_told_and_none_ends_the_others(kit: Any, tmp_path: Path) -> None:
    listed = [
        python(kit, "good", "print('= 3 passed in 1 s =')"),
        python(kit, "bad", "raise SystemExit('no such kernel')"),
        python(kit, "full", "raise RuntimeError('CUDA out of memory')"),
        python(kit, "hangs", "import time; time.sleep(60)", seconds=0.5),
        python(kit, "idle", "print('= 3 skipped in 1 s =')", says=" passed"),
        python(kit, "large", "print('never')", gigabytes=100),
        python(kit, "quiet", "pass"),
    ]
    done = kit.run_all(listed, tmp_path, 100, memory=80, say=lambda line: None)
    assert {part.name: part.outcome for part in done} == {
        "good": "ok, 3 passed in 1 s",
        "bad": "failed: no such kernel",
        "full": "failed: out of memory",
        "hangs": "failed: not done in its time",
        "idle": "failed: nothing passed",
        "large": "left out: needs 100 GB, 80 are free",
        "quiet": "ok",
    }
    assert [part.name for part in done if part.failed] == ["bad", "full", "hangs", "idle"]
    (late,) = kit.run_all([python(kit, "late", "pass")], tmp_path, 0, memory=80, say=lambda line: None)
    assert late.outcome == "left out: no time left" and not late.failed


def test_8b_has_the_parameters_of_llama(kit: Any) -> None:
    torch = importlib.import_module("torch")
    llama = importlib.import_module("llama")
    with torch.device("meta"):
        model = llama.Llama(llama.SHAPES["8B"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    each = llama.SHAPES["8B"].floating_operations(model)
    assert each == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 4096
