"""Collectives on real ranks: the bits of sums, handles, missing ranks, disagreement, one way to update.

Every rank can make every rank's values (`values_of`), so each computes the reference for itself: a plain
loop over ranks in order. Functions whose name has no `test_` run on the ranks. There is no GPU here: ranks
get a stand-in with the outcome of its first program.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.numerics.runs import config
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.test_squares import one_by_one, same_bits
from zerodrift.api import make_plan
from zerodrift.comm import collectives, pairs, shared
from zerodrift.comm.collectives import Carrier, Collectives
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import AxisName, start
from zerodrift.comm.shared import FIRST, OwnMemory
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.step import update
from zerodrift.errors import RankError
from zerodrift.kernels import device
from zerodrift.mesh import MeshShape
from zerodrift.optim import fused
from zerodrift.optim.updates import reference_update

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

CARRIERS: tuple[Carrier, ...] = ("shared", "pairs", "native")
SUMS = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32), (FP32, FP64), (FP64, FP64)]
"""(wire, sum)."""


def joined(carrier: Carrier | None = None, timeout: float = 30.0, **sizes: int) -> Collectives:
    shape = MeshShape(**sizes) if sizes else lambda world: MeshShape(shard=world)
    return Collectives(start(shape, device="cpu", timeout=timeout), carrier)


def values_of(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values over many binades, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    mantissa = torch.randn(numel, generator=generator, dtype=FP64)
    exponent = torch.randint(-6, 7, (numel,), generator=generator)
    return torch.ldexp(mantissa, exponent).to(dtype)


def expected(parts: Sequence[torch.Tensor], how: Sum, before: torch.Tensor) -> torch.Tensor:
    """Sum in rank order or by the tree, in the dtype of the sum."""
    total = one_by_one(parts, how.dtype, how.order)
    if not how.add:
        return total.to(before.dtype)
    return (before.to(FP64) + total.to(FP64)).to(before.dtype)


def small_messages() -> None:
    """Cut everything into many messages, for the rest of this process."""
    pairs.CHUNK, pairs.LEAST, collectives.DIRECT = 512, 1, 512


def from_so_many_ranks(halving: int) -> None:
    """Let sums of any size travel by halves from so many ranks on, for the rest of this process."""
    collectives.HALVING, collectives.SMALL = dict.fromkeys(collectives.HALVING, halving), 0


def reduce_every_way(carrier: Carrier) -> list[str]:
    """Return every case whose bits are not the reference's; sums by the tree may travel by halves."""
    comm, wrong = joined(carrier), []
    size, rank = comm.mesh.size("shard"), comm.mesh.rank("shard")
    small_messages()
    ways = itertools.cycle(((BF16, 700), (FP32, 1), (FP32, 700), (FP64, 3)))
    cases = itertools.product(SUMS, (False, True), (("rank", 4), ("tree", 4), ("tree", 8)))
    for seed, ((wire, total), add, (order, halving)) in enumerate(cases):
        from_so_many_ranks(halving)
        out, count = next(ways)
        how = Sum(total, add, order=order)  # type: ignore[arg-type]
        every = [values_of(peer, count * size, wire, seed) for peer in range(size)]
        mine = slice(rank * count, (rank + 1) * count)
        before = values_of(99, count, out, seed)
        got, full = before.clone(), every[rank].clone()
        comm.start_reduce_scatter(got, full, "shard", how).wait()
        want = expected([part[mine] for part in every], how, before)
        if not same_bits(got, want) or not same_bits(full, every[rank]):
            wrong.append(f"{wire}>{total} into {out}, {how}, {count}, halving {halving}")
    return wrong


def reduce_all_every_way(carrier: Carrier) -> list[str]:
    comm = joined(carrier)
    size, rank = comm.mesh.size("shard"), comm.mesh.rank("shard")
    small_messages()
    wrong = []
    cases = itertools.product(SUMS, (BF16, FP32), (7, 840, 841), (False, True), ("rank", "tree"))
    for seed, ((wire, total), out, count, in_place, order) in enumerate(cases):
        how = Sum(total, order=order)  # type: ignore[arg-type]
        every = [values_of(peer, count, wire, seed) for peer in range(size)]
        values = every[rank].clone()
        got = values if in_place else torch.empty(count, dtype=out)
        want = expected(every, how, got)
        comm.all_reduce(got, values, "shard", how)
        if not same_bits(got, want):
            wrong.append(f"{wire}>{total} into {got.dtype}, {how}, {count}")
    return wrong


