"""`reduce.order: tree`: the same bits on any number of ranks, and as a plain loop that sums by the tree.

The loop here adds the gradients of a step's micro-batches level by level over their numbers, which is how
the tree is defined, and uses nothing of zerodrift but the seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import Run, config, finish, make, train
from tests.ranks.harness import run_ranks
from zerodrift.comm import collectives, native
from zerodrift.comm.collectives import Carrier
from zerodrift.engine.engine import Engine
from zerodrift.engine.habits.microbatch_state import seed_of
from zerodrift.errors import UnsupportedError

STEPS = 2
"""The second with moments of the first; one more where the first is skipped."""
WORLDS = (1, 2, 4)


class Dropping(GPT):
    """With dropout behind its embedding."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(tokens), 0.3, self.training)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Recomputed(GPT):
    """Runs each block under a reentrant checkpoint; where that is twice, its gradients come twice."""

    def __init__(self, layers: int, times: int = 1) -> None:
        super().__init__(layers)
        self.times = times

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            for _ in range(self.times):
                x = checkpoint(layer, x, use_reentrant=True)
        if self.times > 1:  # the first block, after the others
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return self.head(self.norm(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: GPT(layers=1),
    "moe": lambda: GPT(layers=1, moe=True),
    "dropout": lambda: Dropping(layers=1),
    "recomputed": lambda: Recomputed(layers=2),
    "twice": lambda: Recomputed(layers=2, times=2),
}


@dataclass(frozen=True)
class Cell:
    """One training run, on whatever number of ranks."""

    stage: int
    when: str
    mode: str = "fp32"
    model: str = "dense"
    total: int = 4
    """Micro-batches of a step, over all ranks."""
    state: str = "fp32"
    replicate: int = 1
    rest: dict[str, Any] = field(default_factory=dict, hash=False)

    def written(self, ranks: int) -> dict[str, Any]:
        precision: dict[str, Any] = {"reduce": {"order": "tree", "when": self.when}, "state": self.state}
        if self.model == "moe" and self.mode != "fp32":
            precision["rules"] = [{"match": "*.router.*", "pin": "fp32"}]
        sharding = {"replicate": self.replicate} if 1 < self.replicate <= ranks else {}
        more = {"fp16": {"initial_scale_power": 17, "hysteresis": 1}} if "fp16" in self.mode else {}
        written = config(self.stage, self.mode, self.total // ranks, precision=precision, **more, **self.rest)
        return {**written, "sharding": sharding}


def trained(cell: Cell) -> str:
    """On one rank: a digest of everything that a run leaves."""
    engine = make(cell.written(_world()), MODELS[cell.model]())
    run = Run()
    for step in range(STEPS + ("fp16" in cell.mode)):
        for number in engine.micro_batches_of_this_rank():
            engine.seed_micro_batch(number)
            engine.backward(engine(batch(step, number)))
            result = engine.step()
        run.norms.append(result.grad_norm)
        run.scales.append(result.loss_scale)
    finish(engine, run)
    skipped = engine.skipped_steps
    engine.destroy()
    assert bool(skipped) is ("fp16" in cell.mode), f"{skipped} skipped steps"
    return digest(run)


def _world() -> int:
    return torch.distributed.get_world_size()


def digest(run: Run) -> str:
    found = hashlib.sha256(str((run.norms, run.scales)).encode())
    for values in (run.weights, run.masters, *(run.states[name] for name in sorted(run.states))):
        for name in sorted(values):
            found.update(name.encode())
            found.update(values[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained_all(cells: list[Cell]) -> list[str]:
    return [trained(cell) for cell in cells]


def require_same(cells: list[Cell], worlds: tuple[int, ...]) -> list[str]:
    """Every cell alike on every number of ranks; the digests."""
    told = {world: run_ranks(trained_all, world, cells, timeout=250)[0] for world in worlds}
    first = told[worlds[0]]
    for world in worlds[1:]:
        differs = [
            str(cell) for cell, one, other in zip(cells, first, told[world], strict=True) if one != other
        ]
        assert differs == [], f"{world} ranks differ from {worlds[0]}"
    return first


# --- across numbers of ranks ------------------------------------------------------------------------------

FEW = [
    Cell(0, "every", "bf16", "moe"),
    Cell(1, "every", "fp16", total=8),
    Cell(1, "last", "fp16", total=8),
    Cell(2, "every", "bf16", "dropout", state="bf16-stochastic"),
    Cell(2, "last", "bf16", "dropout", state="bf16-stochastic"),
    Cell(3, "every", "autocast-bf16", "moe", total=8, state="8bit"),
    Cell(3, "last", "bf16", "twice"),
    Cell(3, "every", "bf16", "twice"),
    Cell(3, "every", "bf16", replicate=2),
    Cell(2, "every", "bf16", replicate=4),
    Cell(1, "last", "bf16", "recomputed", replicate=2, total=8),
]


@pytest.mark.long
def test_one_two_and_four_ranks_are_the_same_bits() -> None:
    """Weights, masters, moments, norms and loss scales; pairs of cells that differ in stage alone too."""
    told = dict(zip(FEW, require_same(FEW, WORLDS), strict=True))
    for one, other in ((1, 2), (3, 4), (6, 7), (8, 9)):
        assert told[FEW[one]] == told[FEW[other]]
    assert len(set(told.values())) == len(FEW) - 4


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
        assert len(set(told[place::3])) == 1, "stages and times differ"


# --- a plain loop -----------------------------------------------------------------------------------------


def level_by_level(leaves: list[Tensor]) -> Tensor:
    while len(leaves) > 1:
        pairs = [leaves[start : start + 2] for start in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def plain(total: int, model: str, seed: int) -> dict[str, Tensor]:
    """fp32, on one process: every gradient by itself, summed by the tree, updated by torch's SGD."""
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


def engine_of(stage: int, when: str, total: int, model: str) -> Engine:
    written = config(stage, "fp32", total // _world(), precision={"reduce": {"order": "tree", "when": when}})
    written |= {
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "gradient_clipping": 0.0,
    }
    return make(written, MODELS[model]())


PLAIN = ((4, "dense"), (8, "dropout"))


WAYS: list[tuple[int, str, Carrier, int]] = [
    (0, "last", "pairs", 8),
    (0, "every", "native", 4),
    (1, "last", "native", 4),
    (2, "every", "pairs", 4),
    (3, "last", "pairs", 4),
]
"""(stage, when, what carries the sums, from how many ranks by halves)."""


def beside_a_plain_loop(expected: list[dict[str, Tensor]]) -> list[str]:
    differs = []
    for (total, model), values in zip(PLAIN, expected, strict=True):
        for stage, when, carrier, halving in WAYS:
            torch.manual_seed(5)
            engine = engine_of(stage, when, total, model)
            engine.seed = 5
            engine.comm.carrier = carrier
            collectives.HALVING = dict.fromkeys(collectives.HALVING, halving)
            for step in range(STEPS):
                numbers = engine.micro_batches_of_this_rank()
                engine.train_batch([{"tokens": batch(step, number)} for number in numbers])
            with engine.gathered() as found:
                differs += [
                    f"{name}: {total} of {model} at stage {stage}, {when}, {carrier}"
                    for name, value in values.items()
                    if not torch.equal(found[name], value)
                ]
            engine.destroy()
    return differs


@pytest.mark.parametrize("world", WORLDS)
def test_a_plain_loop_that_sums_by_the_tree_has_the_same_bits(world: int) -> None:
    expected = [plain(total, model, 5) for total, model in PLAIN]
    assert run_ranks(beside_a_plain_loop, world, expected) == [[]] * world


def test_the_order_of_ranks_has_other_bits() -> None:
    """So that equality above says something."""
    found = [run_ranks(by_rank, world)[0] for world in (1, 4)]
    assert found[0] != found[1]


def by_rank() -> str:
    engine = make(config(1, "fp32", 8 // _world()), MODELS["dense"]())
    for number in engine.micro_batches_of_this_rank():
        engine.backward(engine(batch(0, number)))
    engine.step()
    run = Run()
    finish(engine, run)
    engine.destroy()
    return digest(run)


# --- what is refused while it runs ------------------------------------------------------------------------


def refused() -> list[str]:
    """What each misuse is told, and that the engine goes on after it."""
    engine = make(Cell(1, "last").written(_world()), MODELS["dense"]())
    first = next(engine.module.parameters())
    told = []

    def attempt(act: Callable[[], Any]) -> None:
        with pytest.raises(UnsupportedError) as caught:
            act()
        told.append(str(caught.value))
        engine.zero_grad()

    def backward(number: int = 0) -> None:
        engine.backward(engine(batch(0, number)))

    backward()
    attempt(lambda: engine.parameter("norm.weight").gradient)
    backward(), backward()
    first.grad = torch.ones_like(first)
    attempt(engine.step)
    backward(), backward()
    attempt(backward)
    backward()
    engine.progress.accumulation = 3
    backward(), backward()
    attempt(engine.step)
    engine.progress.accumulation = 2
    backward(0), backward(1)
    assert engine.parameter("norm.weight").gradient.abs().sum() > 0
    assert engine.step().updated
    engine.destroy()
    return told


def test_what_has_no_place_in_the_tree_is_an_error_that_says_so() -> None:
    for told in run_ranks(refused, 2):
        for text, word in zip(told, WORDS, strict=True):
            assert word in text
            assert "order: tree" in text


WORDS = (
    "a step that is not complete",
    "put into `param.grad`",
    "whose sum is complete",
    "3 on each of 2 ranks",
)


def one_by_hand() -> tuple[float | None, int]:
    """The norm where rank r has put r + 1 into every gradient; and how many elements there are."""
    engine = make(Cell(1, "every", total=_world()).written(_world()), MODELS["dense"]())
    for parameter in engine.module.parameters():
        parameter.grad = torch.full_like(parameter, engine.mesh.rank() + 1.0)
    result = engine.step()
    count = sum(row.numel for row in engine.plan.rows)
    engine.destroy()
    return result.grad_norm, count


def test_gradients_by_hand_are_one_part_of_the_tree() -> None:
    for norm, count in run_ranks(one_by_hand, 2):
        assert norm == pytest.approx(1.5 * count**0.5, rel=1e-6)


class Putting(GPT):
    """Uses an operation that torch has no deterministic form of."""

    def logits(self, tokens: Tensor) -> Tensor:
        x = super().logits(tokens)
        return x.put(torch.tensor([0]), x.detach().view(-1)[:1])


def with_another_operation() -> tuple[list[bool], str]:
    """torch's switch before, with two engines, with one of them, and after; and what is said of the model."""
    on = torch.are_deterministic_algorithms_enabled
    switches = [on()]
    engine, other = (make(Cell(1, "every", total=1).written(1), Putting(layers=1)) for _ in range(2))
    switches.append(on() and not torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]
    other.destroy()
    switches.append(on())
    text = ""
    try:
        engine(batch(0))
    except UnsupportedError as error:
        text = str(error)
    engine.destroy()
    return [*switches, on()], text


def test_operations_that_are_not_deterministic_are_refused_by_name() -> None:
    switches, text = run_ranks(with_another_operation, 1)[0]
    assert switches == [False, True, True, False]
    assert "must be `rank` with `put_`" in text


# --- left to the carrier ----------------------------------------------------------------------------------


def left_to_the_carrier(order: str) -> tuple[str, int]:
    """A digest of some steps where reductions go through the backend's own call, as on NCCL; and how many of
    them it has summed itself."""
    written = config(3, "bf16", 2, precision={"reduce": {"order": order}})
    engine = make(written, GPT(layers=1))
    engine.comm.carrier = "native"
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return reduce_scatter(*args, **kwargs)

    reduce_scatter, native._reduce_scatter_single = native._reduce_scatter_single, counted
    run = train(engine, STEPS, 2)
    native._reduce_scatter_single = reduce_scatter
    engine.destroy()
    return digest(run), calls


def test_sums_are_left_to_the_carrier_where_that_is_asked() -> None:
    (ours, none), (carried, calls) = (
        run_ranks(left_to_the_carrier, 2, order)[0] for order in ("rank", "native")
    )
    assert none == 0 and calls > 0
    assert carried == ours  # two parts have but one order
