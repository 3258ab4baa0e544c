"""A forward and a backward in turns, under DualPipeV with experts on several ranks: the bits of one after the
other, and what computes while what travels."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.numerics.experts import EXPERTS, WIDTH, Layer
from tests.numerics.runs import config, masters_and_states
from tests.ranks.harness import run_ranks
from tests.ranks.test_failures import Boom
from tests.ranks.test_pipeline_failures import SOON, until_it_ends
from zerodrift.api import initialize
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
    **rest: Any,
) -> Engine:
    torch.set_num_threads(1)
    block = {"stages": 2, "schedule": "dualpipev", "micro_batches": COUNT, **rest.pop("pipeline", {})}
    written = {**config(stage, mode, COUNT, **rest), "experts": {"ranks": 2}, "pipeline": block}
    model = Network(dense, dropout)
    return initialize(model, config=written, parts=parts(recompute), device="cpu", quiet=True)


def one_after_the_other(turns: Turns, first: Any, second: Any) -> None:
    first()
    second()


def trained(mode: str, stage: int, **how: Any) -> tuple[dict[str, Any], int]:
    """Two steps; and how many pairs there were."""
    engine, pairs = engine_of(mode, stage, **how), []
    torch.manual_seed(5)
    run = engine.executor.turns.run

    def counted(first: Any, second: Any) -> None:
        pairs.append(1)
        run(first, second)

    engine.executor.turns.run = counted
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(2):
        result = engine.train_batch(data(step, engine.mesh.rank("data")))
        found["losses"] += result.losses
        found["norms"].append(result.step.grad_norm)
    found["random"] = torch.rand(())
    found["masters"], found["states"] = masters_and_states(engine)
    engine.destroy()
    return found, len(pairs)


def differences(mode: str, stage: int, how: dict[str, Any]) -> tuple[list[str], int]:
    run = Turns.run
    in_turns, pairs = trained(mode, stage, **how)
    Turns.run = one_after_the_other  # type: ignore[method-assign]
    try:
        expected, _ = trained(mode, stage, **how)
    finally:
        Turns.run = run  # type: ignore[method-assign]
    wrong = [key for key in ("losses", "norms", "random") if in_turns[key] != expected[key]]
    for name, value in expected["masters"].items():
        wrong += [] if torch.equal(value, in_turns["masters"][name]) else [name]
    for name, states in expected["states"].items():
        wrong += [
            f"{name} {key}"
            for key, value in states.items()
            if not torch.equal(torch.as_tensor(value), torch.as_tensor(in_turns["states"][name][key]))
        ]
    assert len(set(expected["losses"])) == 2 * COUNT
    return wrong, pairs


AUTOGRAD = {"weight_grads": "autograd"}
CELLS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "recomputed, with dropout, uneven": ("fp32", 0, {"recompute": True, "dropout": 0.2, "dense": (1, 5)}),
    "sliced": ("bf16", 3, {"precision": {"reduce": {"when": "every"}}}),
    "autocast, by autograd": (
        "autocast-bf16",
        1,
        {"recompute": True, "pipeline": {"weight_grads": "autograd"}},
    ),
}


@pytest.mark.parametrize(
    "cell",
    [name if not number else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(CELLS)],
)
def test_in_turns_has_the_bits_of_one_after_the_other(cell: str) -> None:
    reports = run_ranks(differences, 4, *CELLS[cell], timeout=120)
    assert [wrong for wrong, _ in reports] == [[]] * 4
    assert [pairs > 0 for _, pairs in reports] == [True] * 4


# --- what happens beside what ------------------------------------------------------------------------------

Event = tuple[str, str]
"""(who, what): of `forward` and `backward`, `begins` and `ends` of an exchange, `computes`."""


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


def pairs_of(how: dict[str, Any]) -> list[list[Event]]:
    """What happens in each pair of a step."""
    engine, pairs, log = engine_of(**how), [], []
    comm, run = engine.comm, engine.executor.turns.run
    start = comm.start_all_to_all

    def started(rows: torch.Tensor, *where: Any) -> tuple[torch.Tensor, Handle]:
        if not rows.is_floating_point():
            return start(rows, *where)  # counts
        arrived, under_way = start(rows, *where)
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
    engine.destroy()
    return pairs


def beside(pair: list[Event], whose: str) -> list[int]:
    """Of each exchange of one: the products of the other while it travels."""
    found, travels = [], False
    for name, what in pair:
        if name == whose and what == "begins":
            found.append(0)
        if name == whose:
            travels = what == "begins"
        elif travels and what == "computes":
            found[-1] += 1
    return found


def test_while_an_exchange_of_one_travels_the_other_computes() -> None:
    for pairs in run_ranks(pairs_of, 4, {}):
        assert len(pairs) >= 2
        for pair in pairs:
            # Two layers of each: tokens to their experts and back, and their gradients.
            forward, backward = beside(pair, "forward"), beside(pair, "backward")
            begun = [name for name, what in pair if what == "begins"]
            assert begun == ["backward", "forward"] * 4
            assert min(*forward, *backward) > 0, (forward, backward)


@pytest.mark.slow
def test_where_a_piece_exchanges_nothing_one_comes_after_the_other() -> None:
    """The first piece is on the first of two stages, with the last; so those two ranks have no pair."""
    reports = run_ranks(pairs_of, 4, {"dense": (0, 1)})
    assert [len(pairs) > 0 for pairs in reports] == [False, False, True, True]


# --- what goes wrong ---------------------------------------------------------------------------------------


class Mine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: list[str]) -> torch.Tensor:
        ctx.where = where
        if where == ["forward"]:
            raise Boom("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.where == ["backward"]:
            raise Boom("backward")
        return grad, None


def one_raises(where: str) -> list[tuple[str, float]]:
    """Rank 1 raises in the first pair of a second step, behind its first exchange."""
    engine, armed = engine_of(), []
    batches = data(0, engine.mesh.rank("data"))
    engine.train_batch(batches)
    run = engine.executor.turns.run
    for piece in engine.executor.forwards:
        for layer in piece.module.layers:
            if isinstance(layer, Layer):
                layer.register_forward_hook(lambda module, args, output: Mine.apply(output, armed))

    def pair(first: Any, second: Any) -> None:
        if engine.mesh.rank() == 1:
            armed[:] = [where]
        run(first, second)

    engine.executor._schedules.clear()
    engine.executor.turns.run = pair
    found = [until_it_ends(lambda: engine.train_batch(batches)) for _ in range(2)]
    engine.destroy()
    assert all(thread.name != "zerodrift-turn" for thread in threading.enumerate())
    return found


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_what_raises_in_a_pair_ends_all_ranks_with_that_one_error(where: str) -> None:
    for rank, ((first, seconds), (again, more)) in enumerate(run_ranks(one_raises, 4, where)):
        said = f"got Boom: {where} on rank 1"
        assert first == f"Boom: {where}" if rank == 1 else said in first, first
        assert said in again and seconds < SOON and more < SOON