MOVED = [FP64, FP32, BF16, FP16, torch.float8_e4m3fn, torch.int64, torch.int16, torch.uint8, torch.bool]


def gather_every_way(carrier: Carrier) -> list[str]:
    comm = joined(carrier)
    line = comm.mesh.axis("shard")
    wrong = []
    for dtype, in_place, count in itertools.product(MOVED, (False, True), (0, 1, 300)):
        want = torch.cat([values_of(peer, count, FP32).mul(8).to(dtype) for peer in range(line.size)])
        out = torch.zeros_like(want)
        shard = line.slice(out, line.rank) if in_place else torch.empty(count, dtype=dtype)
        shard.copy_(line.slice(want, line.rank))
        comm.all_gather(out, shard, "shard")
        if not same_bits(out, want):
            wrong.append(f"{dtype} in_place={in_place} {count}")
    return wrong


@on_ranks(4)
def test_broadcasts_count_their_source_along_the_axis() -> None:
    comm = joined(replicate=2, shard=2)
    rank = comm.mesh.rank()
    sources: dict[Any, tuple[int, int]] = {"world": (3, 3), "shard": (1, rank // 2 * 2 + 1)}
    for axis, (source, sent) in {**sources, "replicate": (1, rank % 2 + 2)}.items():
        tensor = torch.full((1, 2), float(rank), dtype=BF16)
        comm.broadcast(tensor, source, axis)
        assert tensor.tolist() == [[sent, sent]], (axis, tensor)
    assert comm.broadcast_object(f"from {rank}", 2) == "from 2"


@pytest.mark.parametrize("carrier", CARRIERS)
@on_ranks(3)
def test_operations_overlap_and_may_be_waited_for_in_any_order(carrier: Carrier) -> None:
    """Three operations are pending at once, and each rank waits in another order."""
    comm = joined(carrier)
    small_messages()
    line = comm.mesh.axis("shard")
    rank, size, count = line.rank, line.size, 2000
    time.sleep(0.05 * rank)
    every = [[values_of(peer, size * count, FP32, seed) for peer in range(size)] for seed in (1, 2)]
    sums = [torch.empty(count), torch.empty(count)]
    gathered = torch.empty(size * count)
    handles = [
        comm.start_reduce_scatter(sums[0], every[0][rank], "shard", Sum(FP32)),
        comm.start_reduce_scatter(sums[1], every[1][rank], "shard", Sum(FP32)),
        comm.start_all_gather(gathered, values_of(rank, count, FP32), "shard"),
    ]
    for number in ([2, 1, 0], [1, 0, 2], [0, 2, 1])[rank]:
        handles[number].wait()
        time.sleep(0.02 * rank)
    for handle in handles:
        handle.wait()  # a second time: nothing
    assert same_bits(gathered, torch.cat([values_of(peer, count, FP32) for peer in range(size)]))
    for seed in (0, 1):
        parts = [line.slice(part, rank) for part in every[seed]]
        assert same_bits(sums[seed], expected(parts, Sum(FP32), sums[seed]))


def rows_between(carrier: Carrier) -> list[str]:
    """Exchange uneven splits, some or all of them empty, in every dtype of tokens and counts."""
    comm, wrong = joined(carrier), []
    rank, size = comm.mesh.rank("shard"), comm.mesh.size("shard")
    for case, dtype in itertools.product(range(4), (BF16, FP32, FP64, torch.int64)):

        def count(source: int, to: int, case: int = case) -> int:
            return case * (source + 3 * to + source * to) % 4

        def rows(source: int, to: int, dtype: torch.dtype = dtype, count: Any = count) -> torch.Tensor:
            return torch.full((count(source, to), 5), 10 * source + to).to(dtype) + torch.arange(5).to(dtype)

        going, coming = [count(rank, to) for to in range(size)], [count(peer, rank) for peer in range(size)]
        with comm.record() as log:
            given = torch.cat([rows(rank, to) for to in range(size)])
            found, under_way = comm.start_all_to_all(given, going, coming, "shard")
            under_way.wait()
        if not same_bits(found, torch.cat([rows(source, rank) for source in range(size)])):
            wrong.append(f"case {case} {dtype}")
        calls = [(call.op, call.numel, call.axis, call.sum) for call in log]
        if calls != [("all_to_all", 5 * sum(going), "shard", None)]:
            wrong.append(f"recorded {log}")
    comm.mesh.stop()
    return wrong


BODIES = [
    *((reduce_every_way, world) for world in (2, 3, 4)),
    *((reduce_all_every_way, world) for world in (2, 4)),
    *((gather_every_way, world) for world in (2, 4)),
    *((rows_between, world) for world in (2, 3)),
]


@pytest.mark.cells(2)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("body", "world"), BODIES)
def test_every_carrier_brings_every_bit(
    body: Callable[[Carrier], list[str]], world: int, carrier: Carrier
) -> None:
    assert run_ranks(body, world, carrier) == [[]] * world


def reduced(comm: Collectives, numel: int, how: Sum) -> None:
    size = comm.mesh.size("shard")
    full = torch.ones(size * numel)
    comm.start_reduce_scatter(torch.empty(numel), full, "shard", how, ahead=False).wait()


def halved(comm: Collectives) -> None:
    from_so_many_ranks(4)
    reduced(comm, 1 << 18, Sum(FP32, order="tree"))


CALLS: dict[str, Callable[[Collectives], object]] = {
    "all_gather": lambda comm: comm.all_gather(torch.empty(8192), torch.ones(4096), "shard"),
    "reduce_scatter": lambda comm: reduced(comm, 1 << 20, Sum(FP32)),
    "all_reduce": lambda comm: comm.all_reduce_sum(torch.ones(2), "world"),
    "halving": halved,
    "all_gather_object": lambda comm: comm.all_gather_object("here"),
    "barrier": lambda comm: comm.barrier(),
}


def miss(name: str, carrier: Carrier, timeout: float, how: str) -> tuple[str, float, bool]:
    """Kill the last rank before the second call, or let it sleep beyond the timeout."""
    comm = joined(carrier, timeout)
    pairs.LEAST = 1
    call = CALLS[name]
    call(comm)
    if comm.mesh.rank() == comm.mesh.size("world") - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.2 * timeout)
        return "", 0.0, True
    began = time.monotonic()
    try:
        call(comm)
    except RankError as error:
        return str(error), time.monotonic() - began, isinstance(error.__cause__, RuntimeError)
    raise AssertionError("nobody noticed")


