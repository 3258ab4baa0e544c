"""The host's work does not grow with the number of ranks: rank 0 of 8 and of 1024, over a fake group.

Calls are counted, not seconds. Some may grow with the depth of a tree.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import nn

from tests.host_calls import calls
from tests.numerics import runs
from tests.ranks.harness import on_ranks
from zerodrift import initialize
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.checkpoint.manifest import MANIFEST
from zerodrift.comm import collectives
from zerodrift.engine.engine import Engine
from zerodrift.kernels import storage

pytestmark = pytest.mark.fresh_ranks
BLOCKS = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(BLOCKS)))


def like_gpus() -> None:
    """Use the carrier of GPUs, and ranks that all hold the same, for the rest of this process."""
    made, all_reduce = collectives.Collectives.__init__, dist.all_reduce

    def carried(self: Any, mesh: Any, carrier: Any = None) -> None:
        made(self, mesh, "native")

    def summed(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(values, *args, **kwargs)
        values.mul_(dist.get_world_size() if "op" not in kwargs else 1)
        return work

    collectives.Collectives.__init__, dist.all_reduce = carried, summed  # type: ignore[method-assign]


def alone_like_gpus() -> None:
    """Leave the harness's group and use the carrier of GPUs."""
    dist.destroy_process_group()
    like_gpus()


@contextlib.contextmanager
def fake_engine(ranks: int, model: Callable[[], nn.Module], units: int, **written: Any) -> Iterator[Engine]:
    """Yield an engine of rank 0 of so many; each child is a unit, however small."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    config = {
        "sharding": {"units": [str(number) for number in range(units)]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        **written,
    }
    engine = initialize(model(), config=config, device="cpu", quiet=True)
    yield engine
    engine.destroy()
    dist.destroy_process_group()


def one_step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def calls_of_an_engine(ranks: int, stage: int, order: str) -> tuple[int, int]:
    precision = {"mode": "fp32", "reduce": {"order": order}}
    engines = fake_engine(ranks, network, BLOCKS, precision=precision, zero_optimization={"stage": stage})
    entered: list[Engine] = []
    made = calls(lambda: entered.append(engines.__enter__()))
    for _ in range(5):  # more is looked at in the first steps
        one_step(entered[0])
    found = calls(lambda: one_step(entered[0]))
    engines.__exit__(None, None, None)
    return made, found


def calls_of_a_step(order: str, blocks: int, layers: int) -> int:
    """Count the calls of a step beyond those of plain torch, for so many units with so many layers each."""

    def made() -> nn.Module:
        inner = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))) for _ in range(blocks))
        return nn.Sequential(*inner)

    plain, precision = made(), {"reduce": {"order": order}}
    with fake_engine(8, made, blocks, zero_optimization={"stage": 3}, precision=precision) as engine:
        for _ in range(5):
            one_step(engine)
        return calls(lambda: one_step(engine)) - calls(lambda: plain(torch.ones(1, 8)).sum().backward())


@pytest.mark.parametrize("order", ["rank", "auto"])
@on_ranks(1)
def test_a_parameter_and_a_unit_more_cost_few_calls(order: str) -> None:
    """Work for each parameter is done for all of a segment at once, outside of Python."""
    alone_like_gpus()
    calls_of_a_step(order, 1, 1)  # imports, and what is looked up once
    small, more_layers, more_blocks = (calls_of_a_step(order, *size) for size in ((2, 1), (2, 11), (12, 1)))
    assert (more_layers - small) / (2 * 10 * 2) <= 10, (small, more_layers)
    assert (more_blocks - small) / 10 <= 680, (small, more_blocks)


@on_ranks(3)
def test_training_has_the_same_bits_as_many_gloo_ranks_do_it() -> None:
    """Pairs send their parts in one call, objects go by their hash, integers by gloo."""
    few = runs.train(runs.make(runs.config(3, "fp32", 2)), 3, 2)
    collectives.AT_ONCE, collectives.SEVERAL, collectives.FEW["pairs"] = 2, 1, 1
    assert few.differs(runs.train(runs.make(runs.config(3, "fp32", 2)), 3, 2)) == []


@on_ranks(1)
def test_the_host_makes_as_many_calls_on_1024_ranks_as_on_8() -> None:
    alone_like_gpus()
    cases = ((3, "rank"), (0, "native"), (3, "tree"))
    with mock.patch.object(storage, "LEAST", 1):  # else only what 1024 slices fill is a mapping
        calls_of_an_engine(8, 3, "rank")  # imports, and what is looked up once
        found = [[calls_of_an_engine(ranks, *case) for ranks in (8, 1024)] for case in cases]
    for case, (few, many) in zip(cases, found, strict=True):
        # torch looks at each rank of a new group, three times.
        assert many[0] <= few[0] + 4 * 1024, (case, few, many)
        swaps = (BLOCKS + 1) * 10 if case[1] == "tree" else 0  # where 8 ranks make one call
        assert few[1] - 10 <= many[1] <= few[1] + 10 + 40 * swaps, (case, few, many)


@on_ranks(1)
def test_what_the_host_holds_does_not_grow_with_ranks() -> None:
    """Bytes are counted by room after three steps, without torch's own and its tables of groups, whose
    numbers are made when a group is requested."""
    sys.path.append(str(Path(__file__).parents[2] / "bench"))
    import flat

    dist.destroy_process_group()
    flat.like_gpus()
    found: list[dict[str, int]] = []
    for ranks in (8, 8, 4096):  # the first for imports, and what is looked up once
        options = argparse.Namespace(blocks=2, width=16)
        flat.measured(ranks, options, SimpleNamespace(put=lambda answer: found.append(answer[0])))
    _, few, many = found
    for room in few.keys() - {"torch.distributed"}:
        tables = 4096 * 40 if room == "comm" else 0
        assert many[room] <= 1.05 * few[room] + 4096 + tables, (room, few[room], many[room])


@on_ranks(1)
def test_a_save_does_not_grow_with_ranks(tmp_path: Path) -> None:
    """Only the gathered list of errors, one empty entry for each rank, may grow."""
    alone_like_gpus()
    found = []
    for number, ranks in enumerate((128, 128, 4096)):  # the first for imports, and what is looked up once
        dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
        engine = initialize(network(), config=runs.config(3, "fp32"), device="cpu", quiet=True)
        checkpoints = Checkpoints(engine, tmp_path / str(number), quiet=True)
        tracemalloc.start()
        count = calls(lambda: checkpoints.save("one"))  # noqa: B023
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        found.append((count, peak, (tmp_path / str(number) / "one" / MANIFEST).stat().st_size))
        engine.destroy()
        dist.destroy_process_group()
    _, (few, low, short), (many, high, long) = found
    assert many <= few + 4 * 4096 and high <= low + 32 * 4096 and long <= short + 16, found
