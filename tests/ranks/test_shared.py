"""Memory that ranks share: the layout of messages, the ranks that share, and cleanup.

`test_collectives.py` compares its bits with those of all other carriers, and kills ranks. Functions whose
name has no `test_` run on the ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.ranks.harness import on_ranks
from tests.ranks.test_collectives import joined, values_of
from zerodrift.comm import pairs, shared
from zerodrift.comm.collectives import Carrier, Collectives
from zerodrift.comm.fold import Sum
from zerodrift.comm.mesh import AxisName
from zerodrift.comm.shared import FIRST, NOWHERE, OwnMemory, PeerMemory, can_share, reach

BOTH: tuple[Carrier, ...] = ("shared", "pairs")

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")


def both() -> tuple[OwnMemory, PeerMemory]:
    own = OwnMemory()
    peer = reach(own.address())
    assert peer is not None
    return own, peer


def numbers(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64)


# Where messages lie


@linux
def test_what_is_written_is_read_in_place() -> None:
    own, peer = both()
    values = numbers(1000)
    start = own.write(values, [1], 2)
    values.zero_()
    found = peer.read(start, values.nbytes, 2).view(torch.int64)
    assert torch.equal(found, numbers(1000))


@linux
def test_a_message_lies_where_no_reader_is_left() -> None:
    own, peer = both()
    first = own.write(numbers(100), [1, 2], 3)
    second = own.write(numbers(100, 100), [1], 3)
    assert first == FIRST and second >= first + 800
    assert peer.read(first, 800, 3).numel() == 800
    peer.done(first, 1)
    third = own.write(numbers(100, 200), [1], 3)
    assert third > second  # rank 2 has not read the first
    peer.done(first, 2)
    assert own.write(numbers(120, 300), [2], 3) > third  # the gap is too small
    assert own.write(numbers(100, 400), [2], 3) == first
    for start, begin in ((second, 100), (third, 200), (first, 400)):
        assert torch.equal(peer.read(start, 800, 3).view(torch.int64), numbers(100, begin))


@linux
def test_memory_that_grows_is_mapped_again_and_goes_when_it_was_read() -> None:
    own, peer = both()
    large = numbers(shared.KEPT // 8 + 1)
    places = [own.write(numbers(10, 7), [1], 2), own.write(large, [1], 2)]
    assert torch.equal(peer.read(places[1], large.nbytes, 2).view(torch.int64), large)
    own.release()
    assert own._size > shared.KEPT + FIRST  # somebody has to read it
    peer.done(places[0], 1)
    peer.done(places[1], 1)
    own.release()
    assert own._size == shared.KEPT + FIRST
    again = own.write(large, [1], 2)
    assert torch.equal(peer.read(again, large.nbytes, 2).view(torch.int64), large)


# Whose memory it is


@linux
def test_memory_of_others_is_not_taken_for_a_ranks_own(tmp_path: Path) -> None:
    own = OwnMemory()
    address = own.address()
    pipe = os.memfd_create("other")
    wrong = [
        NOWHERE,
        address._replace(host=address.host + 1),
        address._replace(low=1, high=2),
        address._replace(descriptor=pipe),
        address._replace(descriptor=10**6),
        address._replace(process=2**22 + 1),
    ]
    assert [reach(one) for one in wrong] == [None] * len(wrong)
    found = reach(address)
    assert found is not None
    os.close(pipe)


def test_a_system_without_such_memory_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    assert OwnMemory().address() == NOWHERE
    assert not can_share()
    monkeypatch.setattr(shared, "_host", lambda: 0)
    assert OwnMemory().address() == NOWHERE


@linux
def test_this_system_has_it() -> None:
    before = descriptors()
    assert can_share()
    assert descriptors() == before


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
@on_ranks(2)
def test_a_large_message_goes_through_memory_and_a_mesh_that_stops_leaves_no_descriptor() -> None:
    counts = []
    for _ in range(3):
        comm = joined("shared")
        assert comm.mesh.shared is not None
        pairs.LEAST = 1
        comm.reduce_scatter(torch.empty(500), torch.ones(1000), "shard", Sum(torch.float32))
        assert comm.mesh.shared.own._size > FIRST
        during = descriptors()
        comm.mesh.stop()
        counts.append(during - descriptors())
    assert min(counts) >= 2  # this rank's memory and the other's
    assert len(set(counts[1:])) == 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# On axes, and under an engine


@linux
@on_ranks(4)
def test_axes_share_memory_side_by_side() -> list[AxisName]:
    return differ([joined(carrier, shard=2, replicate=2) for carrier in BOTH], ["shard", "replicate", "data"])
