"""Learning-rate schedules of DeepSpeed's `scheduler` block: their shapes, and resuming from a step."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import torch

from zerodrift.errors import ConfigError
from zerodrift.optim.schedules import Schedule, make_schedule
from zerodrift.policy.nouns import Recipe


def schedule(kind: str, lr: float = 0.1, **params: Any) -> Schedule:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return make_schedule(Recipe(kind, json.dumps(params)), optimizer)


def rates(made: Schedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found += made.get_last_lr()
        made.step()
    return found


def test_warmup_rises_linearly_and_stays() -> None:
    made = schedule("WarmupLR", warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    assert rates(made, 6) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0, 1.0])


def test_warmup_rises_with_the_logarithm_by_default() -> None:
    made = schedule("WarmupLR", warmup_max_lr=1.0, warmup_num_steps=4)
    assert rates(made, 4) == pytest.approx([math.log(n + 1) / math.log(4) for n in range(4)])


def test_warmup_decay_ends_at_the_minimum() -> None:
    made = schedule(
        "WarmupDecayLR", total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"
    )
    assert rates(made, 8) == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_warmup_cosine_scales_the_groups_own_rate() -> None:
    made = schedule("WarmupCosineLR", lr=2.0, total_num_steps=10, warmup_num_steps=2, cos_min_ratio=0.1)
    found = rates(made, 12)
    assert max(found) <= 2.0 and found[-1] == pytest.approx(0.2)
    assert all(left >= right for left, right in itertools.pairwise(found[2:]))


def test_one_cycle_goes_up_and_down() -> None:
    made = schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=2)
    assert rates(made, 5) == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1])


def test_range_test_grows() -> None:
    made = schedule("LRRangeTest", lr_range_test_min_lr=0.1, lr_range_test_step_size=2)
    assert rates(made, 3) == pytest.approx([0.1, 0.15, 0.2])


def test_a_schedule_resumes_from_its_step_alone() -> None:
    params = {"total_num_steps": 20, "warmup_num_steps": 3}
    first, second = schedule("WarmupCosineLR", **params), schedule("WarmupCosineLR", **params)
    rates(first, 7)
    second.load_state_dict(first.state_dict())
    assert rates(first, 5) == rates(second, 5)


def test_an_argument_that_is_not_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"warmup_num_step.*Did you mean `warmup_num_steps`"):
        schedule("WarmupLR", warmup_num_step=3)
    with pytest.raises(ConfigError, match="cycle_momentum"):
        schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_momentum=True)
    assert schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_momentum=False)
