"""`reduce.order: tree` has the same bits on any number of ranks, and those of a plain loop that sums by the
tree.

The loop here adds the gradients of a step's micro-batches level by level over their numbers, which is how
the tree is defined, and uses nothing of zerodrift but the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, make, masters
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.test_order import level_by_level
from zerodrift.comm import collectives
from zerodrift.comm.collectives import Carrier
from zerodrift.engine import accumulation
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.determinism import seed_of
from zerodrift.errors import UnsupportedError

STEPS = 2
"""Steps of a run, so that the second has moments; one more where the first is skipped."""
WORLDS = (1, 2, 4)


class Twice(GPT):
    """A GPT whose blocks run twice, and the first one again at the end: they have several gradients."""

    def blocks(self) -> Iterable[nn.Module]:
        return [block for block in self.layers for _ in range(2)] + [self.layers[0]]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: GPT(layers=1),
    "moe": lambda: GPT(layers=1, moe=True),
    "dropout": lambda: GPT(layers=1, dropout=0.3),
    "recomputed": lambda: GPT(recompute=True),
    "twice": lambda: Twice(recompute=True),
}

Loop = Callable[[Engine, int, Iterable[int]], "float | None"]
"""Function that takes a step of the micro-batches with these numbers, and returns its norm."""


def usual(engine: Engine, step: int, numbers: Iterable[int]) -> float | None:
    norm = None
    for number in numbers:
        engine.seed_micro_batch(number)
        engine.backward(engine(batch(step, number)))
        norm = engine.step().grad_norm
    return norm


@dataclass(frozen=True)
class Cell:
    """One training run, on any number of ranks."""

    stage: int
    when: str
    mode: str = "fp32"
    model: str | Callable[[], nn.Module] = "dense"
    total: int = 4
    """Micro-batches per step, over all ranks."""
    state: str = "fp32"
    replicate: int = 1
    rest: dict[str, Any] = field(default_factory=dict, hash=False)
    precision: dict[str, Any] = field(default_factory=dict, hash=False)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    loop: Loop = usual
    order: str = "tree"
    """Value of `reduce.order`; empty leaves `order` and `when` out of the config."""

    def written(self, ranks: int, scale: int = 17) -> dict[str, Any]:
        reduce = {"order": self.order, "when": self.when} if self.order else None
        precision: dict[str, Any] = {"reduce": reduce, "state": self.state, **self.precision}
        if self.model == "moe" and self.mode != "fp32":
            precision["rules"] = [{"match": "*.router.*", "pin": "fp32"}]
        sharding = {"replicate": self.replicate} if 1 < self.replicate <= ranks else {}
        more = {"fp16": {"initial_scale_power": scale, "hysteresis": 1}} if "fp16" in self.mode else {}
        written = config(self.stage, self.mode, self.total // ranks, precision=precision, **more, **self.rest)
        return {**written, "sharding": sharding}

    def engine(self) -> Engine:
        written, given = self.written(_world()), {}
        model = MODELS[self.model]() if isinstance(self.model, str) else self.model()
        if self.optimizer is not None:
            del written["optimizer"]
            given["optimizer"] = self.optimizer(model.parameters())
        return make(written, model, **given)


def train_cell(cell: Cell) -> tuple[str, list[Any]]:
    """Train on this rank; return the digest of the state, and norms and loss scales of the steps."""
    engine = cell.engine()
    assert engine.plan.policy.tree
    assert torch.are_deterministic_algorithms_enabled() is bool(cell.order)
    engine.seed = 5
    told: list[Any] = []
    for step in range(STEPS + ("fp16" in cell.mode)):
        norm = cell.loop(engine, step, engine.micro_batches_of_this_rank())
        told.append((str(norm), engine.scaler.scale))
    left, skipped = str(engine.digest()), engine.skipped_steps
    engine.destroy()
    assert bool(skipped) is ("fp16" in cell.mode), f"{skipped} skipped steps"
    return left, told


def _world() -> int:
    return torch.distributed.get_world_size()


def trained_all(cells: list[Cell]) -> list[Any]:
    return [train_cell(cell) for cell in cells]


def require_same(cells: list[Cell], worlds: tuple[int, ...]) -> list[Any]:
    """Require the same results of every cell on every number of ranks, and return them."""
    first, *others = (run_ranks(trained_all, world, cells, timeout=250)[0] for world in worlds)
    for world, found in zip(worlds[1:], others, strict=True):
        differs = [str(cell) for cell, one, two in zip(cells, first, found, strict=True) if one != two]
        assert differs == [], f"{world} ranks differ from {worlds[0]}"
    return first


@pytest.mark.long
@pytest.mark.parametrize(("total", "worlds"), [(2, (1, 2)), (4, (2, 4))])
def test_the_default_has_the_bits_of_the_tree(total: int, worlds: tuple[int, ...]) -> None:
    """A rank has one or two micro-batches, at every stage."""
    usual = [
        Cell(stage, "", mode, model, total, order="")
        for mode, model in (("fp32", "dropout"), ("bf16", "moe"))
        for stage in range(4)
    ]
    asked = [replace(cell, stage=1, when="last", order="tree") for cell in usual[::4]]
    told = require_same([*usual, *asked], worlds)
    for number, expected in enumerate(told[len(usual) :]):
        assert told[4 * number : 4 * number + 4] == [expected] * 4, asked[number]


@pytest.mark.parametrize(("world", "stage"), [(1, 0), (2, 1), (2, 3)])
@on_ranks("world")
def test_a_step_that_has_no_place_in_the_tree_leaves_it_by_default(world: int, stage: int) -> None:
    """Four micro-batches come where two were announced, and a gradient is read after the first."""
    found = []
    for order in ("auto", "rank"):
        engine = make(config(stage, "fp32", 2, precision={"reduce": {"order": order}}, **MOMENTUM), GPT())
        for micro in range(4):
            engine.backward(engine(batch(0, engine.mesh.rank(), micro)))
            assert micro or engine.parameter("norm.weight").gradient.any()
        assert engine.plan.policy.tree is (order == "auto") and engine.step().updated
        found.append(masters(engine))
    for name, one in found[0].items():
        torch.testing.assert_close(one, found[1][name], rtol=1e-5, atol=1e-7, msg=name)


def plain(total: int, model: str, seed: int) -> dict[str, Tensor]:
    """Train in fp32 on one process: single gradients, summed by the tree, updated by torch's SGD."""
    network = MODELS[model]()
    parameters = list(network.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for step in range(STEPS):
        leaves = []
        for number in range(total):
            torch.manual_seed(seed_of(seed, step, number))
            leaves.append(
                torch.autograd.grad(network(batch(step, number)), parameters, materialize_grads=True)
            )
        for parameter, gradients in zip(parameters, zip(*leaves, strict=True), strict=True):
            parameter.grad = level_by_level([gradient.detach() for gradient in gradients]) / total
        optimizer.step()
    return {name: value.detach() for name, value in network.named_parameters()}


MOMENTUM = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
    "gradient_clipping": 0.0,
}
WAYS: list[tuple[int, str, Carrier, int]] = [
    (0, "last", "pairs", 8),
    (0, "every", "native", 4),
    (1, "last", "native", 4),
    (2, "every", "pairs", 4),
    (3, "last", "pairs", 4),
]
"""(stage, when, carrier of the sums, least ranks for sums by halves)."""


