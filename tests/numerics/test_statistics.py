"""Update statistics are those of a plain fp64 computation, at every stage and for every number of slices.

That they change no bit: `test_plain_loops.py` and `test_fused.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, finish, make
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.report.updates import UpdateReport


def on(**precision: Any) -> dict[str, Any]:
    return {"precision": {"statistics": True, **precision}}


def step(engine: Engine, number: int) -> None:
    """Run a step on the same data on every rank, so that sums over 2 and 4 ranks are exact."""
    engine.backward(engine(batch(number)))
    engine.step()


OWN = {"optimizer": None}
"""Stands for an optimizer of torch that runs on views, and keeps its moments itself."""


def engine_of(stage: int, mode: str, rest: dict[str, Any]) -> Engine:
    model = GPT(moe=True, layers=1)
    own = torch.optim.NAdam(model.parameters(), lr=1e-3) if rest.get("optimizer", "") is None else None
    return make(config(stage, mode, 1, **rest), model, optimizer=own)


def report(stage: int, mode: str, steps: int, rest: dict[str, Any]) -> UpdateReport:
    engine = engine_of(stage, mode, rest)
    for number in range(steps):
        step(engine, number)
    return engine.update_statistics()


def reports(stages: tuple[int, ...], mode: str, rest: dict[str, Any]) -> list[UpdateReport]:
    return [report(stage, mode, 3, rest) for stage in stages]


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "rest"),
    [
        ("fp32", on(state="bf16-stochastic")),
        ("bf16", {**on(), **OWN}),
    ],
    ids=["stochastic", "own"],
)
def test_a_report_is_the_same_at_every_stage_and_world(mode: str, rest: dict[str, Any]) -> None:
    """Reports agree to the last bit: counts are integers, squares are added exactly."""
    alone = run_ranks(reports, 1, (0, 3), mode, rest)[0]
    assert alone[0] == alone[1]
    for world, here in ((2, (1, 2)), (4, (3,))):
        for found in run_ranks(reports, world, here, mode, rest, timeout=200):
            assert all(each == alone[0] for each in found)
    assert all(line.moved for line in alone[0].lines if line.name.endswith("attention.qkv.weight"))


LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


@pytest.mark.parametrize(
    ("mode", "rest", "exact"),
    [
        pytest.param("fp32", {**on(), **LION}, True, id="fp32"),
        pytest.param("bf16", on(), True, id="split"),
        pytest.param("bf16", on(master="fp32"), True, id="master-fp32"),
        pytest.param("bf16", on(master="same"), False, id="same-bf16"),
        pytest.param("bf16", {**on(), **MUON}, True, id="muon"),
        pytest.param("bf16", {**on(), **OWN}, True, id="own"),
    ],
)
@on_ranks(2)
def test_a_report_is_what_full_values_say(mode: str, rest: dict[str, Any], exact: bool) -> None:
    """The last of three updates is checked by full values before and after it."""
    engine = engine_of(3, mode, rest)
    for number in range(2):
        step(engine, number)
    before = finish(engine)
    step(engine, 2)
    after, found = finish(engine), engine.update_statistics()
    assert found.step == 3 and len(found.lines) == len(before.masters)
    for line in found.lines:
        old, new = before.masters[line.name].double(), after.masters[line.name].double()
        seen, visible = before.weights[line.name], after.weights[line.name]
        assert line.numel == old.numel()
        assert line.weight_norm == pytest.approx(old.norm().item(), rel=1e-12)
        moved = int((old != new).sum())
        assert moved <= line.moved
        assert line.lost == line.moved - moved, "what was wanted and is in no master"
        assert line.unseen == line.moved - int((seen != visible).sum())
        if exact:
            assert line.change_norm == pytest.approx((new - old).norm().item(), rel=1e-4)
            assert line.ratio == pytest.approx(line.change_norm / line.weight_norm)
    total = found.total
    assert total.numel == sum(line.numel for line in found.lines)
    assert total.lost_share == sum(line.lost for line in found.lines) / total.moved


@on_ranks(2)
def test_a_bf16_master_that_loses_updates_is_seen() -> None:
    """A learning rate of 1e-5 moves a bf16 weight by less than half an ulp: nearly all of it is lost."""
    low = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.0}}}
    name = "layers.0.attention.qkv.weight"
    same, split = (report(3, "bf16", 2, {**on(master=kind), **low}).line(name) for kind in ("same", "split"))
    assert same.lost_share > 0.7 and same.lost == same.unseen, same
    assert split.lost_share < 0.01 and split.unseen_share > 0.7, split
    assert same.ratio == pytest.approx(split.ratio, rel=0.1), "the wanted change is the same"


@on_ranks(2)
def test_state_that_underflows_is_seen() -> None:
    """Half of the rows of an embedding get gradients whose squares are below the least bf16."""
    model = nn.Linear(512, 4, bias=False)
    engine = make({**config(3, "fp32", 1, **on(state="bf16-stochastic")), "gradient_clipping": 0}, model)
    x = torch.ones(2, 512)
    x[:, ::2] = 1e-25
    engine.backward(engine(x).sum())
    engine.step()
    assert engine.update_statistics().line("weight").underflow_share == 0.5
