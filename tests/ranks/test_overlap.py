"""A forward and a backward in turns, under DualPipeV with experts on several ranks: the bits of a
sequence, and the overlap of products with exchanges."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.numerics.experts import EXPERTS, WIDTH, Layer
from tests.numerics.runs import Run, config, masters_and_states
from tests.numerics.test_pipelines import pipeline
from tests.ranks.harness import on_ranks
from tests.ranks.test_failures import SOON, Bomb, until_it_ends
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


def engine_of(dense: tuple[int, ...] = (), recompute: bool = False) -> Engine:
    written = {**config(0, "fp32", COUNT), "experts": {"ranks": 2}}
    model = Network(dense, 0.2 if recompute else 0.0)
    return pipeline(written, "dualpipev", None, model, parts(recompute), micro_batches=COUNT)


def one_after_the_other(turns: Turns, first: Any, second: Any) -> None:
    first()
    second()


def train_steps() -> tuple[Run, int]:
    """Train two steps of pieces that are recomputed, with dropout, and uneven; return the run and the number
    of pairs."""
    engine, pairs, run = engine_of(dense=(1, 5), recompute=True), [], Run()
    torch.manual_seed(5)
    turn = engine.executor.turns.run
    engine.executor.turns.run = lambda first, second: pairs.append(1) or turn(first, second)
    for step in range(2):
        result = engine.train_batch(data(step, engine.mesh.rank("data")))
        run.losses += result.losses
        run.norms.append(result.step.grad_norm)
    run.scales.append(float(torch.rand(())))  # the generator is where it was
    run.masters, run.states = masters_and_states(engine)
    return run, len(pairs)


@on_ranks(4, timeout=120)
def test_in_turns_has_the_bits_of_one_after_the_other() -> None:
    in_turns, pairs = train_steps()
    turn, Turns.run = Turns.run, one_after_the_other  # type: ignore[method-assign]
    expected, _ = train_steps()
    Turns.run = turn  # type: ignore[method-assign]
    assert len(set(expected.losses)) == 2 * COUNT
    assert expected.differs(in_turns) == [] and pairs > 0


class ProductsMeanwhile(TorchDispatchMode):
    """Count, for each exchange of one side of a pair, the products of the other while it travels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, list[int]] = {"forward": [], "backward": []}
        self.travelling: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            for side in self.travelling - {this_side()}:
                self.counts[side][-1] += 1
        return func(*args, **(kwargs or {}))


def this_side() -> str:
    return "forward" if threading.current_thread() is threading.main_thread() else "backward"


@on_ranks(4)
def test_while_an_exchange_of_one_travels_the_other_computes() -> None:
    engine, pairs, seen = engine_of(), [], ProductsMeanwhile()
    comm, run = engine.comm, engine.executor.turns.run
    start = comm.start_all_to_all

    def started(rows: torch.Tensor, *where: Any) -> tuple[torch.Tensor, Handle]:
        arrived, under_way = start(rows, *where)
        if not rows.is_floating_point():
            return arrived, under_way  # counts
        side = this_side()
        seen.counts[side].append(0)
        seen.travelling.add(side)

        def wait() -> None:
            under_way.wait()
            seen.travelling.discard(side)

        return arrived, Handle(wait)

    def pair(first: Any, second: Any) -> None:
        seen.counts = {"forward": [], "backward": []}
        run(first, second)
        pairs.append({side: list(counts) for side, counts in seen.counts.items()})

    comm.start_all_to_all, engine.executor.turns.run = started, pair
    with seen:
        engine.train_batch(data(0, engine.mesh.rank("data")))
    assert len(pairs) >= 2
    for counts in pairs:
        # Two layers of each: tokens to their experts and back, and their gradients.
        assert all(len(each) == 4 and min(each) > 0 for each in counts.values()), counts


@on_ranks(4)
def test_what_raises_in_a_pair_ends_all_ranks_with_that_one_error() -> None:
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
            bomb.armed = "forward"
        run(first, second)

    engine.executor._schedules.clear()
    engine.executor.turns.run = pair
    first, seconds = until_it_ends(lambda: engine.train_batch(batches))
    again, more = until_it_ends(lambda: engine.train_batch(batches))
    engine.destroy()
    assert all(thread.name != "zerodrift-turn" for thread in threading.enumerate())
    said = "got Boom: forward on rank 1"
    assert first == "Boom: forward" if engine.mesh.rank() == 1 else said in first, first
    assert said in again and seconds < SOON and more < SOON, again
