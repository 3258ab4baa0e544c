"""Weights in and out of safetensors on ranks: bits, bytes read, initial values, and errors of every rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerodrift as zd
from tests.checkpoint_files import tensors
from tests.numerics import runs
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, diff, masters
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.refusals import error_of
from zerodrift import empty, initialize, load_weights
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, RankError
from zerodrift.optim.rounding import round_away
from zerodrift.policy.decisions import Master
from zerodrift.weights.reader import SafetensorsReader
from zerodrift.weights.writer import SafetensorsWriter

MASTERS = {"split": ("bf16", {}), "fp32": ("bf16", {"master": "fp32"}), "same": ("fp32", {})}


def given(dtype: torch.dtype = torch.float32) -> GPT:
    """Return the model of the files: values that do not fit bf16, ties among them."""
    model = GPT(layers=1, moe=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            # Halfway between two bf16 values: rounded away by a split master, to even by a cast.
            parameter.view(-1)[:1] = torch.tensor(1.0 + 2.0**-8)
    return model.to(dtype)


def save(model: nn.Module, folder: Path) -> Path:
    """Save two files with an index, tied names once."""
    folder.mkdir(parents=True, exist_ok=True)
    seen: dict[int, str] = {}
    state = {k: v for k, v in model.state_dict().items() if seen.setdefault(v.data_ptr(), k) == k}
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(where.values()):
        save_file({name: state[name].contiguous() for name in state if where[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def size_of(folder: Path) -> int:
    """Return the bytes of tensors in the files of a folder."""
    return sum(value.nbytes for value in tensors(folder).values())


def make(stage: int, scheme: str = "split", **rest: Any) -> Engine:
    mode, precision = MASTERS[scheme]
    with empty():
        model = GPT(layers=1, moe=True, seed=rest.pop("seed", 0))
    written = config(stage, mode, precision=precision, **rest.pop("config", {}))
    return initialize(model, config=written, device="cpu", quiet=True, **rest)


def wrong(engine: Engine, want: nn.Module) -> list[str]:
    """Return the names whose master, storage or buffer are not the bits of `want`."""
    found = []
    state = want.state_dict()
    with engine.gathered() as shown:
        for row in engine.plan.rows:
            values = state[row.name].float()
            if not torch.equal(engine.parameter(row.name).master, values):
                found.append(f"master {row.name}")
            split = row.columns.update is not None and row.columns.update.master is Master.SPLIT
            rounded = round_away(values) if split else values
            if not torch.equal(shown[row.name], rounded.to(shown[row.name].dtype)):
                found.append(f"shown {row.name}")
    for name, buffer in engine.module.named_buffers():
        if not torch.equal(buffer, state[name]):
            found.append(f"buffer {name}")
    return found


def load(folder: Path, want: nn.Module, stage: int, scheme: str, replicate: int = 1) -> tuple[list[str], int]:
    """Load on this rank; return the wrong names, and the bytes that were read."""
    read, plain = 0, SafetensorsReader._bytes

    def count(reader: Any, stored: Any, first: int, into: torch.Tensor) -> None:
        nonlocal read
        read += into.numel() * into.element_size()
        plain(reader, stored, first, into)

    rest = {"sharding": {"replicate": replicate}} if replicate > 1 else {}
    with mock.patch.object(SafetensorsReader, "_bytes", count):
        engine = make(stage, scheme, weights=folder, config=rest)
    found = wrong(engine, want), read
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "replicate", "stage", "scheme", "dtype"),
    [
        (1, 1, 0, "fp32", torch.float32),
        (2, 1, 1, "split", torch.float32),
        (2, 1, 3, "same", torch.float8_e4m3fn),
        (2, 1, 3, "split", torch.bfloat16),
        (4, 2, 2, "fp32", torch.float16),
        (4, 2, 3, "same", torch.float32),
    ],
)
def test_masters_have_the_bits_of_the_files_and_every_byte_is_read_once(
    tmp_path: Path, world: int, replicate: int, stage: int, scheme: str, dtype: torch.dtype
) -> None:
    model = given(dtype)
    model.scale = torch.tensor(0.125)  # a buffer keeps its own dtype or narrower
    folder = save(model, tmp_path)
    runs = run_ranks(load, world, folder, model.float(), stage, scheme, replicate)
    assert [differs for differs, _ in runs] == [[]] * world
    size, per_rank = size_of(folder), [read for _, read in runs]
    # Every replica reads all of it but the buffers, which rank 0 reads for everybody.
    assert sum(per_rank) == size * replicate - 4 * (replicate - 1)
    assert max(per_rank) < 1.2 * size * replicate / world + 70_000


@on_ranks(2, timeout=120)
def test_loading_later_gives_the_same_bits(tmp_path: Path) -> None:
    """Load into an engine that has trained a step: values change, moments do not, and it trains on."""
    if torch.distributed.get_rank() == 0:
        save(given(), tmp_path)
    torch.distributed.barrier()
    for scheme in MASTERS:
        losses = set()
        for stage in (1, 3):
            engine = make(stage, scheme)
            engine.backward(engine(batch(0, engine.mesh.rank())))
            engine.step()
            moments = engine.parameter("layers.0.norm1.weight").state["exp_avg"]
            assert load_weights(engine, tmp_path, quiet=True).bytes == size_of(tmp_path), (stage, scheme)
            assert torch.equal(engine.parameter("layers.0.norm1.weight").state["exp_avg"], moments)
            assert wrong(engine, given()) == [], (stage, scheme)
            loss = engine(batch(1, engine.mesh.rank()))
            engine.backward(loss)
            engine.step()
            losses.add(loss.item())
            engine.destroy()
        assert len(losses) == 1, "all stages compute the same loss"


class Bare(nn.Module):
    """A model with every way in which a parameter gets its initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 24, padding_idx=2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 40) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(24) * 1.0)
        self.big = nn.Parameter(torch.empty(300, 24))
        nn.init.trunc_normal_(self.big, std=0.02)
        self.head = nn.Linear(24, 300, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._again)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, gain=0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def first_values() -> list[dict[str, torch.Tensor]]:
    found = []
    for stage, backend in ((0, "native"), (2, "native"), (3, "native"), (3, "fsdp2")):
        torch.manual_seed(100 + torch.distributed.get_rank())  # rank 0's seed is everybody's
        with empty():
            model = Bare()
        written = config(stage, "bf16", backend=backend, precision={"storage": "fp32"})
        engine = initialize(model, config=written, device="cpu", quiet=True)
        found.append(masters(engine))
        engine.destroy()
    return found


