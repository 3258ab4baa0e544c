"""Collectives on real ranks: the bits of sums, records, handles, missing ranks, disagreement.

Every rank can make every rank's values (`values_of`), so each computes the reference for itself: a plain
loop over ranks in order. Functions whose name has no `test_` run on the ranks.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.comm import collectives, pairs
from zerodrift.comm.collectives import Carrier, Collectives, Recorded
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import start
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.dtypes import DType
from zerodrift.errors import RankError
from zerodrift.kernels import storage
from zerodrift.mesh import MeshShape

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


def expected(parts: Iterable[torch.Tensor], how: Sum, before: torch.Tensor) -> torch.Tensor:
    """Sum in rank order or by the tree, in the dtype of the sum; every step is one rounding of an fp64
    result."""
    first, *others = parts
    total = by_tree([first, *others], how.dtype) if how.order == "tree" else first.to(how.dtype)
    for part in others if how.order != "tree" else ():
        total = (total.to(FP64) + part.to(FP64)).to(how.dtype)
    if not how.add:
        return total.to(before.dtype)
    return (before.to(FP64) + total.to(FP64)).to(before.dtype)


def by_tree(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Sum neighbours first; a missing right half is skipped."""
    sums = [part.to(dtype) for part in parts]
    while len(sums) > 1:
        pairs_of_sums = (sums[start : start + 2] for start in range(0, len(sums), 2))
        sums = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs_of_sums]
    return sums[0]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def small_messages() -> None:
    """Cut everything into many messages, for the rest of this process."""
    pairs.CHUNK, pairs.LEAST, collectives.DIRECT = 512, 1, 512


# Sums


def from_so_many_ranks(halving: int) -> None:
    """Set the least number of ranks for sums by halves, for the rest of this process."""
    collectives.HALVING = dict.fromkeys(collectives.HALVING, halving)


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


