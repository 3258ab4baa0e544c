"""The engine's promises under CUDA: the same bodies as on the CPU, on one device and on all there are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, same, train
from zerodrift.api import initialize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def run(stage: int, mode: str, steps: int = 10, **rest: Any) -> Run:
    engine = initialize(GPT(moe=True).cuda(), config=config(stage, mode, **rest), device="cuda", quiet=True)
    done = train(engine, steps, data=lambda *place: _batch(*place))
    engine.destroy()
    return done


def _batch(step: int, rank: int, micro: int) -> torch.Tensor:
    from tests.numerics.networks import batch

    return batch(step, rank, micro).cuda()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "autocast-bf16"])
def test_all_stages_are_the_same_bits_on_one_device(mode: str) -> None:
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        assert same([run(stage, mode) for stage in range(4)]) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_muon_and_its_statistics_are_the_same_at_every_stage() -> None:
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    rest = {
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}},
        "precision": {"statistics": True},
    }
    try:
        runs, reports = [], []
        for stage in range(4):
            settings = config(stage, "bf16", **rest)
            engine = initialize(GPT(moe=True).cuda(), config=settings, device="cuda", quiet=True)
            runs.append(train(engine, 10, data=_batch))
            reports.append(engine.update_statistics())
            engine.destroy()
        assert same(runs) == [] and all(report == reports[0] for report in reports)
        assert reports[0].line("layers.0.attention.qkv.weight").moved
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_offload_changes_no_bit(mode: str, stage: int) -> None:
    """The programs of the device and the kernels of the host agree, whatever is copied when."""
    pytest.importorskip("triton")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    torch.use_deterministic_algorithms(True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        assert same([run(stage, mode), run(stage, mode, zero_optimization=zero)]) == []
    finally:
        torch.use_deterministic_algorithms(False)


def test_gathered_memory_comes_back() -> None:
    engine = initialize(
        GPT(layers=8, width=256).cuda(), config=config(3, "autocast-bf16"), device="cuda", quiet=True
    )
    train(engine, 2, data=_batch)
    before = torch.cuda.memory_allocated()
    train(engine, 2, data=_batch)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    engine.destroy()


def waits_in(run: Callable[[], object]) -> list[str]:
    """What makes the host wait for the device, as torch notices."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in said if "synchroniz" in str(each.message)]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "autocast-bf16"])
def test_a_step_waits_for_the_device_once(mode: str, stage: int) -> None:
    """For the norm, as `tests/ranks/test_waits.py` counts it with a CPU in the device's place."""
    pytest.importorskip("triton")
    settings = config(stage, mode, 2, gradient_clipping=1.0)
    engine = initialize(GPT().cuda(), config=settings, device="cuda", quiet=True)
    train(engine, 5, 2, data=_batch)
    tokens = [_batch(5, 0, micro) for micro in range(2)]

    def step() -> None:
        for micro in tokens:
            engine.backward(engine(micro))
            engine.step()

    waits = waits_in(step)
    assert len(waits) == 1, waits
    engine.destroy()


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "autocast-bf16"])
def test_fully_shard_on_one_device(mode: str) -> None:
    """torch's fused update on CUDA rounds otherwise than ours, so a tolerance, not bits."""
    native, fsdp2 = (
        run(3, mode, backend=backend, precision={"storage": "fp32"}) for backend in ("native", "fsdp2")
    )
    assert fsdp2.losses[0] == native.losses[0]
    assert fsdp2.losses == pytest.approx(native.losses, rel=1e-4 if mode == "fp32" else 2e-2)
