"""A forward and a backward in turns, under DualPipeV with experts on several ranks: the bits of a
sequence, and the overlap of products with exchanges."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.numerics.experts import EXPERTS, WIDTH, Layer
from tests.numerics.runs import Run, config, masters_and_states
from tests.numerics.test_pipelines import pipeline
from tests.ranks.harness import on_ranks
from tests.ranks.test_failures import Bomb
from tests.ranks.test_pipeline_failures import SOON, until_it_ends
from zerodrift.comm.collectives import Handle
from zerodrift.engine.engine import Engine
from zerodrift.experts.turns import Turns
from zerodrift.pipeline.cut import Parts

COUNT, LAYERS = 5, 8


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Network(nn.Module):
    def __init__(self, dense: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            Dense() if number in dense else Layer((0.0,) * EXPERTS, 0) for number in range(LAYERS)
        )
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(WIDTH, 1)


def parts(recompute: bool) -> Parts:
    def each(model: Any, layer: Any, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        def run(hidden: torch.Tensor) -> torch.Tensor:
            return model.dropout(layer(hidden))

        if recompute:
            out: torch.Tensor = checkpoint(run, hidden, use_reentrant=False)
            return out
        return run(hidden)

    return Parts(
        "layers",
        before=lambda model, x: model.first(x),
        each=each,
        after=lambda model, hidden, x: (model.last(hidden) ** 2).mean().float(),
    )


def data(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(18, WIDTH, generator=generator) for _ in range(COUNT)]


def engine_of(
    mode: str = "fp32",
    stage: int = 0,
    *,
    dense: tuple[int, ...] = (),
    dropout: float = 0.0,
    recompute: bool = False,
    weights: str | None = None,
    **rest: Any,
) -> Engine:
    written = {**config(stage, mode, COUNT, **rest), "experts": {"ranks": 2}}
    model = Network(dense, dropout)
    return pipeline(written, "dualpipev", weights, model, parts(recompute), micro_batches=COUNT)


def one_after_the_other(turns: Turns, first: Any, second: Any) -> None:
    first()
    second()


def train_steps(mode: str, stage: int, **how: Any) -> tuple[Run, int]:
    """Train two steps; return the run and the number of pairs."""
    engine, pairs, run = engine_of(mode, stage, **how), [], Run()
    torch.manual_seed(5)
    turn = engine.executor.turns.run

    def counted(first: Any, second: Any) -> None:
        pairs.append(1)
        turn(first, second)

    engine.executor.turns.run = counted
    for step in range(2):
        result = engine.train_batch(data(step, engine.mesh.rank("data")))
        run.losses += result.losses
        run.norms.append(result.step.grad_norm)
    run.scales.append(float(torch.rand(())))  # the generator is where it was
    run.masters, run.states = masters_and_states(engine)
    return run, len(pairs)


CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed, with dropout, uneven": ("fp32", 0, {"recompute": True, "dropout": 0.2, "dense": (1, 5)}),
    "sliced": ("bf16", 3, {"precision": {"reduce": {"when": "every"}}}),
    "autocast, by autograd": ("autocast-bf16", 1, {"recompute": True, "weights": "autograd"}),
}
FIRST, *OTHERS = CELLS


@pytest.mark.parametrize("cell", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@on_ranks(4, timeout=120)
def test_in_turns_has_the_bits_of_one_after_the_other(cell: str) -> None:
    mode, stage, how = CELLS[cell]
    in_turns, pairs = train_steps(mode, stage, **how)
    turn, Turns.run = Turns.run, one_after_the_other  # type: ignore[method-assign]
    expected, _ = train_steps(mode, stage, **how)
    Turns.run = turn  # type: ignore[method-assign]
    assert len(set(expected.losses)) == 2 * COUNT
    assert expected.differs(in_turns) == [] and pairs > 0


Event = tuple[str, str]
"""(`forward` or `backward`; `begins` or `ends` of an exchange, or `computes`)."""


class Products(TorchDispatchMode):
    def __init__(self, log: list[Event]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self._log.append((who(), "computes"))
        return func(*args, **(kwargs or {}))


def who() -> str:
    return "forward" if threading.current_thread() is threading.main_thread() else "backward"


def pairs_of(**how: Any) -> list[list[Event]]:
    """Return the events in each pair of a step."""
    engine, pairs, log = engine_of(**how), [], []
    comm, run = engine.comm, engine.executor.turns.run
    start = comm.start_all_to_all

    def started(rows: torch.Tensor, *where: Any) -> tuple[torch.Tensor, Handle]:
        arrived, under_way = start(rows, *where)
        if not rows.is_floating_point():
            return arrived, under_way  # counts
        log.append((who(), "begins"))

        def wait() -> None:
            under_way.wait()
            log.append((who(), "ends"))

        return arrived, Handle(wait)

    def pair(first: Any, second: Any) -> None:
        log.clear()
        run(first, second)
        pairs.append(list(log))

    comm.start_all_to_all, engine.executor.turns.run = started, pair
    with Products(log):
        engine.train_batch(data(0, engine.mesh.rank("data")))
    return pairs


def beside(pair: list[Event], whose: str) -> list[int]:
    """Count, for each exchange of one side, the products of the other during it."""
    found, travels = [], False
    for name, what in pair:
        if name == whose and what == "begins":
            found.append(0)
        if name == whose:
            travels = what == "begins"
        elif travels and what == "computes":
            found[-1] += 1
    return found


@on_ranks(4)
def test_while_an_exchange_of_one_travels_the_other_computes() -> None:
    pairs = pairs_of()
    assert len(pairs) >= 2
    for pair in pairs:
        # Two layers of each: tokens to their experts and back, and their gradients.
        assert [name for name, what in pair if what == "begins"] == ["backward", "forward"] * 4, pair
        assert min(*beside(pair, "forward"), *beside(pair, "backward")) > 0, pair


@pytest.mark.slow
@on_ranks(4)
def test_where_a_piece_exchanges_nothing_one_comes_after_the_other() -> None:
    """The first piece is on the first of two stages, with the last; so those two ranks have no pair."""
    assert (len(pairs_of(dense=(0, 1))) > 0) == (torch.distributed.get_rank() > 1)


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@on_ranks(4)
def test_what_raises_in_a_pair_ends_all_ranks_with_that_one_error(where: str) -> None:
    """Rank 1 raises in the first pair of a second step, after its first exchange."""
    engine = engine_of()
    batches = data(0, engine.mesh.rank("data"))
    engine.train_batch(batches)
    run, bomb = engine.executor.turns.run, Bomb()
    for piece in engine.executor.forwards:
        for layer in piece.module.layers:
            if isinstance(layer, Layer):
                layer.register_forward_hook(lambda module, args, output: bomb(output))

    def pair(first: Any, second: Any) -> None:
        if engine.mesh.rank() == 1:
            bomb.armed = where
        run(first, second)

    engine.executor._schedules.clear()
    engine.executor.turns.run = pair
    first, seconds = until_it_ends(lambda: engine.train_batch(batches))
    again, more = until_it_ends(lambda: engine.train_batch(batches))
    engine.destroy()
    assert all(thread.name != "zerodrift-turn" for thread in threading.enumerate())
    said = f"got Boom: {where} on rank 1"
    assert first == f"Boom: {where}" if engine.mesh.rank() == 1 else said in first, first
    assert said in again and seconds < SOON and more < SOON, again
