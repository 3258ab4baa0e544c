"""`offload_optimizer.device: cpu` on a CPU: planned, shown, and the same bits as without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, make, train
from tests.ranks.harness import run_ranks


def run(stage: int, device: str, rest: dict[str, Any]) -> Run:
    zero = {"stage": stage, "offload_optimizer": {"device": device, "pin_memory": True}}
    engine = make(config(stage, "bf16", 2, zero_optimization=zero, **rest), GPT(moe=True))
    found = train(engine, 3, 2)
    assert engine.plan.policy.sharding.offload == (device == "cpu")
    told = [decision.value for decision in engine.plan.policy.decisions if decision.key == "offload"]
    assert told == (["master and state"] if device == "cpu" else [])
    engine.destroy()
    return found


def differences(stage: int, rest: dict[str, Any]) -> list[str]:
    """On one rank: what offload changes."""
    return run(stage, "none", rest).differs(run(stage, "cpu", rest))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    "rest", [{}, {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}], ids=["adamw", "muon"]
)
def test_offload_on_a_cpu_changes_no_bit(stage: int, rest: dict[str, Any]) -> None:
    for found in run_ranks(differences, 2, stage, rest):
        assert found == []