@pytest.mark.parametrize(("total", "model"), [(4, "dense"), (8, "dropout")])
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.long
@on_ranks("world")
def test_a_plain_loop_that_sums_by_the_tree_has_the_same_bits(world: int, total: int, model: str) -> None:
    expected = plain(total, model, 5)
    for stage, when, carrier, halving in WAYS:
        engine = Cell(stage, when, model=model, total=total, rest=MOMENTUM).engine()
        engine.seed = 5
        if not engine.mesh.asynchronous:  # a device has one carrier
            engine.comm.calls = carrier
        collectives.HALVING, collectives.SMALL = dict.fromkeys(collectives.HALVING, halving), 0
        for step in range(STEPS):
            numbers = engine.micro_batches_of_this_rank()
            engine.train_batch([{"tokens": batch(step, number)} for number in numbers])
        with engine.gathered() as found:
            wrong = diff(expected, {name: found[name] for name in expected})
            assert wrong == [], (stage, when, carrier, wrong)


@on_ranks(2)
def test_what_has_no_place_in_the_tree_is_an_error_that_says_so() -> None:
    """The engine goes on after the error."""
    engine = Cell(1, "last").engine()
    first = next(engine.module.parameters())

    def attempt(act: Callable[[], Any], told: str) -> None:
        with pytest.raises(UnsupportedError, match=f"(?s)order: tree.*{told}|{told}.*order: tree"):
            act()
        engine.zero_grad()

    def backward(number: int = 0) -> None:
        engine.backward(engine(batch(0, number)))

    backward()
    attempt(lambda: engine.parameter("norm.weight").gradient, "a step that is not complete")
    backward(), backward()
    first.grad = torch.ones_like(first)
    attempt(engine.step, "set in `param.grad`")
    backward(), backward()
    attempt(backward, "whose sum is complete")
    backward()
    engine.progress.accumulation = 3
    backward(), backward()
    attempt(engine.step, "3 on each of 2 ranks")
    engine.progress.accumulation = 2
    backward(0), backward(1)
    assert engine.parameter("norm.weight").gradient.abs().sum() > 0
    assert engine.step().updated


class Putting(GPT):
    """A GPT with an operation that has no deterministic form in torch."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = super().logits(tokens)
        return x.put(torch.tensor([0]), x.detach().view(-1)[:1])


@on_ranks(1)
def test_operations_that_are_not_deterministic_are_refused_by_name() -> None:
    """torch's switch is on as long as the engine lives."""
    on = torch.are_deterministic_algorithms_enabled
    assert not on()
    engine, other = (Cell(1, "every", model=lambda: Putting(layers=1), total=1).engine() for _ in range(2))
    assert on() and not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    other.destroy()
    assert on()
    with pytest.raises(UnsupportedError, match="must be `rank` with `put_`"):
        engine(batch(0))
    engine.destroy()
    assert not on()


@pytest.mark.parametrize("cached", [0, 1 << 20])
def test_no_negative_zero_lands(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "CACHED", cached)
    rows = [SimpleNamespace(offset=offset, numel=12) for offset in (0, 16, 32, 48)]
    landing, zero = torch.full((64,), torch.nan), torch.tensor([-0.0, 1.0, -2.0]).repeat(4)
    arrived = [zero, None, zero.double(), zero.to_sparse()]
    accumulation.LandingLayout(cast(Any, rows), 64).fill(landing, arrived, negative_zeros=False)
    assert torch.equal(landing.view(4, 16)[:, :12], torch.stack([zero, 0 * zero, zero, zero]))
    assert not landing[landing == 0].signbit().any() and landing.isfinite().all()
