"""A run of DeepSpeed is converted and resumed here with the losses of its continuation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift as zd
from tests.numerics.networks import batch
from tests.ranks.harness import run_ranks
from tests.ranks.saved_by_deepspeed import BETAS, EPS, LR, STEPS, Case, Truth, groups, model, save
from zerodrift.api import initialize
from zerodrift.errors import CheckpointError
from zerodrift.weights.converter import ConvertOptions, convert

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)

MORE = 4
CASES = [Case(2, "fp32"), Case(3, "fp32"), Case(1, "bf16"), Case(0, "fp32", hard=False)]

TOLERANCE = 2e-6
"""Tolerance of a loss of about 4 in fp32. Gradients are the same sums in another order, the norm is exact
here and a float there, and Adam is another sequence of roundings: a few ulps (2^-22 at 4) per step."""


def save_all(root: str) -> list[Truth]:
    return [save(case, f"{root}/{number}", after=MORE) for number, case in enumerate(CASES)]


def go_on(root: str, number: int, stage: int) -> tuple[list[float], int, Any]:
    """Resume the converted checkpoint and train on."""
    case = CASES[number]
    made = model(case)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()  # what is not loaded would be seen
    optimizer = torch.optim.AdamW(groups(made, case), lr=LR, betas=BETAS, eps=EPS)
    config = {
        "precision": {"mode": case.dtype},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0 if case.hard else 0.0,
    }
    engine = initialize(made, optimizer, config, device="cpu", quiet=True)
    loaded = zd.Checkpoints(engine, f"{root}/{number}-ours", quiet=True).load()
    losses = []
    for step in range(STEPS, STEPS + MORE):
        loss = engine(batch(step, engine.mesh.rank()))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    found = losses, loaded.step, loaded.client
    engine.destroy()
    return found


def test_losses_go_on_as_deepspeeds_do(tmp_path: Path) -> None:
    truths = run_ranks(save_all, 2, str(tmp_path), timeout=120)
    for number, case in enumerate(CASES):
        done = convert(tmp_path / str(number), tmp_path / f"{number}-ours")
        assert not any("moments begin at zero" in note for note in done.notes)
        for stage in (1, 3) if number == 0 else (case.stage,):
            found = run_ranks(go_on, 2, str(tmp_path), number, stage, timeout=60)
            for rank, (losses, step, client) in enumerate(found):
                assert step == STEPS and client == {"epoch": 7, "note": "hello"}
                expected = truths[rank][number].losses
                tolerance = TOLERANCE if case.dtype == "fp32" else 0.05
                assert losses == pytest.approx(expected, abs=tolerance), (case.name, stage)
                assert losses[-1] != losses[0]


def test_without_moments_it_is_said_and_refused_until_allowed(tmp_path: Path) -> None:
    run_ranks(save, 2, Case(0, "fp32"), str(tmp_path / "ds"), timeout=90)
    done = convert(tmp_path / "ds", tmp_path / "ours")
    assert any("allow=('optimizer',)" in note for note in done.notes)
    engine = initialize(model(CASES[0]), None, CONFIG, device="cpu", quiet=True)
    checkpoints = zd.Checkpoints(engine, tmp_path / "ours", quiet=True)
    with pytest.raises(CheckpointError, match="optimizer"):
        checkpoints.load()
    assert checkpoints.load(allow=("optimizer",)).step == STEPS
    engine.destroy()


CONFIG = {"precision": {"mode": "fp32"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_an_optimizer_by_name(tmp_path: Path) -> None:
    run_ranks(save, 2, Case(1, "fp32"), str(tmp_path / "ds"), timeout=90)
    convert(tmp_path / "ds", tmp_path / "ours", ConvertOptions(optimizer="Adam"))
    engine = initialize(model(CASES[0]), None, CONFIG, device="cpu", quiet=True)
    with pytest.raises(CheckpointError, match="must be adam, as when it was saved; got adamw"):
        zd.Checkpoints(engine, tmp_path / "ours", quiet=True).load()
    engine.destroy()
