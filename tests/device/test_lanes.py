"""A simulated step goes through its streams as a real one on the stand-in device does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.device.build import needs_device
from tests.device.lanes import Lanes, Recorder, simulated
from tests.device.ranks import on_devices
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config
from tests.numerics.test_pipelines import PARTS
from zerodrift.api import initialize
from zerodrift.inspect.simulate import streams
from zerodrift.plan import Plan

pytestmark = needs_device
SLOW = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage, "micro_batches": 2} for stage in range(4)},
    "a unit ahead": {"stage": 3, "sharding": {"prefetch": 1}},
    "all units ahead": {"stage": 3, "sharding": {"prefetch": 1 << 30}},
    "kept for the step": {"stage": 3, "micro_batches": 2, "sharding": {"keep_gathered": "step"}},
    "kept for the backward": {"stage": 3, "sharding": {"keep_gathered": "micro-batch"}},
    "reduced at the end": {"stage": 2, "micro_batches": 2, "precision": {"reduce": {"when": "last"}}},
    "native sums": {"stage": 3, "mode": "fp32", "precision": {"reduce": {"order": "native"}}},
}
LATE = [("zbv", 1), ("zbv", 3), ("dualpipev", 0), ("dualpipev", 3), ("interleaved-zero-bubble", 0)]
for schedule, stage in (("1f1b", 0), ("gpipe", 1), ("1f1b", 3), ("interleaved", 2), *LATE):
    pipeline = {"stages": 2, "schedule": schedule, "micro_batches": 4}
    CASES[f"{schedule}, stage {stage}"] = {"stage": stage, "micro_batches": 4, "pipeline": pipeline}
CASES["replicas"] = {"stage": 2, "micro_batches": 2, "sharding": {"replicate": 2}}
FEW = ["a unit ahead"]
ON_FOUR = [name for name, case in CASES.items() if "pipeline" in case or name == "replicas"]
MANY = [name for name in CASES if name not in ON_FOUR]


def _settings(stage: int, mode: str = "bf16", micro_batches: int = 1, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return config(stage, mode, micro_batches, optimizer=optimizer, **more)


def _step(engine: Any, tokens: list[torch.Tensor], recorder: Recorder) -> None:
    if engine.plan.policy.pipeline is not None:
        with recorder.phase("schedule"):
            engine.accumulate(tokens)
        with recorder.phase("step"):
            engine.step()
        return
    for micro in tokens:
        with recorder.phase("forward"):
            loss = engine(micro)
        with recorder.phase("backward"):
            engine.backward(loss)
        with recorder.phase("step"):
            engine.step()


def _recorded(device: torch.device, names: list[str]) -> list[tuple[Plan, int, Lanes]]:
    """Return the plan, this rank's stage of the pipeline, and the order of its second step."""
    found = []
    for case in map(CASES.__getitem__, names):
        model, parts = GPT(layers=4, tied=False).to(device), PARTS if "pipeline" in case else None
        engine = initialize(model, config=_settings(**case), device=device.type, parts=parts, quiet=True)
        tokens = [batch(0, 0, micro).to(device) for micro in range(case.get("micro_batches", 1))]
        _step(engine, tokens, Recorder(engine))
        recorder = Recorder(engine)  # of the second step: the first one looks at more
        with recorder.recording():
            _step(engine, tokens, recorder)
        found.append((engine.plan, engine.mesh.rank("pipeline"), recorder.lanes()))
        engine.destroy()
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "names"),
    [
        (2, FEW),
        pytest.param(2, MANY, marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
    ids=["few", "many", "on four"],
)
def test_a_simulation_orders_a_step_as_the_device_does(world: int, names: list[str]) -> None:
    ranks = on_devices(_recorded, world, names, timeout=500)
    for found in ranks:
        for name, (plan, stage, lanes) in zip(names, found, strict=True):
            assert {name: simulated(plan)[stage].differences(lanes)} == {name: []}
            assert set(lanes.order.values()) >= {"before", "after"}, "something must be compared"
            assert world == 4 or "beside" in lanes.order.values()
    if "a unit ahead" in names:
        plan, _, lanes = ranks[0][names.index("a unit ahead")]
        _planted_faults_are_found(plan, lanes)


def _planted_faults_are_found(plan: Plan, lanes: Lanes) -> None:
    sharding = replace(plan.policy.sharding, prefetch=1 << 30)
    ahead = replace(plan, policy=replace(plan.policy, sharding=sharding))
    (difference,) = simulated(ahead)[0].differences(lanes)
    assert difference.startswith("transfers: ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "REDUCTIONS", 1)  # no reduction goes on when the next one begins
        differences = simulated(plan)[0].differences(lanes)
    assert differences and all("('reduce', " in each for each in differences)
