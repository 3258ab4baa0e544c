"""The host's work does not grow with the number of ranks: rank 0 of 8 and of 1024, over a fake group.

Calls are counted, not seconds. Some may grow with the depth of a tree.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
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


def alone_like_gpus() -> None:
    """Leave the harness's group; use the carrier of GPUs, and ranks that all hold the same, from here on."""
    dist.destroy_process_group()
    made, all_reduce = collectives.Collectives.__init__, dist.all_reduce

    def summed(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(values, *args, **kwargs)
        values.mul_(dist.get_world_size() if "op" not in kwargs else 1)
        return work

    collectives.Collectives.__init__ = lambda self, mesh, carrier=None: made(self, mesh, "native")  # type: ignore[method-assign]
    dist.all_reduce = summed


@contextlib.contextmanager
def fake_engine(ranks: int, config: dict[str, Any]) -> Iterator[Engine]:
    """Yield an engine of rank 0 of so many."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    engine = initialize(network(), config=config, device="cpu", quiet=True)
    yield engine
    engine.destroy()
    dist.destroy_process_group()


def one_step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()


def calls_of_an_engine(ranks: int, stage: int, order: str) -> tuple[int, int]:
    """Count the calls that make an engine, and those of its sixth step; more is looked at in the first."""
    units = {"units": [str(number) for number in range(BLOCKS)]}  # however small
    engines = fake_engine(
        ranks, runs.config(stage, "fp32", precision={"reduce": {"order": order}}, sharding=units)
    )
    entered: list[Engine] = []
    made = calls(lambda: entered.append(engines.__enter__()))
    for _ in range(5):
        one_step(entered[0])
    found = calls(lambda: one_step(entered[0]))
    engines.__exit__(None, None, None)
    return made, found


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
def test_a_save_does_not_grow_with_ranks(tmp_path: Path) -> None:
    """Only the gathered list of errors, one empty entry for each rank, may grow."""
    alone_like_gpus()
    found = []
    for number, ranks in enumerate((128, 128, 4096)):  # the first for imports, and what is looked up once
        with fake_engine(ranks, runs.config(3, "fp32")) as engine:
            checkpoints = Checkpoints(engine, tmp_path / str(number), quiet=True)
            tracemalloc.start()
            count = calls(lambda: checkpoints.save("one"))  # noqa: B023
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            found.append((count, peak, (tmp_path / str(number) / "one" / MANIFEST).stat().st_size))
    _, (few, low, short), (many, high, long) = found
    assert many <= few + 4 * 4096 and high <= low + 32 * 4096 and long <= short + 16, found
