"""`bench/gpu.py` without a GPU: what it runs, what it says of parts that fail, and what it leaves out."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
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


def test_every_size_is_measured_for_every_engine(kit: Any, tmp_path: Path) -> None:
    listed = kit.parts(tmp_path, 4, stub=False)
    names = [part.name for part in listed]
    assert names[:2] == ["tests", "update"] and len(names) == len(set(names))
    assert {f"step-{size}-{engine}" for size in ("0.1B", "1B", "3B") for engine in kit.ENGINES} < set(names)
    assert "--nproc-per-node=4" in listed[2].command
    steps = importlib.import_module("gpu_step")
    for part in listed[2:]:
        words = list(part.command)
        assert words[words.index("--engine") + 1] in steps.ENGINES
        assert words[words.index("--size") + 1] in steps.SHAPES


def test_8b_has_the_parameters_of_llama(kit: Any) -> None:
    torch = importlib.import_module("torch")
    llama = importlib.import_module("llama")
    with torch.device("meta"):
        model = llama.Llama(llama.SHAPES["8B"])
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    each = llama.SHAPES["8B"].floating_operations(model)
    assert each == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 4096 * 4096


def test_the_summary_has_steps_and_shares_of_a_copy(kit: Any, tmp_path: Path) -> None:
    step = {"size": "1B", "engine": "zerodrift", "parameters": 10**9, "compiled": True, "ms": 250.0}
    step |= {"tokens_per_second": 16384.0, "mfu": 0.41, "allocated": 21.5e9}
    (tmp_path / "step-1B-zerodrift.json").write_text(json.dumps(step))
    options = argparse.Namespace(beside="nothing")
    update = kit.Result.begin("update", options)
    table = update.table({"step": "", "GB/s": ".1f", "x copy_": ".2f", "of chain": ".2f"})
    table.row("split, fp32 state, fp32 grad", 4100.0, 0.93, 0.4)
    table.row("reference: split in plain PyTorch", 410.0, 0.1, 0.4)
    update.save(str(tmp_path / "update"))
    result = kit.Result.begin("all", options)
    kit.summary(result, tmp_path)
    steps, shares = result.tables
    assert [steps.texts(row) for row in steps.rows] == [
        ["1B", "zerodrift, compiled", "250.0", "16,384", "41.0%", "21.5"]
    ]
    assert shares.rows == [["split, fp32 state, fp32 grad", 4100.0, 0.93]]


@pytest.mark.long
def test_without_a_gpu_it_says_what_to_do() -> None:
    torch = importlib.import_module("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True)
    assert done.returncode == 1 and "--stub" in done.stderr and "built for CPUs alone" in done.stderr


def test_with_one_gpu_the_tests_of_two_are_left_out_by_name(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.gpu import test_nccl

    monkeypatch.setattr(test_nccl, "COUNT", 1)
    (one,), (two,) = (test_nccl.on_so_many(world).marks for world in (1, 2))
    assert not one.args[0] and two.args[0] and two.kwargs["reason"] == "needs 2 GPUs; this machine has 1"
    line = f"3 tests/gpu/test_nccl.py::test_all_stages_are_the_same_bits: {two.kwargs['reason']}"
    (tmp_path / "tests.log").write_text(f"....\n=== skipped ===\n{line}\n4 passed, 3 skipped in 9.00s\n")
    result = kit.Result.begin("all", argparse.Namespace(beside="nothing"))
    kit.skipped(result, tmp_path)
    assert result.tables[0].rows == [[line]]