KILLED: list[tuple[str, Carrier]] = [
    ("all_gather", "shared"),
    ("reduce_scatter", "pairs"),
    ("all_reduce", "native"),
    ("all_gather_object", "pairs"),
    ("barrier", "shared"),
]


@pytest.mark.parametrize(("name", "carrier"), KILLED)
def test_a_killed_rank_is_an_error_on_the_others(name: str, carrier: Carrier) -> None:
    found = run_ranks(miss, 2, name, carrier, 30.0, "killed", dying={1})
    text, seconds, caused = found[0]
    assert caused
    assert seconds < 5.0
    assert text.startswith(f"`{name}` on axis `")
    assert "rank 1 must take part" in text


def test_a_killed_rank_is_named_by_all_that_swap_nothing_with_it() -> None:
    """Rank 0 waits for rank 2, and rank 2 for the killed one; rank 1 for both."""
    for text, seconds, _ in run_ranks(miss, 4, "halving", "pairs", 30.0, "killed", dying={3})[:3]:
        assert text.startswith("`reduce_scatter` on axis `shard`: rank 3 must take part")
        assert seconds < 5.0


@pytest.mark.long
def test_a_rank_that_hangs_is_an_error_within_the_timeout() -> None:
    for text, seconds, _ in run_ranks(miss, 3, "reduce_scatter", "pairs", 1.2, "asleep")[:2]:
        # Of two that wait, one may hear that the other has given up before its own time is over.
        assert "must take part" in text or (
            text.startswith("`ranks`: must come to the same collectives") and " gone: ended" in text
        )
        assert 0.8 < seconds < 3.5


@on_ranks(3)
def test_different_plans_and_an_error_on_one_rank_are_errors_everywhere() -> None:
    """Rank 2 has other rows and another digest; at last all have the same."""
    comm, mine = joined(), ["w fp32", "x fp32"]
    odd = comm.mesh.rank() == 2
    for others, shown in (
        (["w fp32", "x bf16"], "different ones from row 1 on: x fp32 on rank 0, x bf16 on rank 2."),
        (["w fp32"], "from row 1 on: x fp32 on rank 0, nothing on rank 2."),
        (mine, "different ones on ranks 0 and 2, though their 2 rows agree."),
    ):
        with pytest.raises(RankError, match=re.escape(shown)):
            comm.agree("b" if odd else "a", lambda others=others: others if odd else mine)
    comm.agree("a", lambda: [f"rank {comm.mesh.rank()} is not asked"])
    with pytest.raises((ValueError, RankError), match="on one rank"), raise_on_all_ranks(comm):
        if odd:
            raise ValueError("on one rank")


