"""`reduce.order: tree` has the same bits on any number of ranks, and those of a plain loop that sums by the
tree.

The loop here adds the gradients of a step's micro-batches level by level over their numbers, which is how
the tree is defined, and uses nothing of zerodrift but the seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, make, train
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.comm import collectives
from zerodrift.comm.collectives import Carrier
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


class Averaged(GPT):
    """A GPT with a running mean in a buffer, and dropout by torch's generator, as in most models."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.register_buffer("mean", torch.zeros(()))

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        self.mean.lerp_(x.detach().mean(), 0.5)
        return self.head(self.norm(nn.functional.dropout(self.layers[0](x), 0.3, self.training)))


def doubles(engine: Engine) -> None:
    parameter = engine.parameter("norm.weight")
    parameter.gradient = 2 * parameter.gradient


def puts(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = torch.full(parameter.shape, 0.25)


def accumulates(count: int) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.progress, "accumulation", count)


HABITS: dict[str, list[int | Callable[[Engine], object]]] = {
    "a gradient that is read": [0, lambda engine: engine.parameter("norm.weight").gradient, 1, Engine.step],
    "a gradient that is assigned": [0, doubles, 1, Engine.step],
    "gradients by hand": [0, 1, puts, Engine.step],
    "a micro-batch too many": [0, 1, 2, 5, Engine.step],
    "three for two": [accumulates(3), 0, 1, 2, Engine.step, accumulates(2)],
    "a step anew": [0, Engine.zero_grad, 1, 2, Engine.step],
}
"""Name -> numbers of micro-batches to go backward through, and calls of the engine between them."""


def follow(engine: Engine, habit: Iterable[int | Callable[[Engine], object]]) -> None:
    for act in habit:
        if callable(act):
            act(engine)
        else:
            torch.manual_seed(act)
            engine.backward(engine(batch(0, act + 7 * engine.mesh.rank())))


def habits(stages: tuple[int, ...]) -> list[str]:
    """Return the stages and habits after which the default and the order of ranks differ in weights."""
    differs = []
    for stage, habit in itertools.product(stages, HABITS):
        found = []
        for order in ("auto", "rank"):
            written = config(stage, "fp32", 2, precision={"reduce": {"order": order}}, **MOMENTUM)
            engine = make(written, Averaged())
            assert engine.plan.policy.tree is (order == "auto")
            try:
                follow(engine, HABITS[habit])
            except UnsupportedError as error:
                found.append({"": torch.zeros(())})
                assert "order" not in str(error), error
                engine.destroy()
                continue
            follow(engine, [3, 4])  # and goes on by the tree
            assert engine.step().updated
            with engine.gathered() as values:
                found.append({name: value.clone() for name, value in values.items()})
            engine.destroy()
        one, other = found
        wrong = [n for n in one.keys() | other.keys() if not torch.allclose(one[n], other[n], 1e-5, 1e-7)]
        differs += [f"stage {stage}, {habit}: {wrong}"] if wrong else []
    return differs


@pytest.mark.parametrize(
    ("world", "stages"),
    [
        (1, (0, 2)),
        (2, (1, 3)),
        *(pytest.param(world, (0, 1, 2, 3), marks=pytest.mark.slow) for world in (1, 2)),
    ],
)
@on_ranks("world", timeout=250)
def test_the_default_refuses_nothing_that_the_order_of_ranks_does_not(
    world: int, stages: tuple[int, ...]
) -> list[str]:
    return habits(stages)


@pytest.mark.long
def test_three_and_six_micro_batches_are_the_same_bits_on_one_and_three_ranks() -> None:
    three = Cell(2, "every", "bf16", "dropout", total=3)
    require_same([Cell(1, "last", "bf16", total=6), Cell(3, "last", total=6), three], (1, 3))
    require_same([Cell(2, "every", "bf16", "moe", total=6)], (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16", "autocast-bf16"])
@pytest.mark.parametrize("total", [4, 8])
@pytest.mark.parametrize("state", ["fp32", "8bit", "bf16-stochastic"])
def test_the_product_of_all(mode: str, total: int, state: str) -> None:
    cells = [
        Cell(stage, when, mode, model, total, state)
        for stage in range(4)
        for when in ("last", "every")
        for model in ("dense", "moe", "dropout")
    ]
    told = require_same(cells, WORLDS)
    for place in range(3):
        assert all(each == told[place] for each in told[place::3]), "stages and times differ"


def level_by_level(leaves: list[Tensor]) -> Tensor:
    while len(leaves) > 1:
        pairs = [leaves[start : start + 2] for start in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


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
            engine.comm.carrier = carrier
        collectives.HALVING = dict.fromkeys(collectives.HALVING, halving)
        for step in range(STEPS):
            numbers = engine.micro_batches_of_this_rank()
            engine.train_batch([{"tokens": batch(step, number)} for number in numbers])
        with engine.gathered() as found:
            wrong = diff(expected, {name: found[name] for name in expected})
            assert wrong == [], (stage, when, carrier, wrong)


def test_the_order_of_ranks_has_other_bits() -> None:
    """The equality above can fail."""
    found = [run_ranks(by_rank, world)[0] for world in (1, 4)]
    assert found[0] != found[1]


def by_rank() -> str:
    engine = make(
        config(1, "fp32", 8 // _world(), precision={"reduce": {"order": "rank"}}), MODELS["dense"]()
    )
    for number in engine.micro_batches_of_this_rank():
        engine.backward(engine(batch(0, number)))
    engine.step()
    return str(engine.digest())


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
    attempt(engine.step, "put into `param.grad`")
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


@on_ranks(2)
def test_gradients_by_hand_are_one_part_of_the_tree() -> None:
    engine = Cell(1, "every", total=2).engine()
    for parameter in engine.module.parameters():
        parameter.grad = torch.full_like(parameter, engine.mesh.rank() + 1.0)
    norm, count = engine.step().grad_norm, sum(row.numel for row in engine.plan.rows)
    assert norm == pytest.approx(1.5 * count**0.5, rel=1e-6), norm


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


@on_ranks(2)
def test_sums_are_left_to_the_carrier_where_that_is_asked() -> None:
    """Sums use the backend's own call, as on NCCL."""
    reduce_scatter, calls, left = torch.distributed.reduce_scatter_single, [], []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(left))
        return reduce_scatter(*args, **kwargs)

    torch.distributed.reduce_scatter_single = counted
    for order in ("rank", "native"):
        engine = make(config(3, "bf16", 2, precision={"reduce": {"order": order}}), GPT(layers=1))
        engine.comm.carrier = "native"
        train(engine, STEPS, 2)
        left.append(engine.digest())
    torch.distributed.reduce_scatter_single = reduce_scatter
    assert set(calls) == {1}, "with `native` alone"
    assert left[0] == left[1], "two parts have but one order"
