"""The mesh on real ranks: coordinates, groups, joining, and `stop`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import on_ranks
from zerodrift.comm import rendezvous
from zerodrift.comm.mesh import AXES, start
from zerodrift.errors import MeshError, RankError
from zerodrift.mesh import MeshShape, fit
from zerodrift.train.loop import launcher

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def launch(patch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    """Set a launcher's variables in an environment without any."""
    for name in LAUNCHED:
        patch.delenv(name, raising=False)
    for name, value in values.items():
        patch.setenv(name, value)


@pytest.mark.parametrize("launched", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch, launched: dict[str, str]) -> None:
    launch(monkeypatch, launched)
    mesh = start(lambda world: fit(world, 0, 0, 1), device="cpu")
    assert {(mesh.size(axis), mesh.rank(axis), mesh.group(axis)) for axis in AXES} == {(1, 0, None)}
    assert not dist.is_initialized()
    mesh.stop()
    mesh.stop()


THREE = dict(zip(LAUNCHED, ("0", "3", "0", "127.0.0.1", "1"), strict=True))
REFUSED = [
    ({"RANK": "0"}, "`WORLD_SIZE`: must be a whole number; got nothing"),
    ({"RANK": "zero", "WORLD_SIZE": "2"}, "`RANK`: must be a whole number; got 'zero'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "`RANK`: must be at least 0 and below WORLD_SIZE=2; got 2"),
    ({"RANK": "1", "WORLD_SIZE": "4"}, "1. `MASTER_ADDR`: must be set to join 4 ranks"),
    (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "99999"},
        "`MASTER_PORT`: must be a port, 0 to 65535; got '99999'",
    ),
    (THREE, "replicate 2 x shard 2 = 4 for 3. Start 4 ranks"),
]


@pytest.mark.parametrize(("launched", "shown"), REFUSED)
def test_variables_that_contradict_each_other_are_refused_before_anybody_joins(
    monkeypatch: pytest.MonkeyPatch, launched: dict[str, str], shown: str
) -> None:
    launch(monkeypatch, launched)
    with pytest.raises(MeshError, match=re.escape(shown)):
        start(MeshShape(shard=2, replicate=2), device="cpu")
    with contextlib.nullcontext() if launched is THREE else pytest.raises(MeshError, match=re.escape(shown)):
        launcher.join()
    assert not dist.is_initialized()


def test_a_device_that_cannot_train_is_refused_and_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """mps has no float64, though it has streams since torch 2.15."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("mps"))
    told = r"must be a device with streams and float64; got 'mps'\. Use `cpu`\."
    with pytest.raises(MeshError, match=told):
        start(MeshShape(), device="mps")
    assert start(MeshShape()).device == torch.device("cpu")
    with pytest.raises(MeshError, match="must be `cpu`, `cuda` or the accelerator of this torch; got 'meta'"):
        start(MeshShape(), device="meta")


@on_ranks(4)
def test_axes_have_groups_and_share_equal_ones() -> None:
    mesh = start(MeshShape(shard=2, replicate=2), device="cpu")
    rank = mesh.rank()
    wanted = {
        "shard": [rank // 2 * 2, rank // 2 * 2 + 1],
        "replicate": [rank % 2, rank % 2 + 2],
        "pipeline": [rank],
        "data": [0, 1, 2, 3],
        "world": [0, 1, 2, 3],
    }
    for name, ranks in wanted.items():
        axis = mesh.axis(name)
        assert list(axis.ranks) == ranks and axis.ranks[axis.rank] == rank, name
        assert (axis.group is mesh.group("world")) == (len(ranks) == 4), name
        if axis.group is not None:
            assert dist.get_process_group_ranks(axis.group) == ranks, name


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


@pytest.mark.parametrize("host", ["127.0.0.1", "no..host"])
@on_ranks(1)
def test_a_rank_that_never_joins_is_waited_for_with_a_word_and_an_error(port: int, host: str) -> None:
    _launch(0, 2, port)
    said: list[str] = []
    told = rf"all 2 ranks must join within 1 s; got .* on rank 0\. .*MASTER_ADDR '{host}'"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankError, match=told):
        patch.setenv("MASTER_ADDR", host)
        patch.setattr(rendezvous, "PATIENCE", 0.1)
        patch.setattr(logging.getLogger("zerodrift"), "warning", lambda text, *of: said.append(text % of))
        start(lambda world: MeshShape(shard=world), device="cpu", timeout=1.0)
    unresolved = ", a name that this machine cannot resolve," if host == "no..host" else ""
    waits = f"rank 0 waits for rank 1 at MASTER_ADDR '{host}'{unresolved} MASTER_PORT {port}"
    assert len(said) == 1 and waits in said[0], said