def test_first_values_are_the_same_bits_at_every_stage_and_world_size() -> None:
    first, *others = [
        values for world in (1, 3) for rank in run_ranks(first_values, world) for values in rank
    ]
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []
    gram = first["layers.0.linear2.weight"] @ first["layers.0.linear2.weight"].T
    assert torch.allclose(gram, 0.25 * torch.eye(24), atol=1e-5)
    assert not torch.equal(first["layers.0.linear1.weight"], first["layers.1.linear1.weight"])
    assert 0.01 < first["big"].std() < 0.03 and torch.equal(first["scale"], torch.ones(24))


def test_an_optimizer_over_parameters_without_memory_trains_as_over_others(tmp_path: Path) -> None:
    """Parameters stay the same objects, so groups that were made before the engine stay valid."""
    folder = save(given(), tmp_path)
    found = []
    for without in (False, True):
        with empty() if without else contextlib.nullcontext():
            model = GPT(layers=1, moe=True)
        kept = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": kept[:5], "lr": 0.0}, {"params": kept[5:], "lr": 1e-2}])
        engine = initialize(model, optimizer, config(3, "bf16"), weights=folder, device="cpu", quiet=True)
        for step in range(2):
            engine.backward(engine(batch(step)))
            engine.step()
        found.append(masters(engine))
    assert diff(*found) == []
    want = given().state_dict()
    for place, (name, _) in enumerate(model.named_parameters()):
        assert torch.equal(found[1][name], want[name]) == (place < 5), name


