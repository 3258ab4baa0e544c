"""Exports have the same bits from every stage and mesh, and leave nothing half written when a rank fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import zerodrift as zd
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.checkpoint.files import new_folder
from zerodrift.engine.engine import Engine
from zerodrift.errors import CheckpointError, RankError
from zerodrift.model.safetensors import list_tensors
from zerodrift.weights import exporter as exporting
from zerodrift.weights.writer import SafetensorsWriter

ROUTERS = {"precision": {"rules": [{"match": "*.router.*", "pin": "fp32"}]}}


def train_engine(stage: int, mode: str = "bf16", **rest: Any) -> Engine:
    """Train a few steps, so that masters have bits that storage has not."""
    model = GPT(moe=True)
    model.layers[0].norm1.weight.requires_grad_(False)
    engine = make(config(stage, mode, **{**ROUTERS, **rest}), model)
    for step in range(2):
        engine.backward(engine(batch(step, engine.mesh.rank("data"))))
        engine.step()
    return engine


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    list_tensors(folder)
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def cases(root: str, stages: list[int], rest: dict[str, Any]) -> None:
    """Compare exports of every stage in the plan's dtypes, in fp32 and in 16 bits."""
    for stage in stages:
        folder = Path(root) / str(stage)
        engine = train_engine(stage, **rest)
        result = zd.export(engine, folder / "plan", max_shard_size="20KB")
        assert len(result.files) > 2
        assert result.bytes == sum(value.nbytes for value in tensors(folder / "plan").values())
        zd.export(engine, folder / "fp32", dtype="fp32")
        zd.export(engine, folder / "half", dtype="bf16", max_shard_size=None)
        _compare(engine, folder)
        engine.destroy()


def _compare(engine: Engine, folder: Path) -> None:
    plan, wide, half = (tensors(folder / name) for name in ("plan", "fp32", "half"))
    rows = {row.name: row for row in engine.plan.rows}
    assert plan.keys() == wide.keys() == half.keys() == {*rows, "scale"}
    assert "head.weight" not in plan, "tied: saved once"
    with engine.gathered() as shown:
        for name, row in rows.items():
            master = engine.parameter(name).master
            pinned = row.columns.pinned
            assert pinned == (".router." in name)
            assert plan[name].dtype is (torch.float32 if pinned else torch.bfloat16)
            assert torch.equal(plan[name], master if pinned else shown[name]), name
            assert torch.equal(wide[name], master), name
            assert torch.equal(half[name], plan[name]), name
    assert torch.equal(plan["scale"], torch.tensor(0.3333333))


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_every_stage_writes_what_the_engine_holds(tmp_path: Path, world: int) -> None:
    run_ranks(cases, world, str(tmp_path), [0, 1, 2, 3], {}, timeout=120)
    # One micro-batch: every stage has the same bits, so the files are the same.
    for kind in ("plan", "fp32", "half"):
        files = [sorted((tmp_path / str(stage) / kind).iterdir()) for stage in range(4)]
        for other in files[1:]:
            assert [path.name for path in other] == [path.name for path in files[0]]
            assert all(a.read_bytes() == b.read_bytes() for a, b in zip(files[0], other, strict=True))


@pytest.mark.slow
def test_replicas_write_different_slices(tmp_path: Path) -> None:
    run_ranks(cases, 4, str(tmp_path), [0, 3], {"sharding": {"replicate": 2}}, timeout=150)


@on_ranks(2)
def test_each_rank_writes_its_share(tmp_path: Path) -> None:
    """A frozen row is its storage, widened."""
    writers: list[SafetensorsWriter] = []

    class Watched(SafetensorsWriter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            writers.append(self)

    exporting.SafetensorsWriter = Watched  # type: ignore[assignment,misc]
    engine = train_engine(3)
    zd.export(engine, tmp_path / "model", dtype="fp32")
    counts = engine.comm.all_gather_object(writers[-1].written)
    found = tensors(tmp_path / "model")
    total = sum(value.nbytes for value in found.values())
    assert sum(counts) == total and max(counts) < 0.75 * total
    row, frozen = engine.plan.row("layers.0.norm1.weight"), found["layers.0.norm1.weight"]
    assert row is not None and row.columns.update is None
    assert frozen.dtype is torch.float32 and torch.equal(frozen, torch.ones(32))


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def check_refusals(root: str) -> None:
    """Check errors, each on every rank, which leave nothing."""
    engine = train_engine(2)
    rank, folder = engine.mesh.rank(), Path(root)

    def attempt(expected: str, folder: Path | str = folder / "a", **rest: Any) -> None:
        with pytest.raises(zd.ZerodriftError, match=expected):
            zd.export(engine, folder, **rest)

    attempt("must not be there, or be empty", folder / "there")
    attempt("must be a folder", folder / "there" / "thing")
    attempt("must be fp32, bf16, fp16, fp8-128x128", dtype="int8")
    attempt("must be a number of bytes", max_shard_size="many")
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")):
        attempt("No space left on device.*Make room")
    broken = {"side_effect": OSError(5, "Input/output error")} if rank else {"new": SafetensorsWriter.write}
    with mock.patch.object(SafetensorsWriter, "write", **broken):
        attempt("Input/output error")
    home = Path.cwd()
    (folder / f"machine{rank}").mkdir()
    os.chdir(folder / f"machine{rank}")
    attempt("every rank sees; got rank 1", "a")
    os.chdir(home)
    attempt("must be a model's folder", folder / "there", overwrite=True)
    attempt("must not be there, or be empty", folder / "before")
    zd.export(engine, folder / "before", overwrite=True)


def test_errors_are_everybodys_and_leave_nothing(tmp_path: Path) -> None:
    for file in (tmp_path / "there" / "thing", tmp_path / "before" / "thing.safetensors"):
        file.parent.mkdir()
        file.touch()
    run_ranks(check_refusals, 2, str(tmp_path), timeout=60)
    assert left(tmp_path / "there") == ["thing"] and not (tmp_path / "before" / "thing.safetensors").exists()
    assert left(tmp_path) == ["before", "machine0", "machine1", "there"]
    assert left(tmp_path / "machine0") == left(tmp_path / "machine1") == []


def killed(root: str, dying: int) -> str:
    engine = train_engine(3)
    if engine.mesh.rank() == dying:
        SafetensorsWriter.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        zd.export(engine, Path(root) / "model")
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dying", [0, 1])
def test_a_killed_rank_leaves_no_folder(tmp_path: Path, dying: int) -> None:
    found = run_ranks(killed, 2, str(tmp_path), dying, timeout=60, dying=[dying])
    assert found[1 - dying], "the other rank raises"
    assert not (tmp_path / "model").exists()
    if dying == 1:
        assert left(tmp_path) == [], "rank 0 cleans up"
    # What the death of rank 0 left behind goes with the next export.
    run_ranks(again, 2, str(tmp_path), timeout=60)
    assert left(tmp_path) == ["model"]
    assert tensors(tmp_path / "model")


def again(root: str) -> None:
    zd.export(train_engine(3), Path(root) / "model")


def test_a_replacement_that_never_came_is_undone(tmp_path: Path) -> None:
    (tmp_path / ".model.old-4f1c09ab").mkdir()
    (tmp_path / ".model.old-4f1c09ab" / "file").touch()
    (tmp_path / ".model.old-mine").mkdir()
    with pytest.raises(CheckpointError, match="must not be there"):
        new_folder(tmp_path / "model")
    assert left(tmp_path) == [".model.old-mine", "model"], "a name that no writer gives is somebody else's"
    assert left(tmp_path / "model") == ["file"]
