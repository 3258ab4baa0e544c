"""How far optimizers look, found out by trying; nothing of the caller's is touched by it."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.unit import own_optimizers as own
from zerodrift.optim.reach import Reach, TrialResult, needs_closure, reach

CPU = torch.device("cpu")
SHAPES: tuple[tuple[int, ...], ...] = ((48, 32), (48,), (16, 8, 3, 3), (1,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1))) for shape in shapes]


def found(optimizer: torch.optim.Optimizer) -> TrialResult:
    shapes = {
        number: [tuple(p.shape) for p in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    }
    return reach(optimizer, shapes, CPU)


@pytest.mark.parametrize("kind", own.ELEMENTWISE)
def test_elementwise(kind: Any) -> None:
    assert found(kind(parameters())) == TrialResult(Reach.ELEMENT)


@pytest.mark.parametrize("kind", own.TENSOR)
def test_a_tensor(kind: Any) -> None:
    assert found(kind(parameters())).reach is Reach.TENSOR


@pytest.mark.parametrize("kind", own.GROUP)
def test_several_tensors(kind: Any) -> None:
    assert found(kind(parameters())).reach is Reach.GROUP


def test_a_class_for_matrices_is_tried_on_matrices() -> None:
    seen = found(own.Orthogonal(parameters(((48, 32), (8, 8)))))
    assert seen.reach is Reach.TENSOR and "a step raised" in seen.why


TORCH = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_elementwise_classes(name: str, foreach: bool) -> None:
    kind = getattr(torch.optim, name)
    assert found(kind(parameters(), lr=1e-3, foreach=foreach)) == TrialResult(Reach.ELEMENT)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"fused": True}, {"lr": torch.tensor(0.1)}])
def test_torchs_variants(options: dict[str, Any]) -> None:
    assert found(torch.optim.Adam(parameters(), **options)) == TrialResult(Reach.ELEMENT)


def test_torchs_matrix_classes() -> None:
    assert found(torch.optim.Adafactor(parameters())).reach is Reach.TENSOR
    assert found(torch.optim.Muon(parameters(((48, 32), (8, 8))))).reach is Reach.TENSOR


def test_wrappers() -> None:
    assert found(own.Lookahead(own.Signs(parameters()))) == TrialResult(Reach.ELEMENT)
    assert found(own.Lookahead(own.TrustRatio(parameters()))).reach is Reach.TENSOR


def test_a_constructor_is_not_called_and_groups_keep_their_options() -> None:
    held = own.Demands(parameters(), 0.1, lambda step: 1.0, owner="me")
    assert found(held) == TrialResult(Reach.ELEMENT)

    class ByOption(own.Own):
        def direction(self, p: Any, g: Any, state: Any, group: Any) -> Any:
            return g / g.norm() if group["normal"] else g

    one, *rest = parameters()
    plain = [{"params": [one], "normal": False}, {"params": rest, "normal": False}]
    second = [{"params": [one], "normal": False}, {"params": rest, "normal": True}]
    assert found(ByOption(plain)) == TrialResult(Reach.ELEMENT)
    assert found(ByOption(second)).reach is Reach.TENSOR


def test_a_rate_of_zero_hides_nothing() -> None:
    """As at the beginning of a warm-up, whose schedule has put a function of its own in place of `step`."""
    optimizer = own.TrustRatio(parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert found(optimizer).reach is Reach.TENSOR
    assert schedule.last_epoch == 0 and not hasattr(optimizer, "_opt_called")


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, own.Noisy, own.Signs, own.GuessesRate])
def test_nothing_of_the_callers_changes(kind: Any) -> None:
    calls: list[int] = []
    held = parameters()
    optimizer = kind(held)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    values = [p.detach().clone() for p in held]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    groups = copy.deepcopy(groups)
    state = copy.deepcopy(list(optimizer.state.values()))
    streams = (torch.get_rng_state(), own.NOISE.get_state())
    python, array = random.getstate(), numpy.random.get_state(legacy=False)
    found(optimizer)
    assert torch.equal(streams[0], torch.get_rng_state())
    assert torch.equal(streams[1], own.NOISE.get_state())
    assert random.getstate() == python and str(numpy.random.get_state(legacy=False)) == str(array)
    assert not calls and all(p.grad is None for p in held)
    assert all(torch.equal(a, b) for a, b in zip(values, held, strict=True))
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, held))
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    after = list(optimizer.state.values())
    assert [one.keys() for one in after] == [one.keys() for one in state]
    assert all(torch.equal(x[k], y[k]) for x, y in zip(after, state, strict=True) for k in x)


class _Nowhere(own.Own):
    def direction(self, p: Any, g: Any, state: Any, group: Any) -> Any:
        raise RuntimeError("needs a GPU")


class _Still(own.Own):
    def direction(self, p: Any, g: Any, state: Any, group: Any) -> Any:
        return g * 0


class _HoldsModel(own.Own):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.model = nn.Linear(600, 600)


def _replaced(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    vars(optimizer)["step"] = lambda closure=None: None
    return optimizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_Nowhere, "RuntimeError: needs a GPU"),
        (_Still, "changed nothing"),
        (_HoldsModel, "its `model` holds a tensor of 360,000 elements"),
        (lambda params: _replaced(own.Own(params)), "`step` was replaced"),
    ],
)
def test_what_cannot_be_tried_says_why(make: Callable[..., torch.optim.Optimizer], why: str) -> None:
    seen = found(make(parameters()))
    assert seen.reach is Reach.UNKNOWN and why in seen.why


def test_closures() -> None:
    assert needs_closure(torch.optim.LBFGS(parameters()))
    assert not needs_closure(own.Signs(parameters()))
    assert not any(needs_closure(getattr(torch.optim, name)(parameters(), lr=0.1)) for name in TORCH)


def test_what_it_costs() -> None:
    """Of the quickest of several, for the machine may be busy."""
    optimizer = torch.optim.RMSprop(parameters())
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        found(optimizer)
        times.append(time.perf_counter() - begun)
    assert min(times) < 0.05
