"""Arguments of optimizers and schedules: the plan refuses impossible values by their paths."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

from tests.unit.models import moe
from zerodrift import ConfigError, MeshShape, load, make_plan, resolve
from zerodrift.optim import schedules
from zerodrift.optim.flat import arguments as built
from zerodrift.policy.arguments import ANY, OPTIMIZERS, REQUIRED, SCHEDULES

HUGE, NAN, INF = 10**400, math.nan, math.inf
NEVER: tuple[Any, ...] = ({"a": 1}, [], "1e-3", "nan", NAN, -INF, HUGE, object(), [INF, 0.9], ["0.9", "0.99"])
"""Values that no argument admits."""

NUMBER, LIST = "a number of at least 0", "or a list of them, one per parameter group"
VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    NUMBER: ((-1, -1e-9, True, [0.1]), (0, 0.5, 1e-30, 3)),
    "a number": ((True, [0.1]), (0.5, -0.5)),
    f"{NUMBER}, and below the rate of the optimizer": ((-1, True, [0.1], 0.2), (0, 1e-4)),
    "a number above 0": ((0, -1, True, [1]), (10, 0.5)),
    "true or false": ((0, 1, 0.0, [True]), (True, False)),
    "True or left out": ((False, 1), (True,)),
    "False or left out": ((True, 0), (False,)),
    "two numbers in [0, 1)": ((0.9, [0.9], [0.9, 1.0], [-0.1, 0.9], True), ([0.9, 0.95], (0, 0.5))),
    "three numbers": ((1.0, [1.0, 2.0], [1.0, 2.0, NAN], [1, 2, True]), ([1, -2.5, 3.0],)),
    "a whole number above 0": ((0, -1, 0.5, True, 2**31, [3]), (1, 2e3)),
    "a whole number of at least 0": ((-1, 0.5, True, 2**31), (0, 4.0)),
    "a whole number of at least -1": ((-2, 0.5, True, 2**31), (-1, 3)),
    "a whole number from 1 to 99": ((0, 100, 2.5, True), (5, 99)),
    "log or linear": (("cubic", "LOG", 1, True, ["log"]), ("log", "linear")),
    "linear or cosine or 1-sqrt": (("log", 1, True), ("linear", "cosine", "1-sqrt")),
    "a number from 0 to 1": ((-1, 1.5, True, [0.1]), (0, 0.5, 1)),
    "bf16 or fp32": (("fp16", 32), ("bf16", "fp32")),
    "gram or standard": (("quick",), ("gram", "standard")),
    "original or match_rms_adamw": (("loud", 0), ("original", "match_rms_adamw")),
    f"{NUMBER}, {LIST}": ((-1, [0.1, -1], True, [True]), (0.1, [0.1])),
    f"a number in [0, 1), {LIST}": ((1, -0.1, [0.5, 1.0], True), (0.5, [0.8])),
}
"""Description of an argument -> values that are refused, beside `NEVER`, and values that are taken."""

TABLES = {("scheduler", kind): table for kind, table in SCHEDULES.items()}
for kind, table in OPTIMIZERS.items():
    TABLES["optimizer", kind] = table if kind == "Muon" else {**table, **ANY}


def planned(block: str, kind: str, params: Any, **rest: Any) -> Any:
    written: dict[str, Any] = {block: {"type": kind, "params": params}}
    if block == "scheduler":
        written["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    policy = resolve(load(written), MeshShape(), **rest)
    return policy.optimizer if block == "optimizer" else policy.schedule


EITHER = {
    "cosine_with_min_lr": ("min_lr_rate", "min_lr"),
    "cosine_warmup_with_min_lr": ("min_lr_rate", "min_lr"),
    "warmup_stable_decay": ("num_stable_steps", "num_training_steps"),
}
"""Arguments of which exactly one is given."""


def needed(kind: str, beside: str = "", without: str = "") -> dict[str, Any]:
    """Return the required arguments of a type, beside an argument that is given or left out."""
    names = [*REQUIRED.get(kind, ()), *(EITHER[kind][:1] if kind in EITHER else ())]
    own = {name: 1 for name in names if name != without}
    return {name: value for name, value in own.items() if {name, beside} != {*EITHER.get(kind, ())}}


@pytest.mark.parametrize(("block", "kind"), TABLES)
def test_what_an_argument_cannot_be_is_refused_in_the_plan(block: str, kind: str) -> None:
    for key, argument in TABLES[block, kind].items():
        needs, path = needed(kind, key), f"{block}.params.{key}"
        for value in (*NEVER, *VALUES[argument.words][0]):
            with pytest.raises(ConfigError, match=rf"`{re.escape(path)}.*must"):
                planned(block, kind, {**needs, key: value})
        with pytest.raises(ConfigError, match=re.escape(path)):
            planned(block, kind, {**needs, key: "auto"}, auto={path: VALUES[argument.words][0][0]})
    with pytest.raises(ConfigError, match=rf"{block}\.params.*must be an argument of"):
        planned(block, kind, {**needed(kind), "Lr": 1})


def test_nesterov_is_refused_without_momentum() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.params\.nesterov"):
        planned("optimizer", "SGD", {"lr": 0.1, "nesterov": True})


@pytest.mark.parametrize(("block", "kind"), TABLES)
def test_what_it_can_be_is_built(block: str, kind: str) -> None:
    for key, value in (
        (key, value) for key, of in TABLES[block, kind].items() for value in VALUES[of.words][1]
    ):
        params = {**needed(kind, key), key: value}
        if (kind, key, value) == ("SGD", "nesterov", True):
            params["momentum"] = 0.9
        recipe = planned(block, kind, params)
        if block == "scheduler":
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
            schedule = schedules.make_schedule(recipe, optimizer)
            schedule.step()
            assert all(math.isfinite(rate) for rate in schedule.get_last_lr())
        elif kind != "Muon":
            built(recipe)
        nothing = {key: None} if key not in needed(kind) else {}
        recipe = planned(block, kind, {**needed(kind), **nothing})
        assert json.loads(recipe.params) == needed(kind), "null is left out"


@pytest.mark.parametrize("kind", sorted(REQUIRED))
def test_what_a_schedule_needs_is_asked_for(kind: str) -> None:
    for key in REQUIRED[kind]:
        with pytest.raises(ConfigError, match=rf"`scheduler.params.{key}`: must be given"):
            planned("scheduler", kind, needed(kind, without=key))
        params = {**needed(kind, key), key: "auto"}
        assert planned("scheduler", kind, params, auto={f"scheduler.params.{key}": 7.0})


NUMBERS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "fp16.initial_scale_power", "fp16.loss_scale_window"),
)


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_stands_for_auto_is_one_that_could_be_written(key: str) -> None:
    block, _, name = key.rpartition(".")
    written: dict[str, Any] = {block: {"enabled": True, name: "auto"}} if block else {name: "auto"}
    for value in (NAN, -1, "auto", "8", [1], True, HUGE, torch.tensor(3)):
        with pytest.raises(ConfigError, match=key):
            make_plan(written, moe(layers=1), 2, auto={key: value})
    assert make_plan(written, moe(layers=1), 2, auto={key: 4.0})
    with pytest.raises(ConfigError):
        make_plan(written, moe(layers=1), 2, auto=[("lr", 1)])  # type: ignore[arg-type]


BOUNDED = {
    **dict.fromkeys(("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"), 2**31),
    **dict.fromkeys(("pipeline.stages", "sharding.replicate", "experts.ranks"), 2**24 + 1),
    **dict.fromkeys(("pipeline.micro_batches", "fp16.hysteresis", "fp16.loss_scale_window"), 2**31),
    "pipeline.chunks": 1025,
    "fp16.loss_scale": 2.0**128,
}


@pytest.mark.parametrize("key", BOUNDED)
def test_a_number_that_makes_no_sense_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"`{key}`: must be"):
        make_plan({}, moe(layers=1), 2, overrides=[f"{key}={BOUNDED[key]}"])
