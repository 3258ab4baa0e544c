"""Modules that `fully_shard` is called on, and plans beyond it, which are refused by name, all at once,
each with a twin that is accepted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config
from tests.unit.refusals import error_of
from zerodrift import ConfigError, make_plan
from zerodrift.plan.groups import find_groups
from zerodrift.plan.table import Plan


def plan(model: nn.Module, mode: str = "bf16", stage: int = 3, world: int = 2, **rest: Any) -> Plan:
    return make_plan(config(stage, mode, backend="fsdp2", **rest), model, world)


def rules(*found: dict[str, Any]) -> dict[str, Any]:
    return {"precision": {"rules": list(found)}}


def paths(made: Plan) -> list[tuple[str, ...]]:
    return [group.paths for group in find_groups(made)]


PIN = {"match": "*.mlp.*", "pin": "fp32"}
LOW = {"match": "*.mlp.down.*", "compute": "bf16", "gather": "bf16"}


@pytest.mark.parametrize(
    ("model", "written", "expected"),
    [
        (GPT(), (), ["", "layers.0", "layers.1"]),
        (GPT(moe=True, layers=1), ({**PIN, "match": "*.router.*"},), ["", "layers.0", "layers.0.mlp.router"]),
        (GPT(layers=1), (PIN,), ["", "layers.0", "layers.0.mlp"]),
        (GPT(layers=1), (PIN, LOW), ["", "layers.0", "layers.0.mlp.up"]),
    ],
    ids=["units", "what differs", "what differs together", "what differs again inside"],
)
def test_a_group_is_what_is_gathered_alike(model: nn.Module, written: Any, expected: list[str]) -> None:
    made = plan(model, **rules(*written))
    assert paths(made) == [(path,) for path in expected]
    named = [made.rows[row].name for group in find_groups(made) for row in group.rows]
    assert sorted(named) == sorted(row.name for row in made.rows)


# --- refused ------------------------------------------------------------------------------------------


refusal = partial(error_of, ConfigError, plan)


def test_two_kinds_in_one_module_and_a_parameter_without_dimensions() -> None:
    text = refusal(GPT(layers=1), **rules({"match": "*.bias", "reduce": "bf16"}))
    for path in ("layers.0.norm1", "layers.0.attention.out", "layers.0.mlp.up", "norm"):
        assert f"`{path}`" in text
    assert "native backend" in text
    plan(GPT(layers=1), **rules({"match": "*.norm*.*", "pin": "fp32"}))
    tied = nn.ModuleDict(
        {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 8), "d": GPT(layers=1)}
    )
    tied["b"].weight = tied["a"].weight
    narrow = rules({"match": "a.weight", "reduce": "bf16"}, {"match": "c.*", "reduce": "bf16"})
    assert "`a`: must hold" in refusal(tied, **narrow), "a second kind in a group of two modules"
    model = GPT()
    model.scale = nn.Parameter(torch.ones(()))
    assert "`scale`" in refusal(model)
    model.scale = nn.Parameter(torch.ones(1))
    plan(model)


LAST, EVERY = ({"accumulate": "bf16", "reduce": {"when": when}} for when in ("last", "every"))
COLUMNS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"storage": "bf16"}, {"storage": "fp32"}, "precision.storage"),
    ({"gather": "fp32"}, {"gather": "bf16"}, "precision.gather"),
    ({"state": "bf16-stochastic"}, {"state": "fp32"}, "precision.state"),
    (EVERY, LAST, "precision.reduce.when"),
    ({"rules": [{"match": "*.up.weight", "placement": "whole"}]}, {}, "precision.rules[0]"),
    ({"statistics": True}, {"statistics": False}, "precision.statistics"),
]


@pytest.mark.parametrize(("refused", "accepted", "where"), COLUMNS, ids=lambda value: str(value)[:40])
def test_columns(refused: dict[str, Any], accepted: dict[str, Any], where: str) -> None:
    text = refusal(GPT(layers=1), stage=1, precision=refused)
    assert where in text and "fsdp2" in text
    plan(GPT(layers=1), stage=1, precision=accepted)


def test_settings_are_refused_together() -> None:
    lion = {"type": "Lion", "params": {"lr": 1e-3}}
    written = {"optimizer": lion, "sharding": {"accumulator": "keep"}, "precision": {"statistics": True}}
    text = refusal(GPT(), world=4, pipeline={"stages": 2}, **written)
    for key in ("optimizer.type", "sharding.accumulator", "precision.statistics", "pipeline"):
        assert key in text
    plan(GPT(), optimizer={"type": "SGD", "params": {"lr": 1e-3}}, sharding={"accumulator": "free"})