def refused(broken: Path, fails: bool) -> str:
    """Return the error of a rank when the files are broken for rank 1 alone."""
    alone = torch.distributed.get_rank() == 1
    plain = os.preadv

    def read(number: int, rooms: list[memoryview], place: int) -> int:
        if place > 20_000:
            raise OSError(5, "Input/output error")
        return plain(number, rooms, place)

    if alone and fails:
        os.preadv = read
    return error_of(ModelError, make, 3, weights=broken if alone else broken.parent / "sound")


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "short": (lambda data: data[:-64], "It was cut short"),
    "header": (lambda data: data[:8] + b"x" + data[9:], "must be JSON"),
    "vanishes": (lambda data: data, "must be readable in it"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_are_broken_for_one_rank_are_an_error_on_all(tmp_path: Path, kind: str) -> None:
    save(given(), tmp_path / "sound")
    file = save(given(), tmp_path / "broken") / "part-1.safetensors"
    harm, expected = BROKEN[kind]
    file.write_bytes(harm(file.read_bytes()))
    told = run_ranks(refused, 2, tmp_path / "broken", kind == "vanishes")
    assert all(expected in text for text in told), told


@on_ranks(2)
def test_a_model_with_memory_on_one_rank_only_is_an_error_on_all() -> None:
    with empty() if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
        model = nn.Linear(300, 300)
    with pytest.raises(RankError, match="must be the same on every rank"):
        initialize(model, config=config(3, "fp32"), device="cpu", quiet=True)


ROUTERS = {"precision": {"rules": [{"match": "*.router.*", "pin": "fp32"}]}}


def train_engine(stage: int) -> Engine:
    """Train a few steps, so that masters have bits that storage has not."""
    model = GPT(moe=True)
    model.layers[0].norm1.weight.requires_grad_(False)
    engine = runs.make(config(stage, "bf16", **ROUTERS), model)
    for step in range(2):
        engine.backward(engine(batch(step, engine.mesh.rank("data"))))
        engine.step()
    return engine


def exports(root: str) -> None:
    """Export at every stage, in the plan's dtypes, in fp32 and in 16 bits, beside what the engine holds."""
    for stage in range(4):
        folder = Path(root) / str(stage)
        engine = train_engine(stage)
        result = zd.export(engine, folder / "plan", max_shard_size="20KB")
        zd.export(engine, folder / "fp32", dtype="fp32")
        zd.export(engine, folder / "half", dtype="bf16", max_shard_size=None)
        plan, wide, half = (tensors(folder / name) for name in ("plan", "fp32", "half"))
        assert len(result.files) > 2 and result.bytes == size_of(folder / "plan")
        rows = {row.name: row for row in engine.plan.rows}
        assert plan.keys() == wide.keys() == half.keys() == {*rows, "scale"}
        assert "head.weight" not in plan, "tied: saved once"
        assert torch.equal(plan["scale"], torch.tensor(0.3333333))
        with engine.gathered() as shown:
            for name, row in rows.items():
                master, pinned = engine.parameter(name).master, row.columns.pinned
                assert pinned == (".router." in name)
                assert plan[name].dtype is (torch.float32 if pinned else torch.bfloat16)
                assert torch.equal(plan[name], master if pinned else shown[name]), name
                assert torch.equal(wide[name], master) and torch.equal(half[name], plan[name]), name
        engine.destroy()


def test_every_stage_writes_what_the_engine_holds(tmp_path: Path) -> None:
    """One micro-batch: every stage has the same bits, so the files are the same."""
    run_ranks(exports, 2, str(tmp_path))
    for kind in ("plan", "fp32", "half"):
        files = [sorted((tmp_path / str(stage) / kind).iterdir()) for stage in range(4)]
        for other in files[1:]:
            assert [path.name for path in other] == [path.name for path in files[0]]
            assert all(a.read_bytes() == b.read_bytes() for a, b in zip(files[0], other, strict=True))


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def check_refusals(root: str) -> None:
    """Check errors, each on every rank, which leave nothing."""
    engine = train_engine(2)
    rank, folder = engine.mesh.rank(), Path(root)

    def attempt(expected: str, folder: Path | str = folder / "a", **rest: Any) -> None:
        with pytest.raises(zd.ZerodriftError, match=expected):
            zd.export(engine, folder, **rest)

    attempt("must not exist, or be empty", folder / "there")
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
    attempt("must not exist, or be empty", folder / "before")
    zd.export(engine, folder / "before", overwrite=True)


def test_errors_are_everybodys_and_leave_nothing(tmp_path: Path) -> None:
    for file in (tmp_path / "there" / "thing", tmp_path / "before" / "thing.safetensors"):
        file.parent.mkdir()
        file.touch()
    run_ranks(check_refusals, 2, str(tmp_path), timeout=60)
    assert left(tmp_path / "there") == ["thing"] and not (tmp_path / "before" / "thing.safetensors").exists()
    assert left(tmp_path) == ["before", "machine0", "machine1", "there"]
    assert left(tmp_path / "machine0") == left(tmp_path / "machine1") == []


def export_of(root: str, dying: int = -1) -> str:
    """Export, and return the error where another rank dies."""
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
    found = run_ranks(export_of, 2, str(tmp_path), dying, timeout=60, dying=[dying])
    assert found[1 - dying], "the other rank raises"
    assert not (tmp_path / "model").exists()
    if dying == 1:
        assert left(tmp_path) == [], "rank 0 cleans up"
    # What the death of rank 0 left behind goes with the next export.
    run_ranks(export_of, 2, str(tmp_path))
    assert left(tmp_path) == ["model"] and tensors(tmp_path / "model")
