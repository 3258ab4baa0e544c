"""The schedules of a `scheduler` block follow their formulas, and an installed DeepSpeed step for step."""

from __future__ import annotations

import importlib.util
import json
import operator
import re
from typing import Any

import pytest
import torch

from zerodrift.api import make_plan
from zerodrift.deepspeed.runtime import lr_schedules
from zerodrift.errors import ConfigError
from zerodrift.optim import schedules as mine
from zerodrift.policy.decisions import ComponentSpec

CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
FALLING = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1}
STAIRS = {"cycle_first_step_size": 4, "cycle_second_step_size": 8, "cycle_first_stair_count": 2}
RANGE = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 4, "lr_range_test_staircase": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_min_lr": [0.01, 0.02], "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupDecayLR", {"total_num_steps": 20, "warmup_min_lr": 0.01, "warmup_num_steps": 4}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5, "warmup_min_ratio": 0.1}),
    ("LRRangeTest", {"lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", RANGE),
    ("OneCycle", {**CYCLE, "cycle_first_step_size": 6}),
    ("OneCycle", {**CYCLE, **STAIRS, **FALLING}),
]
READ = {
    "WarmupLR": "warmup_num_steps warmup_type min_lrs max_lrs delta_lrs inverse_log_warm_up",
    "WarmupDecayLR": "warmup_num_steps warmup_type total_num_steps min_lrs max_lrs",
    "WarmupCosineLR": "warmup_num_steps warmup_type total_num_steps cos_min_ratio warmup_min_ratio",
    "OneCycle": "step_ratio total_size first_step_size second_step_size min_lrs max_lrs",
    "LRRangeTest": "step_size step_rate staircase min_lr",
}
"""Schedule -> attributes that scripts read."""


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.05, 0.1))


def run(module: Any, kind: str, params: dict[str, Any], steps: int = 30, tensors: bool = False) -> list[Any]:
    """Return rates and betas of every group before each step. A rate that is a tensor stays that tensor."""
    owner = optimizer()
    for group in owner.param_groups if tensors else ():
        group["lr"] = torch.tensor(group["lr"])
    rates = [group["lr"] for group in owner.param_groups]
    schedule = getattr(module, kind)(owner, **params)
    seen = []
    for _ in range(steps):
        seen.append([(float(group["lr"]), *group["betas"]) for group in owner.param_groups])
        schedule.step()
    last = [group["lr"] for group in owner.param_groups]
    assert schedule.get_last_lr() == last and (not tensors or all(map(operator.is_, last, rates)))
    return [*seen, {key: getattr(schedule, key) for key in READ[kind].split()}]


def flat(seen: list[Any]) -> list[float]:
    return [number for step in seen[:-1] for group in step for number in group]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_every_step_is_deepspeeds(kind: str, params: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules as theirs

    for tensors in (False, True):
        found, expected = (run(each, kind, params, tensors=tensors) for each in (mine, theirs))
        assert flat(found) == pytest.approx(flat(expected), rel=1e-6 if tensors else 1e-12)
        assert tensors or found[-1] == expected[-1]


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_a_rate_that_is_a_tensor_stays_one(kind: str, params: dict[str, Any]) -> None:
    assert flat(run(mine, kind, params, tensors=True)) == pytest.approx(flat(run(mine, kind, params)))


WSD = {"num_training_steps": 22, "num_warmup_steps": 4, "num_decay_steps": 7, "min_lr_ratio": 0.1}
MIN = {"num_training_steps": 19, "num_warmup_steps": 5}
HF: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}),
    ("constant_with_warmup", {"num_warmup_steps": 4}),
    ("linear", {"num_training_steps": 20, "num_warmup_steps": 0}),
    ("cosine", {"num_training_steps": 17, "num_warmup_steps": 2, "num_cycles": 1.3}),
    ("cosine_with_restarts", {"num_training_steps": 23, "num_warmup_steps": 3, "num_cycles": 4}),
    ("polynomial", {"num_training_steps": 21, "num_warmup_steps": 25, "lr_end": 1e-4, "power": 2.5}),
    ("inverse_sqrt", {"num_warmup_steps": 0, "timescale": 7}),
    ("cosine_with_min_lr", {"num_training_steps": 19, "num_warmup_steps": 3, "min_lr": 0.007}),
    ("cosine_warmup_with_min_lr", {**MIN, "min_lr_rate": 0.3, "warmup_lr_rate": 0.2}),
    ("warmup_stable_decay", {**WSD, "warmup_type": "1-sqrt", "decay_type": "cosine"}),
    ("warmup_stable_decay", {"num_decay_steps": 5, "num_warmup_steps": 0, "num_stable_steps": 6}),
]


