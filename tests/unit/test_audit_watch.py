"""Measures of an audit: rounding with the errors of fp64, margins of routers, the loss, a probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerodrift
from tests.numerics.networks import GPT, batch
from zerodrift.api import make_plan
from zerodrift.engine.engine import Engine
from zerodrift.errors import UnsupportedError
from zerodrift.inspect.audit.entry import audit
from zerodrift.inspect.audit.estimates import PrecisionProbe, probe, require_probe
from zerodrift.inspect.audit.rounding import Rounding, RoundingRecorder, Roundings, Widener
from zerodrift.inspect.audit.runs import Recorder, Signals, close_calls
from zerodrift.inspect.trace.operations import paths_in


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute in bf16, for any input."""
    return functional.linear(x, weight.to(torch.bfloat16)).float().square().sum()


class Narrows(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.compute = nn.Parameter(torch.randn(24, 40)), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.weight, x)


def watched(model: nn.Module, *inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Rounding]]:
    found = Roundings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with paths_in(model) as path, RoundingRecorder(model, names, path, found, {}):
        out = model(*inputs)
    out.backward()
    return out.detach(), {place.operation: place for place in reversed(found.places.values())}


def given() -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(1)).bfloat16()


def halves(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return weight.half().to(torch.float32).square().sum()


def sets(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    held = torch.zeros(24, 40, dtype=torch.bfloat16)
    held[3:] = weight[3:]
    return held.float().square().sum()


def drops(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Draw twice: a repetition of the first would change what the second draws."""
    torch.manual_seed(3)
    narrow = weight.bfloat16()[None]
    mixed = functional.scaled_dot_product_attention(narrow, narrow, narrow, dropout_p=0.5)
    return functional.dropout(mixed.float(), 0.5).square().sum()


def lost(weight: torch.Tensor, dtype: torch.dtype) -> float:
    return float((weight.to(dtype).double() - weight.double()).square().sum())


Code = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CODES: dict[str, tuple[Code, str, Callable[[torch.Tensor], float] | None]] = {
    "a product": (product, "linear", None),
    "a cast": (product, "to", lambda weight: lost(weight, torch.bfloat16)),
    "draws": (drops, "bfloat16", lambda weight: lost(weight, torch.bfloat16)),
    "half": (halves, "half", lambda weight: lost(weight, torch.half)),
    "a write": (sets, "__setitem__", lambda weight: lost(weight[3:], torch.bfloat16)),
}
"""Code that narrows, the operation that does, and its error, a sum of squares in fp64."""


@pytest.mark.parametrize("name", CODES)
def test_a_watched_forward_has_the_bits_of_an_unwatched_one_and_its_errors_are_those_of_fp64(
    name: str,
) -> None:
    code, operation, error = CODES[name]
    plain, seen = Narrows(code), Narrows(code)
    loss = plain(given())
    loss.backward()
    out, places = watched(seen, given())
    assert torch.equal(out, loss.detach())
    assert plain.weight.grad is not None and seen.weight.grad is not None
    assert torch.equal(plain.weight.grad, seen.weight.grad)
    place = next(places[each] for each in places if operation in each)
    if error is not None:
        assert place.error == pytest.approx(error(seen.weight.detach()), rel=1e-5) and place.square > 0
        assert place.parameter == "weight"


def test_a_local_error_is_that_of_fp64() -> None:
    model = Narrows()
    _, places = watched(model, given())
    x, weight = given().double(), model.weight.detach().bfloat16().double()
    rounded = functional.linear(given(), model.weight.detach().bfloat16())
    exact = x @ weight.T
    error = rounded.double() - exact
    gradient = 2 * rounded.double()  # of the sum of squares
    product = places["linear"]
    assert product.error == pytest.approx(float(error.square().sum()), rel=1e-3)
    assert product.size == pytest.approx(float(exact.square().sum()), rel=1e-5)
    # The gradient itself is one of bf16, and so are the errors that are kept for it.
    assert product.square == pytest.approx(float((gradient * error).square().sum()), rel=0.02)
    assert product.signed == pytest.approx(float((gradient * error).sum()), rel=0.05, abs=1.0)


def test_widened_leaves_out_what_the_code_narrows() -> None:
    model, found = Narrows(), Roundings()
    x = given().float()
    with paths_in(model) as path, RoundingRecorder(model, {}, path, found, {}):
        model(x.bfloat16())
    places = frozenset((place.module, place.line) for place in found.places.values())
    with paths_in(model) as path, torch.no_grad(), Widener(path, places):
        wide = model(x)
    with torch.no_grad():
        true = functional.linear(x, model.weight).square().sum()
        assert torch.equal(wide, true)
        assert not torch.equal(model(x.bfloat16()), true)


def recorded(choose: Callable[[torch.Tensor], object]) -> Recorder:
    scores = torch.tensor([[3.0, 1.0, 2.5, 0.0], [0.1, 0.2, 0.3, 0.9]], requires_grad=True)
    with paths_in(nn.Module()) as path, Recorder(path) as recorder:
        choose(scores)
    return recorder


@pytest.mark.parametrize(
    ("choose", "margins"),
    [
        (lambda x: torch.topk(x, 2, dim=-1), [1.5, 0.1]),
        (lambda x: torch.topk(input=x, k=2, dim=1), [1.5, 0.1]),
        (lambda x: x.topk(4), []),
        (lambda x: x.topk(2, largest=False), []),
    ],
)
def test_a_margin_is_from_the_last_choice_to_the_next(choose: Any, margins: list[float]) -> None:
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


# --- a run as it trains -------------------------------------------------------------------------------


CONFIG = {
    "precision": {"mode": "bf16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_accumulation_steps": 2,
}


class Noisy(nn.Module):
    """A module that draws random numbers, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(17, 16), nn.Linear(16, 17)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = functional.dropout(self.table(ids), 0.25)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def batches(step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"ids": torch.randint(0, 17, (2, 8), generator=generator)} for _ in range(2)]


def train_and_probe(looks: bool) -> tuple[Engine, list[PrecisionProbe]]:
    torch.manual_seed(0)
    engine = zerodrift.initialize(Noisy(), config=CONFIG, quiet=True)
    torch.manual_seed(1)
    seen = []
    for step in range(3):
        engine.train_batch(batches(step))
        if looks:
            seen.append(probe(engine, batches(step)))
    return engine, seen


def test_a_run_that_is_looked_at_keeps_its_bits() -> None:
    plain, _ = train_and_probe(looks=False)
    digest, calls, drawn = str(plain.digest()), float(plain.module.calls), torch.rand(3)
    plain.destroy()
    looked, seen = train_and_probe(looks=True)
    assert (str(looked.digest()), float(looked.module.calls)) == (digest, calls)
    assert torch.equal(torch.rand(3), drawn)
    assert looked.micro_batches == 0
    looked.destroy()
    names = {name for name, _, _ in seen[0].cells}
    assert {"head.weight", "table.weight"} <= names
    assert all(0 < each.rms < 1 for each in seen)


def test_what_cannot_be_looked_at_is_refused_before_it_begins() -> None:
    tree = {**CONFIG, "precision": {"mode": "bf16", "reduce": {"order": "tree"}}}
    plan = zerodrift.make_plan(tree, Noisy())
    with pytest.raises(UnsupportedError, match=r"audit\.at.*order: tree"):
        require_probe(plan)
    require_probe(zerodrift.make_plan(CONFIG, Noisy()))