def messages_of_a_sum(carrier: Carrier) -> list[tuple[int, int]]:
    """Return the messages of a rank for a sum by halves and for a direct one, and their elements."""
    comm, sizes = joined(carrier), list[int]()
    isend = dist.isend

    def counted(tensor: torch.Tensor, **rest: Any) -> Any:
        sizes.append(tensor.nbytes)
        return isend(tensor, **rest)

    dist.isend = counted
    found = []
    for halving in (4, 8):
        from_so_many_ranks(halving)
        comm.reduce_scatter(torch.empty(6), torch.ones(24), "shard", Sum(FP32, order="tree"))
        found.append((len(sizes), sum(sizes) // 4))
        sizes.clear()
    dist.isend = isend
    return found


def test_halves_are_two_messages_where_slices_are_three() -> None:
    assert run_ranks(messages_of_a_sum, 4, "pairs") == [[(2, 18), (3, 18)]] * 4


def test_the_reference_tells_one_order_from_another() -> None:
    parts = [values_of(rank, 1000, FP32) for rank in range(4)]
    before = torch.zeros(1000)
    forward, backward = (expected(order, Sum(FP32), before) for order in (parts, parts[::-1]))
    assert not same_bits(forward, backward)
    assert not same_bits(forward, torch.stack(parts).to(FP64).sum(0).to(FP32))


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


def test_a_sum_narrower_than_the_wire_is_refused() -> None:
    comm = Collectives(start(MeshShape(), device="cpu"))
    with pytest.raises(AssertionError, match="would round"):
        comm.reduce_scatter(torch.empty(4), torch.ones(4), "shard", Sum(BF16))
    comm.reduce_scatter(torch.empty(4), torch.ones(4, dtype=BF16), "shard", Sum(FP32))


# Moves

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
def test_broadcasts_count_their_source_along_the_axis_and_objects_go_round() -> None:
    comm = joined(replicate=2, shard=2)
    rank = comm.mesh.rank()
    sources: tuple[tuple[Any, int, float], ...] = (
        ("world", 3, 3.0),
        ("shard", 1, 1.0 if rank < 2 else 3.0),
        ("replicate", 0, float(rank % 2)),
    )
    for axis, source, sent in sources:
        tensor = torch.full((1, 2), float(rank), dtype=BF16)
        comm.broadcast(tensor, source, axis)
        assert tensor.tolist() == [[sent, sent]], (axis, tensor)
    comm.barrier()
    assert comm.all_gather_object(rank, "shard") == ([0, 1] if rank < 2 else [2, 3])
    assert comm.all_gather_object({"rank": rank}) == [{"rank": peer} for peer in range(4)]
    assert comm.broadcast_object(f"from {rank}", 2) == "from 2"


# Handles


@pytest.mark.cells(1)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
@on_ranks(3)
def test_operations_overlap_and_may_be_waited_for_in_any_order(order: list[int], carrier: Carrier) -> None:
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
    for number in order[rank:] + order[:rank]:
        handles[number].wait()
        time.sleep(0.02 * rank)
    for handle in handles:
        handle.wait()  # a second time: nothing
    assert same_bits(gathered, torch.cat([values_of(peer, count, FP32) for peer in range(size)]))
    for seed in (0, 1):
        parts = [line.slice(part, rank) for part in every[seed]]
        assert same_bits(sums[seed], expected(parts, Sum(FP32), sums[seed]))


@on_ranks(2)
def test_a_reduction_receives_a_window_however_large_it_is() -> None:
    comm = joined("pairs")
    small_messages()
    with mock.patch.object(storage, "LEAST", 1):
        for count in (10, 4000, 100, 4000, 10):
            comm.reduce_scatter(torch.empty(count), torch.ones(2 * count, dtype=BF16), "shard", Sum(FP32))
    held = comm._pairs._scratch._free
    sizes = list(map(len, held))
    # The window, and a chunk in the dtype of the sum.
    assert len(sizes) == 2 and sum(sizes) <= pairs.DEPTH * 512 + 2 * 512, sizes
    comm.make_room(2 * max(sizes), "shard")  # half of it is received
    assert len(held) == 2
    comm.make_room(2 * max(sizes) + 2, "shard")
    assert not held


# Rows to other ranks


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
            found = comm.all_to_all(given, going, coming, "shard")
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


# What is recorded


@on_ranks(4)
def test_the_record_is_the_list_of_calls() -> None:
    comm = joined(replicate=2, shard=2)
    full, slice_ = torch.ones(512, dtype=BF16), torch.ones(256, dtype=FP32)
    large = torch.ones(collectives.DIRECT)
    comm.barrier()
    with comm.record() as outer:
        comm.all_gather(full, full[:256].clone(), "shard")
        with comm.record() as inner:
            comm.start_reduce_scatter(slice_, full, "shard", Sum(FP32)).wait()
            comm.all_reduce(slice_, slice_, "replicate", Sum(FP32))
        comm.all_reduce(large, large, "world", Sum(FP32))
        comm.all_reduce_sum(torch.zeros(2, dtype=FP64), "world")
        comm.broadcast(slice_, 0, "data")
        comm.all_gather_object("unseen")
    comm.all_reduce_sum(torch.zeros(2, dtype=FP64), "world")
    reduced = [
        Recorded("reduce_scatter", DType.BF16, 512, "shard", DType.FP32),
        Recorded("all_reduce", DType.FP32, 256, "replicate", DType.FP32),
    ]
    whole = [
        Recorded("all_gather", DType.BF16, 512, "shard", None),
        *reduced,
        Recorded("all_reduce", DType.FP32, collectives.DIRECT, "world", DType.FP32),
        Recorded("all_reduce", DType.FP64, 2, "world", DType.FP64),
        Recorded("broadcast", DType.FP32, 256, "data", None),
    ]
    assert (outer, inner) == (whole, reduced)


# Ranks that are missing


def reduced(comm: Collectives, numel: int, how: Sum) -> None:
    size = comm.mesh.size("shard")
    comm.reduce_scatter(torch.empty(numel), torch.ones(size * numel), "shard", how)


def halved(comm: Collectives) -> None:
    from_so_many_ranks(4)
    reduced(comm, 1 << 18, Sum(FP32, order="tree"))


CALLS: dict[str, Callable[[Collectives], object]] = {
    "all_gather": lambda comm: comm.all_gather(
        torch.empty(4096 * comm.mesh.size("shard")), torch.ones(4096), "shard"
    ),
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
        time.sleep(2.5 * timeout)
        return "", 0.0, True
    began = time.monotonic()
    try:
        call(comm)
    except RankError as error:
        return str(error), time.monotonic() - began, isinstance(error.__cause__, RuntimeError)
    raise AssertionError("nobody noticed")


@pytest.mark.cells(1)
@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("name", [name for name in CALLS if name != "halving"])
def test_a_killed_rank_is_an_error_on_the_others(name: str, carrier: Carrier) -> None:
    found = run_ranks(miss, 2, name, carrier, 30.0, "killed", dying={1})
    text, seconds, caused = found[0]
    assert caused
    assert seconds < 5.0
    assert text.startswith(f"`{name}` on axis `")
    assert "rank 1 must take part" in text


@pytest.mark.parametrize(
    "carrier", ["pairs", *(pytest.param(carrier, marks=pytest.mark.slow) for carrier in ("shared", "native"))]
)
def test_a_killed_rank_is_named_by_all_that_swap_nothing_with_it(carrier: Carrier) -> None:
    """Rank 0 waits for rank 2, and rank 2 for the killed one; rank 1 for both."""
    for text, seconds, _ in run_ranks(miss, 4, "halving", carrier, 30.0, "killed", dying={3})[:3]:
        assert text.startswith("`reduce_scatter` on axis `shard`: rank 3 must take part")
        assert seconds < 5.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["reduce_scatter", pytest.param("all_gather", marks=pytest.mark.slow)])
def test_a_rank_that_hangs_is_an_error_within_the_timeout(name: str) -> None:
    for text, seconds, _ in run_ranks(miss, 3, name, "pairs", 1.5, "asleep")[:2]:
        # Of two that wait, one may hear that the other has given up before its own time is over.
        assert "must take part" in text or (
            text.startswith("`ranks`: must come to the same collectives") and " gone: ended" in text
        )
        assert 1.0 < seconds < 3.5


# Agreement


@on_ranks(3)
def test_different_plans_are_an_error_everywhere_with_the_first_row_and_equal_ones_agree() -> None:
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


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_objects_that_are_the_same_on_all_ranks_are_not_sent(world: int) -> None:
    """More ranks than one call asks at once are simulated by `SEVERAL`."""
    collectives.SEVERAL = 1
    comm = joined()
    rank = comm.mesh.rank()
    assert comm.all_gather_object({"a": [1.5, None]}) == [{"a": [1.5, None]}] * world
    other = comm.all_gather_object("last" if rank == world - 1 else "first")
    assert other == ["first"] * (world - 1) + ["last"]
    with pytest.raises((ValueError, RankError), match="on one rank"), raise_on_all_ranks(comm):
        if rank == 1:
            raise ValueError("on one rank")