@pytest.mark.parametrize(("kind", "params"), HF)
def test_every_step_is_that_of_transformers_to_the_bit(kind: str, params: dict[str, Any]) -> None:
    """The run goes on a while after the schedule's end, and is resumed in the middle."""
    transformers = pytest.importorskip("transformers")
    warmup, total = params.get("num_warmup_steps"), params.get("num_training_steps")
    rest = {key: params[key] for key in params if key not in ("num_warmup_steps", "num_training_steps")}
    theirs, owner = optimizer(), optimizer()
    if "timescale" in params:  # which `get_scheduler` of some versions does not hand on
        reference = transformers.get_inverse_sqrt_schedule(theirs, **params)
    else:
        reference = transformers.get_scheduler(kind, theirs, warmup, total, rest)
    recipe = ComponentSpec(kind, json.dumps(params))
    schedule, expected, found = mine.make_schedule(recipe, owner), [], []
    for step in range(30):
        if step == 11:
            state, owner = schedule.state_dict(), optimizer()
            schedule = mine.make_schedule(recipe, owner)
            schedule.load_state_dict(state)
        expected.append([group["lr"] for group in theirs.param_groups])
        found.append([group["lr"] for group in owner.param_groups])
        theirs.step()
        reference.step()
        schedule.step()
    assert found == expected


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("cosine_with_min_lr", {"num_training_steps": 9}, "`scheduler.params.min_lr`: must be given, or"),
        ("wsd", {"num_decay_steps": 3, "num_training_steps": 2}, "must have room for `num_warmup_steps`"),
        ("polynomial", {"num_training_steps": 9, "lr_end": 0.1}, "must be below the rate of the optimizer"),
        ("reduce_lr_on_plateau", {}, "`scheduler.type`: must be one of"),
        ("WarmupLR", {"warmup_num_step": 3}, "Did you mean `warmup_num_steps`"),
        ("StepLR", {"step_size": 2}, "Build it and pass it to `initialize`; for a DeepSpeed script"),
    ],
)
def test_what_no_block_means_is_refused_with_the_config(kind: str, params: dict[str, Any], told: str) -> None:
    written = {"scheduler": {"type": kind, "params": params}}
    written["optimizer"] = {"type": "AdamW", "params": {"lr": 0.05}}
    with pytest.raises(ConfigError, match=re.escape(told)):
        make_plan(written, torch.nn.Linear(2, 2), world_size=1)
    written["scheduler"] = {"type": "wsd", "params": {"num_decay_steps": 3, "num_stable_steps": 4}}
    recipe = make_plan(written, torch.nn.Linear(2, 2), world_size=1).policy.schedule
    assert recipe is not None and recipe.type == "warmup_stable_decay"


@pytest.mark.parametrize(
    ("kind", "params", "told"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps"),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, "warmup_min_lr"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step"),
        # transformers divides by zero
        ("polynomial", {"num_training_steps": 9, "num_warmup_steps": 9}, "must be above `num_warmup"),
    ],
)
def test_wrong_arguments_are_named(kind: str, params: dict[str, Any], told: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=told):
        mine.make_schedule(ComponentSpec(kind, json.dumps(params)), optimizer())


def test_the_first_two_updates_of_a_warm_up_run_at_its_minimum() -> None:
    seen = run(mine, "WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, 7)
    assert [step[0][0] for step in seen[:-1]] == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    for kind in mine.VALID_LR_SCHEDULES:  # a config and a script get the same classes
        assert getattr(lr_schedules, kind) is mine.SCHEDULES[kind]
