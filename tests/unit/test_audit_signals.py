"""Margins of routers and the rounding that is charged for their flips; effects of rounding on the loss."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT, batch
from zerodrift.api import make_plan
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.report import residual_stream
from zerodrift.inspect.audit.results import Place
from zerodrift.inspect.audit.runs import CloseCalls, Recorder, Signals, close_calls, signed_costs
from zerodrift.inspect.trace.operations import ModulePaths, paths_in


def scores() -> torch.Tensor:
    return torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.1, 0.2, 0.3, 0.9]], requires_grad=True)


def recorded(choose: object) -> Recorder:
    model = nn.Module()
    with paths_in(model) as path:
        recorder = Recorder(path)
        with recorder:
            choose(scores())  # type: ignore[operator]
    return recorder


@pytest.mark.parametrize(
    ("choose", "margins"),
    [
        (lambda x: torch.topk(x, 2, dim=-1), [1.5, 0.1]),
        (lambda x: x.topk(2), [1.5, 0.1]),
        (lambda x: torch.topk(input=x, k=2, dim=1), [1.5, 0.1]),
        (lambda x: x.topk(4), []),
        (lambda x: x.topk(2, largest=False), []),
        (lambda x: x.topk(1, dim=0), []),
    ],
)
def test_a_margin_is_from_the_last_choice_to_the_next(choose: object, margins: list[float]) -> None:
    """A router that chooses all experts, or the smallest scores, has no margin."""
    (found,) = recorded(choose).margins.values()
    assert torch.allclose(found, torch.tensor(margins)) and found.requires_grad is bool(margins)


def run(values: list[float], margins: list[float], routes: list[int]) -> Signals:
    return Signals(
        losses=[0.0],
        targets=[torch.tensor(values, dtype=torch.float64)],
        routes=[{"gate#0": torch.tensor(routes)[:, None]}],
        margins=[{"gate#0": torch.tensor(margins)}],
    )


def test_what_flips_cost_is_charged_to_what_moves_margins() -> None:
    """Most targets are off by 0.001, and the one whose choice flipped by 1: a mean square of 0.1, of which
    rounding alone explains 2e-6. Margins move by 0.01, and one is nearer to zero than three times that."""
    other = run([0.0] * 10, [0.5] * 9 + [0.012], [0] * 10)
    mine = run([0.001] * 9 + [1.0], [0.51] * 9 + [0.002], [0] * 9 + [1])
    calls = close_calls(mine, other)
    assert calls is not None
    spread = 0.01 / 0.6745
    assert abs(calls.within["gate#0"] - 3 * spread) < 1e-5
    assert abs(calls.weight * spread - 1.0) < 1e-3, "the one close call costs what the flip did"


def test_without_flips_nothing_is_charged() -> None:
    other = run([0.0] * 10, [0.5] * 10, [0] * 10)
    assert close_calls(run([0.001] * 9 + [1.0], [0.51] * 10, [0] * 10), other) is None
    assert close_calls(run([float("nan")] * 10, [0.51] * 10, [1] * 10), other) is None


def judged(negative: torch.Tensor, margins: dict[str, torch.Tensor]) -> Recorder:
    recorder = Recorder(ModulePaths(nn.Module()))
    recorder.negative, recorder.margins = [negative], margins
    return recorder


def test_only_close_calls_have_a_gradient() -> None:
    negative = torch.ones(2, dtype=torch.float64, requires_grad=True)
    margins = torch.tensor([0.5, 0.01, float("inf")], requires_grad=True)
    calls = CloseCalls({"gate#0": 0.1}, 4.0)
    signed_costs(negative.sum(), judged(negative, {"gate#0": margins}), 0, calls).backward()
    assert margins.grad is not None and negative.grad is not None
    assert margins.grad.abs().tolist() == [0.0, 2.0, 0.0]
    assert negative.grad.abs().tolist() == [0.5, 0.5]


def test_random_signs_are_the_same_without_close_calls() -> None:
    negative = torch.arange(5.0)
    costs = [
        signed_costs(negative.sum(), judged(negative, {}), 3, calls) for calls in (None, CloseCalls({}, 1.0))
    ]
    assert torch.equal(*costs)


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
def test_what_cells_do_to_the_loss_adds_up(mode: str) -> None:
    """Every operation is charged once, so the sum is the plan's effect on the loss to first order; the
    rest is of the size of the drift's square."""
    model = GPT(layers=2, tied=False, seed=1)
    plan = make_plan({"precision": {"mode": mode}}, model)
    found = audit(plan, model, [{"tokens": batch(1, 0, micro)} for micro in range(3)], budget=None, confirm=4)
    cells = [each for each in found.shortlist if each.choice.cell == "compute"]
    moved = sum(each.loss for each in (*cells, *found.places))
    assert abs(found.drift.loss) > 10 * found.drift.square
    assert abs(moved - found.drift.loss) < found.drift.square
    stored = {each.choice: each.loss for each in found.shortlist if each.choice.cell == "storage"}
    replayed = [each for each in found.replayed if each.choice in stored]
    for each in replayed:
        assert each.alone.loss == pytest.approx(stored[each.choice], rel=0.1, abs=found.drift.square)
    assert bool(replayed) is (mode == "bf16")
    if mode == "bf16":
        grows_as_in_fp32(model, residual_stream(found.places))


def grows_as_in_fp32(model: GPT, stream: list[Place]) -> None:
    """Compare the outputs of blocks with those of a plain forward."""
    sizes: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *args: sizes.append(args[-1].detach().square()))
    for micro in range(3):
        model(batch(1, 0, micro))
    for number, place in enumerate(stream):
        true = torch.stack(sizes[number :: len(model.layers)]).mean().sqrt()
        assert place.module == f"layers.{number}"
        assert place.size == pytest.approx(float(true), rel=0.01)
        assert 1e-4 < place.relative < 2**-8
    assert len(stream) == len(model.layers)
