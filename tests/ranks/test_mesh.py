"""The mesh on real ranks: coordinates, groups, joining, and `stop`."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.comm import rendezvous
from zerodrift.comm.mesh import AXES, _line, _lines, start
from zerodrift.errors import MeshError, RankError
from zerodrift.mesh import MeshShape, fit

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets a launcher's variables in an environment without any."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def launch(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return launch


# The arithmetic


SHAPES = [
    *(MeshShape(2, 3, 2), MeshShape(4), MeshShape(1, 2, 3), MeshShape()),
    *(MeshShape(4, 2, 2, expert=2), MeshShape(6, 1, 1, expert=6), MeshShape(6, 2, 1, expert=3)),
    *(
        MeshShape(8, 2, secondary=4),
        MeshShape(16, expert=2, secondary=4),
        MeshShape(6, expert=3, secondary=2),
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_axis_is_a_partition_and_shard_is_numbered_fastest(shape: MeshShape) -> None:
    coordinates = itertools.product(range(shape.pipeline), range(shape.replicate), range(shape.shard))
    for rank, (stage, replica, shard) in enumerate(coordinates):
        lines = {name: _line(shape, rank, name) for name in AXES}
        wanted: dict[str, tuple[int, int]] = {
            "shard": (shard, shape.shard),
            "replicate": (replica, shape.replicate),
            "pipeline": (stage, shape.pipeline),
            "data": (shard + shape.shard * replica, shape.data),
            "world": (rank, shape.world),
            "tensor": (0, 1),
        }
        assert {name: (lines[name].index(rank), len(lines[name])) for name in wanted} == wanted
        assert lines["expert"].index(rank) == shard % shape.expert
        assert lines["expert_shard"].index(rank) == shard // shape.expert
        assert {*lines["expert"], *lines["expert_shard"], *lines["secondary"]} <= {*lines["shard"]}
        assert {*lines["expert_secondary"]} == {*lines["expert_shard"]} & {*lines["secondary"]} | {rank}
        assert lines["secondary"].index(rank) == shard % shape.secondary
        for name, line in lines.items():
            assert all(_line(shape, peer, name) == line for peer in line)
    for axis in AXES:  # and those with several ranks need a group
        every = dict.fromkeys(_line(shape, rank, axis) for rank in range(shape.world))
        assert list(_lines(shape, axis)) == [line for line in every if len(line) > 1], (
            "those that need a group"
        )


def test_each_rank_of_a_tensor_axis_has_the_other_axes_to_itself() -> None:
    whole, one = MeshShape(2, 3, tensor=2), MeshShape(2, 3)
    assert whole.world == 12 and whole.data == one.data and str(whole) == "replicate 3 x shard 2 x tensor 2"
    for rank in range(whole.world):
        place = rank % 2
        for name in AXES:
            line = _line(whole, rank, name)
            assert rank in line and all(_line(whole, peer, name) == line for peer in line)
            if name not in ("world", "tensor"):
                assert list(line) == [2 * other + place for other in _line(one, rank // 2, name)]
        assert list(_line(whole, rank, "tensor")) == [rank - place, rank - place + 1]
        assert list(_line(whole, rank, "world")) == list(range(12))


# A world of one


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_rank_needs_no_process_group(launch: Callable[..., None], launched: dict[str, str]) -> None:
    launch(**launched)
    mesh = start(lambda world: fit(world, 0, 0, 1), device="cpu")
    assert {(mesh.size(axis), mesh.rank(axis), mesh.group(axis)) for axis in AXES} == {(1, 0, None)}
    assert not dist.is_initialized()
    mesh.stop()
    mesh.stop()


NUMBER = "must be a whole number; got"


@pytest.mark.parametrize(
    ("launched", "shown"),
    [
        ({"RANK": "0"}, f"`WORLD_SIZE`: {NUMBER} nothing"),
        ({"WORLD_SIZE": "2"}, f"`RANK`: {NUMBER} nothing"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, f"`RANK`: {NUMBER} 'zero'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "`RANK`: must be at least 0 and below WORLD_SIZE=2; got 2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "1. `MASTER_ADDR`: must be set to join 2 ranks"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
            "`MASTER_PORT`: must be a port, 0 to 65535; got '99999'",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, f"`LOCAL_RANK`: {NUMBER} ''"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(
    launch: Callable[..., None], launched: dict[str, str], shown: str
) -> None:
    launch(**launched)
    with pytest.raises(MeshError, match=re.escape(shown)):
        start(MeshShape(), device="cpu")


def test_a_shape_of_another_size_is_refused_before_anybody_joins(launch: Callable[..., None]) -> None:
    launch(**dict(zip(LAUNCHED, ("0", "3", "0", "127.0.0.1", "1"), strict=True)))
    with pytest.raises(MeshError, match=r"replicate 2 x shard 2 = 4 for 3\. Start 4 ranks"):
        start(MeshShape(shard=2, replicate=2), device="cpu")
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_the_device_is_the_cpu_without_cuda(launch: Callable[..., None]) -> None:
    assert start(MeshShape()).device == torch.device("cpu")
    with pytest.raises(MeshError, match="`cuda`, where torch finds no GPU"):
        start(MeshShape(), device="cuda")
    with pytest.raises(MeshError, match="must be `cpu`, `cuda` or the accelerator of this torch; got 'meta'"):
        start(MeshShape(), device="meta")


def test_a_device_that_cannot_train_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mps has no float64, though it has streams since torch 2.15."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("mps"))
    with pytest.raises(
        MeshError, match=r"must be a device with streams and float64; got 'mps'\. Use `cpu`\."
    ):
        start(MeshShape(), device="mps")
    assert start(MeshShape()).device == torch.device("cpu")


# Ranks


def describe(shape: MeshShape) -> dict[str, tuple[int, list[int], bool]]:
    mesh = start(shape, device="cpu")
    found: dict[str, tuple[int, list[int], bool]] = {}
    for name in AXES:
        axis = mesh.axis(name)
        assert (axis.size, axis.rank) == (mesh.size(name), mesh.rank(name))
        if axis.group is not None:
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
            total = torch.ones(())
            dist.all_reduce(total, group=axis.group)
            assert total == axis.size
        found[name] = (axis.rank, list(axis.ranks), axis.group is mesh.group("world"))
    return found


def test_axes_have_groups_and_share_equal_ones() -> None:
    everybody = (2, [0, 1, 2, 3], True)
    wanted = {
        "shard": (0, [2, 3], False),
        "replicate": (1, [0, 2], False),
        "pipeline": (0, [2], False),
        "data": everybody,
        "world": everybody,
        "tensor": (0, [2], False),
    }
    found = run_ranks(describe, 4, MeshShape(shard=2, replicate=2))
    assert {name: axis for name, axis in found[2].items() if name in wanted} == wanted
    found = run_ranks(describe, 4, MeshShape(shard=2, pipeline=2))
    assert found[1]["pipeline"] == (0, [1, 3], False)
    assert found[1]["data"] == found[1]["shard"] == (1, [0, 1], False)


@on_ranks(2)
def test_stop_leaves_the_callers_group_running() -> None:
    """A default group that runs already is borrowed, and a new mesh can start."""
    for _ in range(2):
        mesh = start(lambda world: MeshShape(shard=world), device="cpu", timeout=20)
        assert mesh.group("world") is not dist.group.WORLD
        mesh.stop()
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 2


def _launch(rank: int, world: int, port: int) -> None:
    """Leave the harness's group and set torchrun's variables."""
    dist.destroy_process_group()
    values = (str(rank), str(world), str(rank), "127.0.0.1", str(port))
    os.environ.update(zip(LAUNCHED, values, strict=True))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@on_ranks(2)
def test_ranks_join_from_the_launchers_variables_and_listen_on_loopback_alone(port: int) -> None:
    _launch(dist.get_rank(), 2, port)
    mesh = start(lambda world: MeshShape(shard=world), device="cpu", timeout=20)
    total = torch.full((), float(mesh.rank()))
    dist.all_reduce(total, group=mesh.group("shard"))
    assert total == 1 and dist.is_initialized()
    opened = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    tables = [Path("/proc/net", table).read_text() for table in ("tcp", "tcp6")]
    listening = [
        words for table in tables for words in map(str.split, table.splitlines()) if words[3] == "0A"
    ]
    mine = {words[1].split(":")[0] for words in listening if f"socket:[{words[9]}]" in opened}
    assert mine == {"0100007F"}
    mesh.stop()
    mesh.stop()
    assert not dist.is_initialized()


@on_ranks(1)
def test_a_rank_that_never_joins_is_an_error(port: int) -> None:
    _launch(0, 2, port)
    told = r"all 2 ranks must join within 1 s; got .* on rank 0\. .*MASTER_ADDR '127.0.0.1'"
    with pytest.raises(RankError, match=told):
        start(lambda world: MeshShape(shard=world), device="cpu", timeout=1.0)


def test_every_start_has_a_name_of_its_own_in_a_store_that_is_kept() -> None:
    """An agent keeps its store, with entries of ranks that are gone."""
    store, names = dist.HashStore(), []  # type: ignore[attr-defined]
    for _ in range(2):
        with ThreadPoolExecutor() as pool:
            limit = timedelta(seconds=20)
            begun = [pool.submit(rendezvous._name, store, rank, 3, limit) for rank in range(3)]
            found = [each.result() for each in begun]
        assert len(set(found)) == 1
        names.append(found[0])
    assert names[0] != names[1]