SLOWER = "updates run in plain PyTorch everywhere, several times slower"
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
CASES: list[tuple[list[str | None], dict[str, Any], str]] = [
    ([None, None, "no Triton"], {}, f"zerodrift: no Triton, on rank 2 of 3; {SLOWER}"),
    (["no driver", "no driver", "none"], {}, f"zerodrift: no driver; none, on rank 0, 1, 2 of 3; {SLOWER}"),
    ([None, None, None], {}, ""),
    # An offloaded optimizer updates on CPUs, whose ways leave the same bits.
    (["no driver", None, None], OFFLOADED, ""),
]
"""(each rank's obstacle, keys of `zero_optimization`, what rank 0 logs where all update in plain PyTorch)."""


@on_ranks(3)
def test_any_rank_that_cannot_run_programs_keeps_all_from_it_and_rank_0_says_why() -> None:
    comm = Collectives(start(lambda world: MeshShape(shard=world), device="cpu"))
    comm.mesh.device = torch.device("cuda", 0)
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerodrift").addHandler(handler)
    for obstacles, zero, told in CASES:
        written = config(3, "bf16", zero_optimization={"stage": 3, **zero})
        plan = make_plan(written, torch.nn.Linear(8, 8), world_size=3)
        heard.clear()
        mine = obstacles[comm.mesh.rank()]
        with mock.patch.object(device, "obstacle", lambda where: mine), comm.record() as recorded:  # noqa: B023
            way = update.choose_update_function(plan, comm)
        assert way is (reference_update if told else fused.update), obstacles
        said = [told] if told and comm.mesh.rank() == 0 else []
        assert heard == said and list(recorded) == [], (heard, recorded)


BOTH: tuple[Carrier, ...] = ("shared", "pairs")

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")


@linux
@on_ranks(3)
def test_ranks_of_one_host_share_and_talk_to_the_others() -> list[AxisName]:
    """Rank 1 pretends to be on another host."""
    rank = torch.distributed.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared, "_host", lambda: 12345)
        ways = [joined(carrier) for carrier in BOTH]
    mine = ways[0].mesh.shared
    assert ([] if mine is None else sorted(mine.peers)) == [[2], [], [0]][rank]
    return differ(ways, ["shard"])


def differ(ways: list[Collectives], axes: list[AxisName]) -> list[AxisName]:
    """Return the axes on which two carriers differ in bits, with two collectives pending at once."""
    pairs.LEAST = 1
    found = []
    for axis in axes:
        results = []
        for comm in ways:
            full = values_of(comm.mesh.rank(), 1536, torch.float32)
            out, whole = torch.empty(1536 // comm.mesh.size(axis)), torch.empty(1536)
            reduction = comm.start_reduce_scatter(out, full, axis, Sum(torch.float32))
            gather = comm.start_all_gather(whole, full[: out.numel()].clone(), axis)
            gather.wait()
            reduction.wait()
            total = full.clone()
            comm.all_reduce(total, total, axis, Sum(torch.float32))
            results.append(torch.cat([out, whole, total]))
        if not torch.equal(results[0], results[1]):
            found.append(axis)
    return found


@linux
@on_ranks(2)
def test_a_host_without_memory_left_sends_by_gloo() -> list[AxisName]:
    """Rank 0 gets no memory any more after the ranks have met."""

    def grow(self: OwnMemory, size: int) -> None:
        if size > FIRST:
            raise OSError(12, "Cannot allocate memory")
        grow_as_ever(self, size)

    grow_as_ever = OwnMemory._grow
    with pytest.MonkeyPatch.context() as patch:
        if torch.distributed.get_rank() == 0:
            patch.setattr(OwnMemory, "_grow", grow)
        return differ([joined(carrier) for carrier in BOTH], ["shard"])


@linux
@on_ranks(4)
def test_axes_share_memory_side_by_side() -> list[AxisName]:
    return differ([joined(carrier, shard=2, replicate=2) for carrier in BOTH], ["shard", "replicate", "data"])
