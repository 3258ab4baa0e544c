"""The engine's promises on an accelerator: the same bodies as on the CPU, on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.device import DEVICE, IS_STANDIN, STEPS, deterministic, needs_accelerator, waits_in
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, same, train
from zerodrift.api import initialize

pytestmark = needs_accelerator


def make(stage: int, mode: str, model: GPT | None = None, *rest: Any, **keys: Any) -> Any:
    settings = config(stage, mode, *rest, **keys)
    model = GPT(moe=True) if model is None else model
    return initialize(model.to(DEVICE), config=settings, device=DEVICE.type, quiet=True)


def run(stage: int, mode: str, **keys: Any) -> Run:
    engine = make(stage, mode, **keys)
    done = train(engine, STEPS, data=_batch)
    engine.destroy()
    return done


def _batch(step: int, rank: int, micro: int) -> torch.Tensor:
    return batch(step, rank, micro).to(DEVICE)


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 3e-3}}}
MODES = ["fp32", "bf16", "fp16", "autocast-bf16"]


@pytest.mark.parametrize(("mode", "rest"), [*((mode, {}) for mode in MODES), ("bf16", MUON)])
def test_all_stages_are_the_same_bits_on_one_device(mode: str, rest: dict[str, Any]) -> None:
    with deterministic():
        assert same([run(stage, mode, **rest) for stage in range(4)]) == []


@pytest.mark.cells(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_offload_changes_no_bit(mode: str, stage: int) -> None:
    """The programs of the device and the kernels of the host agree, whenever copies happen."""
    pytest.importorskip("triton")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with deterministic():
        assert same([run(stage, mode), run(stage, mode, zero_optimization=zero)]) == []


def test_gathered_memory_comes_back() -> None:
    width = 64 if IS_STANDIN else 256
    engine = make(3, "autocast-bf16", GPT(layers=8, width=width))
    train(engine, 2, data=_batch)
    before = torch.accelerator.memory_allocated()
    train(engine, 2, data=_batch)
    assert torch.accelerator.memory_allocated() <= before + (width << 12), "a third of a gathered model"
    engine.destroy()


@pytest.mark.cells(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_for_the_device_once(mode: str, stage: int) -> None:
    """The one wait is for the norm, as in `tests/device/test_counts.py`."""
    pytest.importorskip("triton")
    engine = make(stage, mode, GPT(), 2, gradient_clipping=1.0)
    train(engine, 5, 2, data=_batch)
    tokens = [_batch(5, 0, micro) for micro in range(2)]

    def step() -> None:
        for micro in tokens:
            engine.backward(engine(micro))
            engine.step()

    waits = waits_in(step)
    assert len(waits) == 1, waits
    engine.destroy()


@pytest.mark.parametrize("mode", MODES)
def test_fully_shard_on_one_device(mode: str) -> None:
    """torch's fused update on a GPU rounds otherwise than ours, so a tolerance, not bits."""
    native, fsdp2 = (
        run(3, mode, backend=backend, precision={"storage": "fp32"}) for backend in ("native", "fsdp2")
    )
    assert fsdp2.losses[0] == native.losses[0]
    assert fsdp2.losses == pytest.approx(native.losses, rel=1e-4 if mode == "fp32" else 2e-2)
