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
from zerodrift.errors import UnsupportedError
from zerodrift.report.updates import UpdateReport, combine_lines


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


MUON = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "rest"),
    [
        ("bf16", on()),
        pytest.param("bf16", {**on(), **MUON}, marks=pytest.mark.slow),
        ("fp32", on(state="bf16-stochastic")),
        ("bf16", {**on(), **OWN}),
    ],
    ids=["split", "muon", "stochastic", "own"],
)
@pytest.mark.parametrize(
    ("on_two", "on_four"),
    [((1, 2), (0, 3)), pytest.param((0, 3), (1, 2), marks=pytest.mark.slow)],
    ids=["few", "others"],
)
def test_a_report_is_the_same_at_every_stage_and_world(
    on_two: tuple[int, ...], on_four: tuple[int, ...], mode: str, rest: dict[str, Any]
) -> None:
    """Reports agree to the last bit: counts are integers, squares are added exactly."""
    alone = run_ranks(reports, 1, (0, 3), mode, rest)[0]
    assert alone[0] == alone[1]
    for world, here in ((2, on_two), (4, on_four)):
        for found in run_ranks(reports, world, here, mode, rest, timeout=200):
            assert all(each == alone[0] for each in found)
    assert all(line.moved for line in alone[0].lines if line.name.endswith("attention.qkv.weight"))


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
LION = {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}


def muon(lr: float) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": {"lr": lr}}}


@pytest.mark.parametrize(
    ("mode", "rest", "exact"),
    [
        pytest.param("fp32", on(), True, id="same-fp32"),
        pytest.param("bf16", on(), True, id="split"),
        pytest.param("bf16", on(master="fp32"), True, id="fp32"),
        pytest.param("bf16", on(master="same"), False, id="same-bf16"),
        pytest.param("bf16", {**on(), **SGD}, True, id="sgd"),
        pytest.param("bf16", {**on(), **LION}, True, id="lion"),
        pytest.param("bf16", {**on(), **muon(0.02)}, True, id="muon"),
        pytest.param("bf16", {**on(master="same"), **muon(1e-4)}, False, id="muon-same"),
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


@pytest.mark.parametrize(
    ("rest", "steps", "told"),
    [({}, 1, "Set `precision.statistics: true`"), (on(), 0, "must follow an update")],
    ids=["off unless asked for", "before an update"],
)
@on_ranks(1)
def test_what_cannot_be_told_is_said(rest: dict[str, Any], steps: int, told: str) -> None:
    engine = make(config(0, "bf16", **rest))
    for number in range(steps):
        step(engine, number)
    assert engine.updater is not None
    assert bool(engine.updater.statistics) == bool(engine.plan.policy.statistics)
    with pytest.raises(UnsupportedError, match=told):
        engine.update_statistics()


def test_the_table_shows_the_worst_first_and_everything_last() -> None:
    found = run_ranks(report, 1, 0, "bf16", 2, on(master="same"))[0]
    lines = found.text(3).splitlines()
    assert lines[0] == "update 2" and lines[1].split()[:2] == ["parameter", "elements"]
    worst = max(found.lines, key=lambda line: line.lost_share)
    assert found.line(lines[2].split()[0]).lost_share == worst.lost_share
    assert lines[5].split()[0] == "all" and lines[6].startswith(f"and {len(found.lines) - 3} more")
    assert max(map(len, lines)) <= 100
    assert str(found) == found.text()
    one, other = found.lines[:2]
    both = combine_lines("both", (one, other))
    assert both.lost_share == (one.lost + other.lost) / (one.moved + other.moved)
    assert both.weight_norm == pytest.approx((one.weight_norm**2 + other.weight_norm**2) ** 0.5)
    assert combine_lines("none", ()).ratio == 0
    data = found.to_json()
    assert data["step"] == 2 and data["parameters"][0]["lost_share"] == found.lines[0].lost_share
